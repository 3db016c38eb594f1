"""The hash model behind `worker.engine_interface`: its KV lies in the worker's slots, and steps read it from there.

Sampling, penalties, grammars and log-probabilities are those of the native engine (`worker.transformer`).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine import KvGroupShape
from engine.rolling import DEFAULT_SINKS, RollingWindow
from kvpool import KvSpec, Provenance
from messenger import Messenger
from messenger.staging import READY, Ticket
from tools.prove.hash_model import Hashes, HashModel, Words
from tools.prove.instances import running_process
from tools.prove.world.scheduler import world
from worker.engine_interface import OnLayer, SampledToken, SteppedEngine
from worker.errors import RequestRefused
from worker.policy import BatchLimits, PrefillChunk, WindowSlots
from worker.request import EngineSequence, Request
from worker.slot_memory import EngineMemory, SlotMemory, spec_of, windows_of
from worker.transformer import sample_tokens, score_prompts


def hash_model(name: str, *, vocab_size: int, head_dim: int) -> HashModel:
    """Return the model of a name, which may end with the number of tokens that each layer sees: hash-0-12-12.

    A token has k and v of one head in float16 in each layer.
    """
    base, *windows = name.split("-")
    return HashModel(base, tuple(map(int, windows)) or (0, 0, 0), head_dim, vocab_size)


@dataclass(frozen=True)
class HashLimits:
    """The properties of the model that a worker needs."""

    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


class HashMemory(EngineMemory):
    """Slots in host memory only: pushed data arrives in place."""

    def __init__(self, spec: KvSpec, num_slots: int, messenger: Messenger, windows: WindowSlots | None) -> None:
        super().__init__(spec, num_slots, messenger, windows=windows)
        words = self._array.view(np.uint32)
        self._layers: list[Words] = []
        for layer in range(len(self.place_of_layer)):
            group, index = self.place_of_layer[layer]
            rows = spec.groups[group].token_row_nbytes // 4
            shape = (self.slots_per_group[group], len(spec.groups[group].layers), 2, self.block_tokens, rows)
            begin = self._base[group] // 4
            self._layers.append(words[begin : begin + int(np.prod(shape))].reshape(shape)[:, index])

    def close(self) -> None:
        self._layers = []
        super().close()

    def write(self, layer: int, slots: NDArray[np.int32], start: int, words: Words) -> None:
        """Write `words` [n, words] of tokens from position `start` on; `slots` is the sequence's table."""
        positions = np.arange(start, start + len(words))
        where = self._where(layer, slots, positions)
        rows = words.reshape(len(words), 2, -1)
        self._layers[layer][where, :, positions % self.block_tokens] = rows

    def read(self, layer: int, slots: NDArray[np.int32], start: int, end: int) -> Words:
        """Return the words [n, words] that the slots hold of tokens [start, end)."""
        positions = np.arange(start, end)
        where = self._where(layer, slots, positions)
        found = self._layers[layer][where, :, positions % self.block_tokens]
        return np.ascontiguousarray(found.reshape(len(positions), -1))

    def _where(self, layer: int, slots: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the slots with these positions within the layer's group."""
        where = self.numbers(self.place_of_layer[layer][0], slots[positions // self.block_tokens])
        if len(where) and where.min() < 0:
            world().problem(f"wrong tokens: a step uses a block that has no slot in the window of layer {layer}")
        return where

    def slots_at(self, offsets: NDArray[np.int64]) -> list[int]:
        """Return the blocks with the slots that begin before these offsets of the region.

        The slot of a window may have no block now: then -1.
        """
        found = list[int]()
        for offset in offsets.tolist():
            group = bisect.bisect_right(self._base, offset) - 1
            slot = (offset - self._base[group]) // self._slot_nbytes[group]
            if self.windows is not None and group in self.spec.windowed:
                slot = next(iter(np.flatnonzero(self.windows.slot_of == slot).tolist()), -1)
            found.append(slot)
        return found

    def groups_to_host(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        return READY

    def groups_to_device(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        return READY

    def differ(
        self, group: int, given: NDArray[np.uint8], computed: NDArray[np.uint8], valid: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        shape = (len(given), -1, self.block_tokens, self.spec.token_row_nbytes(group))
        unequal = (given.reshape(shape) != computed.reshape(shape)).any(axis=(1, 3))
        counts: NDArray[np.bool_] = np.arange(self.block_tokens) < valid[:, None]
        found: NDArray[np.bool_] = (unequal & counts).any(axis=1)
        return found


class HashSteps:
    """Runner of the hash model's steps."""

    def __init__(self, model: HashModel, memory: HashMemory) -> None:
        self._model, self._memory = model, memory

    def run(
        self,
        decoding: Sequence[EngineSequence],
        chunks: Sequence[tuple[EngineSequence, PrefillChunk]],
        on_layer: OnLayer | None,
        before_layer: OnLayer | None = None,
    ) -> list[SampledToken | None]:
        """As StepRunner.run."""
        if on_stall := running_process().objects.pop("on stall", []):
            for _, told in on_stall:
                told()
            world().park()
        parts = [(s, s.num_computed, s.num_tokens) for s in decoding] + [(s, c.start, c.end) for s, c in chunks]
        tables = [self._table(*part) for part in parts]  # first: they may be replaced by longer ones meanwhile
        seen = [np.zeros(end - start, np.uint64) for _, start, end in parts]
        tokens = sum(end - start for _, start, end in parts)
        num_layers = len(self._model.windows)
        for layer in range(num_layers):
            if before_layer is not None:
                before_layer(layer)
            for i, (sequence, start, end) in enumerate(parts):
                seen[i] = self._layer(layer, tables[i], sequence, start, end, seen[i])
            step_s = world().pace.step_s + tokens * world().pace.token_s
            world().park(step_s / num_layers * world().chance.uniform(0.5, 1.5))
            if on_layer is not None:
                on_layer(layer)
        rows, logits = list[EngineSequence](), list[NDArray[np.float32]]()
        for i, (sequence, start, _) in enumerate(parts):
            is_last = i < len(decoding) or chunks[i - len(decoding)][1].last
            every = sequence.prompt_scores is not None and start < sequence.prompt_len
            logits += [self._model.logits(each) for each in (seen[i] if every else seen[i][-1:] if is_last else ())]
            if is_last:
                rows.append(sequence)
        if not logits:
            return []
        scored = score_prompts(torch.from_numpy(np.stack(logits)), len(decoding), chunks)
        return sample_tokens(scored, rows)

    def _table(self, sequence: EngineSequence, start: int, end: int) -> NDArray[np.int32]:
        """Return the slot of each block of tokens [0, end), as far as tokens [start, end) see it."""
        rolling, table = sequence.rolling, sequence.table
        if rolling is None:
            return table
        turns = table[np.arange(-(-end // rolling.block_tokens)) % (len(table) - 1)]
        if rolling.start(start) != sequence.slid:
            self._slide(sequence, turns, rolling)
            sequence.slid, sequence.has_sinks = rolling.start(start), True
        return turns

    def _slide(self, sequence: EngineSequence, table: NDArray[np.int32], rolling: RollingWindow) -> None:
        """Copy the sinks to their slot before the first slide; layers with windows see none."""
        if not sequence.has_sinks and rolling.sinks:
            for layer, window in enumerate(self._model.windows):
                if not window:
                    words = self._memory.read(layer, table, 0, rolling.sinks)
                    self._memory.write(layer, sequence.table[-1:], 0, words)

    def _layer(
        self, layer: int, table: NDArray[np.int32], sequence: EngineSequence, start: int, end: int, below: Hashes
    ) -> Hashes:
        """Write the layer of tokens [start, end); return what they see of it, read back from the slots."""
        model, memory, rolling = self._model, self._memory, sequence.rolling
        memory.write(layer, table, start, model.layer_words(layer, start, sequence.tokens[start:end], below))
        window, slid = model.windows[layer], 0 if rolling is None else rolling.start(start)
        first = max(slid, start + 1 - window) if window else slid
        found = model.seen(layer, model.read(first, memory.read(layer, table, first, end)), first, start)
        if rolling is not None and rolling.sinks and slid and not window:
            sinks = memory.read(layer, sequence.table[-1:], 0, rolling.sinks)
            found = found + model.read(0, sinks).sum(dtype=np.uint64)
        return found

    def settle(self) -> None:
        """Nothing is queued ahead."""


class HashEngine(SteppedEngine):
    """The hash model as a worker's engine."""

    label = "hash"

    def __init__(self, model: HashModel, limits: HashLimits) -> None:
        self.model = model
        self.config = limits
        self.fingerprint = hashlib.blake2b(model.name.encode(), digest_size=16).hexdigest()

    def new_memory(
        self, messenger: Messenger, *, num_slots: int, block_tokens: int, limits: BatchLimits | None = None
    ) -> HashMemory:
        spec = spec_of(self._groups(), block_tokens)
        return HashMemory(spec, num_slots, messenger, windows_of(spec, num_slots, limits))

    def _groups(self) -> list[KvGroupShape]:
        groups: dict[int, KvGroupShape] = {}
        for layer, window in enumerate(self.model.windows):
            kind = "window" if window else "full"
            known = groups.get(window) or KvGroupShape(kind, window, (), 1, self.model.words, "float16")
            groups[window] = replace(known, layers=(*known.layers, layer))
        return [groups[window] for window in sorted(groups)]

    def new_stored(self, memory: EngineMemory, messenger: Messenger) -> tuple[SlotMemory, Provenance]:
        return memory, Provenance.EXACT

    def steps(self, memory: EngineMemory) -> HashSteps:
        assert isinstance(memory, HashMemory)
        return HashSteps(self.model, memory)

    def warm_up(self) -> None:
        """Nothing has to be compiled."""

    @property
    def default_sinks(self) -> int:  # type: ignore[override]
        """As that of the transformer."""
        return DEFAULT_SINKS if 0 in self.model.windows else 0

    def check(self, request: Request) -> None:
        rolling, windows = request.rolling, self.model.windows
        if rolling is not None:
            if rolling.sinks and 0 not in windows:
                raise RequestRefused("bad_endless", "endless: sinks must be 0, since all layers have windows")
            if 0 in windows and rolling.window < rolling.block_tokens + max(windows):
                raise RequestRefused("bad_endless", "endless: window must be a block more than the model's own")
