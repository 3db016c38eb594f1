"""The hash model behind `worker.engine_interface`: its KV lies in the worker's slots, and steps read it from there.

Sampling, penalties, grammars and log-probabilities are those of the native engine (`worker.transformer`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine import KvGroupShape
from kvpool import KvSpec, Provenance
from messenger import Messenger
from messenger.staging import READY, Ticket
from tools.prove.hash_model import Hashes, HashModel, Words
from tools.prove.world.scheduler import world
from worker.engine_interface import OnLayer, SampledToken, SteppedEngine
from worker.errors import RequestRefused
from worker.policy import BatchLimits, PrefillChunk, WindowSlots
from worker.request import EngineSequence, Request
from worker.slot_memory import EngineMemory, SlotMemory, spec_of, windows_of
from worker.transformer import sample_tokens, score_prompts

_HEAD_DIM = 8
_WORDS = 2 * _HEAD_DIM * 2 // 4  # k and v of one head in float16


def hash_model(name: str, *, vocab_size: int, windows: tuple[int, ...] = (0, 0, 0)) -> HashModel:
    """Return the model of that name."""
    return HashModel(name, windows, _WORDS, vocab_size)


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
        where = self.numbers(self.place_of_layer[layer][0], slots[positions // self.block_tokens])
        rows = words.reshape(len(words), 2, -1)
        self._layers[layer][where, :, positions % self.block_tokens] = rows

    def read(self, layer: int, slots: NDArray[np.int32], start: int, end: int) -> Words:
        """Return the words [n, words] that the slots hold of tokens [start, end)."""
        positions = np.arange(start, end)
        where = self.numbers(self.place_of_layer[layer][0], slots[positions // self.block_tokens])
        found = self._layers[layer][where, :, positions % self.block_tokens]
        return np.ascontiguousarray(found.reshape(len(positions), -1))

    def slots_at(self, offsets: NDArray[np.int64]) -> list[int]:
        """Return the slots of the first group that begin before these offsets of the region."""
        found: list[int] = ((offsets - self._base[0]) // self._slot_nbytes[0]).tolist()
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
        parts = [(s, s.num_computed, s.num_tokens) for s in decoding] + [(s, c.start, c.end) for s, c in chunks]
        tables = [sequence.table for sequence, _, _ in parts]  # may be replaced by longer ones meanwhile
        seen = [np.zeros(end - start, np.uint64) for _, start, end in parts]
        tokens = sum(end - start for _, start, end in parts)
        num_layers = len(self._model.windows)
        for layer in range(num_layers):
            if before_layer is not None:
                before_layer(layer)
            for i, (sequence, start, end) in enumerate(parts):
                seen[i] = self._layer(layer, tables[i], sequence.tokens[start:end], start, end, seen[i])
            step_s = world().step_s + tokens * world().token_s
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

    def _layer(
        self, layer: int, table: NDArray[np.int32], ids: NDArray[np.int32], start: int, end: int, below: Hashes
    ) -> Hashes:
        """Write the layer of tokens [start, end); return what they see of it, read back from the slots."""
        model, memory = self._model, self._memory
        memory.write(layer, table, start, model.layer_words(layer, start, ids, below))
        window = model.windows[layer]
        first = max(0, start + 1 - window) if window else 0
        return model.seen(layer, model.read(first, memory.read(layer, table, first, end)), first, start)

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
            known = groups.get(window) or KvGroupShape(kind, window, (), 1, _HEAD_DIM, "float16")
            groups[window] = replace(known, layers=(*known.layers, layer))
        return [groups[window] for window in sorted(groups)]

    def new_stored(self, memory: EngineMemory, messenger: Messenger) -> tuple[SlotMemory, Provenance]:
        return memory, Provenance.EXACT

    def steps(self, memory: EngineMemory) -> HashSteps:
        assert isinstance(memory, HashMemory)
        return HashSteps(self.model, memory)

    def warm_up(self) -> None:
        """Nothing has to be compiled."""

    def check(self, request: Request) -> None:
        if request.rolling is not None:
            raise RequestRefused("unsupported", "the hash model has no windows of endless requests")
