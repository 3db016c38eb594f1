"""The transformer engine: a loaded model behind `worker.engine_interface`, and the sampling of its logits.

A row whose sampling fails does not affect other rows.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from engine import (
    EngineError,
    FlatBatch,
    ForwardBatch,
    InvalidBatch,
    LayerInputs,
    LayerSpan,
    LogitSteering,
    Model,
    PagedCache,
    Recomputation,
    SequenceChunk,
    load_model,
    steer,
)
from engine.digest_cache import DigestCache
from engine.rolling import RollingWindow, check_rolling, default_sinks
from engine.sampling import damaged_logits, queue_choice
from kvpool import Provenance
from messenger import Messenger
from settings.worker import KvSettings
from worker.decode_ahead import DecodeAhead, DecodeStep, QueuedStep, can_go_ahead, sampling_row
from worker.engine_interface import OnLayer, SampledToken, SteppedEngine
from worker.errors import OutOfMemory, RequestRefused, StartupError, sequence_error
from worker.hidden_memory import HiddenMemory
from worker.kv_memory import KvMemory, QuantisedMemory
from worker.logprobs import score_tokens
from worker.policy import BatchLimits, PrefillChunk, WindowSlots
from worker.request import EngineSequence, Request
from worker.slot_memory import EngineMemory, SlotMemory

if TYPE_CHECKING:
    from worker.config import WorkerConfig

log = logging.getLogger(__name__)


def hardware_name(device: torch.device, threads: int) -> str:
    """Return the name of the GPU, or of the CPU with the number of threads.

    A cost profile is valid for one such name.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {threads} thread{'s' if threads != 1 else ''}"


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found and found[0] else platform.processor() or platform.machine() or "unknown CPU"


def score_prompts(
    logits: torch.Tensor, num_decoding: int, chunks: Sequence[tuple[EngineSequence, PrefillChunk]]
) -> torch.Tensor:
    """Pass rows of a step's logits to the prompts that are scored; return the rows from which tokens are sampled.

    The rows of `chunks` follow those of the `num_decoding` decoding sequences.
    """
    if all(sequence.prompt_scores is None for sequence, _ in chunks):
        return logits
    chosen_from = list(range(num_decoding))
    begin = num_decoding
    for sequence, chunk in chunks:
        end = begin + (chunk.last if sequence.prompt_scores is None else chunk.end - chunk.start)
        if sequence.prompt_scores is not None:
            try:
                sequence.prompt_scores.take(logits[begin:end], chunk.start)
            except Exception as error:
                sequence.error = sequence_error(error)
        if chunk.last:
            chosen_from.append(end - 1)
        begin = end
    return logits[chosen_from]


def sample_tokens(logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> list[SampledToken | None]:
    """Sample one token per row of logits [B, V]; None for a sequence that cannot continue, whose `error` is set."""
    if not sequences:
        return []
    steered = logits
    if any(s.steering is not None for s in sequences):
        steered = steer(logits, [_steering(s) for s in sequences])
    tokens = _sampled(steered, sequences)
    scores = score_tokens(logits, tokens, [s.request.sampling.logprobs if s.error is None else None for s in sequences])
    return [
        SampledToken(token, score) if sequence.error is None else None
        for sequence, token, score in zip(sequences, tokens.tolist(), scores, strict=True)
    ]


def _sampled(logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> NDArray[np.int64]:
    """Return one id per row; an arbitrary id for rows with damaged logits.

    Raises SamplingError if all rows are damaged.
    """
    ids, scores = queue_choice(logits, [sampling_row(sequence) for sequence in sequences]).read()
    sound = scores.isfinite()
    if not bool(sound.any()):
        raise damaged_logits()
    for i in (~sound).nonzero()[:, 0].tolist():
        sequences[i].error = sequences[i].error or sequence_error(damaged_logits())
    tokens: NDArray[np.int64] = ids.numpy()
    return tokens


def _steering(sequence: EngineSequence) -> LogitSteering | None:
    if sequence.steering is None:
        return None
    try:
        return sequence.steering.row(sequence.next_index)
    except Exception as error:
        sequence.error = sequence_error(error)
        return None


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if memory of the host or the device could not be allocated; torch has no error of its own for the
    host's.
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


class ModelSteps:
    """Runner of a model's forward steps over its paged cache, and of sampling.

    Decode steps are queued one step ahead on devices that compute while the host goes on (`worker.decode_ahead`).
    """

    def __init__(
        self, model: Model, cache: PagedCache, windows: WindowSlots | None = None, *, ahead: bool | None = None
    ) -> None:
        """`windows`: the slots of groups with windows, if they are not those of the other groups. `ahead`: whether
        steps are queued ahead; None: on CUDA.
        """
        self._ahead = DecodeAhead(model, cache)
        self._goes_ahead = model.device.type == "cuda" if ahead is None else ahead
        self._queued: QueuedStep | None = None
        self._model = model
        self._cache = cache
        self._windows = windows
        self._hidden: HiddenMemory | None = None
        self._kept_layers = frozenset[int]()
        self._repeats = not any(group.window for group in cache.groups)
        self._last: DecodeStep | None = None  # the last step, if the next one can be made from it

    def keep_inputs(self, hidden: HiddenMemory, layers: frozenset[int]) -> None:
        """Write the hidden states that enter `layers` to `hidden` in every step. Before the engine starts."""
        self._hidden, self._kept_layers, self._repeats = hidden, layers, False

    @torch.inference_mode()
    def recompute(self, request: Request, slots: Sequence[int], span: LayerSpan, tokens: range) -> None:
        """Compute the KV of a span of layers for `tokens` of the prompt, whose blocks are in `slots`.

        What enters the span is in the hidden memory, in the same slots. Engine thread only.
        """
        block_tokens, inputs = self._cache.block_tokens, None
        if span.first:
            assert self._hidden is not None
            first = tokens.start // block_tokens
            blocks = slots[first : -(-tokens.stop // block_tokens)]
            rows = self._hidden.rows(span.first, blocks, tokens.stop - first * block_tokens)
            inputs = rows[tokens.start - first * block_tokens :]
        table = np.asarray(slots[: -(-tokens.stop // block_tokens)], np.int32)
        chunk = SequenceChunk(
            request.prompt[tokens.start : tokens.stop],
            tokens.start,
            (table,) * len(self._cache.groups),
            want_logits=False,
        )
        self._model.forward(ForwardBatch([chunk], Recomputation(span, inputs)), self._cache)

    @torch.inference_mode()
    def run(
        self,
        decoding: Sequence[EngineSequence],
        chunks: Sequence[tuple[EngineSequence, PrefillChunk]],
        on_layer: OnLayer | None,
        before_layer: OnLayer | None = None,
    ) -> list[SampledToken | None]:
        try:
            queued = self._queued
            if queued is None or not decoding:
                return self._run(decoding, chunks, on_layer, before_layer)
            self._queued, rows = None, queued.rows_of(decoding)
            if not rows:
                return self._run(decoding, chunks, on_layer, before_layer)
            if not chunks and queued.step.goes_on(decoding) and len(rows) == len(decoding):
                self._last = queued.step
                return self._read_behind(queued)
            others = [s for i, s in enumerate(decoding) if i not in rows]
            rest = iter(self._run(others, chunks, on_layer, before_layer) if others or chunks else ())
            tokens = queued.read()
            return [tokens[rows[i]] if i in rows else next(rest) for i in range(len(decoding))] + list(rest)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            self._model.release_unused_memory()
            size = len(decoding) + sum(c.end - c.start for _, c in chunks)
            raise OutOfMemory(f"there is not enough memory for a step of {size} tokens: {error}") from error

    def settle(self) -> None:
        if self._queued is not None and self._queued.choice.copied is not None:  # which is the step's last work
            self._queued.choice.copied.synchronize()

    def _read_behind(self, queued: QueuedStep) -> list[SampledToken | None]:
        """Queue the step after one that has been queued; return the tokens of that one."""
        following = self._ahead.queue_after(queued)
        tokens = queued.read()
        self._queued = following.after(queued, tokens) if following is not None else None
        return tokens

    def _run(
        self,
        decoding: Sequence[EngineSequence],
        chunks: Sequence[tuple[EngineSequence, PrefillChunk]],
        on_layer: OnLayer | None,
        before_layer: OnLayer | None,
    ) -> list[SampledToken | None]:
        for sequence, start in (*((s, s.num_computed) for s in decoding), *((s, c.start) for s, c in chunks)):
            if sequence.rolling is not None:
                self._slide(sequence, sequence.rolling, start)
        batch, goes_on = self._plan(decoding, chunks)
        logits = self._model.run(batch, self._cache, on_layer, before_layer)
        if goes_on and self._goes_ahead and self._last is not None and can_go_ahead(decoding):
            return self._read_behind(self._ahead.choose(self._last, logits))
        rows = [*decoding, *(s for s, c in chunks if c.last)]
        return sample_tokens(score_prompts(logits, len(decoding), chunks), rows)

    def _plan(
        self, decoding: Sequence[EngineSequence], chunks: Sequence[tuple[EngineSequence, PrefillChunk]]
    ) -> tuple[FlatBatch, bool]:
        """Return the step's batch, and whether it was made from the last one, since the same sequences go on."""
        last, self._last = self._last, None
        tables = tuple(s.table for s in decoding)  # first: a table may be replaced by a longer one at any time
        advanced = None if chunks or last is None else last.next_step(decoding, self._model.config)
        plan = advanced or self._model.flatten(self._batch(decoding, chunks), self._cache)
        if self._repeats and not chunks and all(s.rolling is None for s in decoding):
            self._last = DecodeStep(tuple(decoding), tables, plan)
        return plan, advanced is not None

    def _batch(
        self, decoding: Sequence[EngineSequence], chunks: Sequence[tuple[EngineSequence, PrefillChunk]]
    ) -> ForwardBatch:
        batch = ForwardBatch(
            [self._chunk(s, s.num_computed, s.num_tokens, True) for s in decoding]
            + [self._chunk(s, c.start, c.end, c.last) for s, c in chunks]
        )
        if self._hidden is not None and self._kept_layers:
            batch.layer_inputs = self._kept_inputs(
                self._hidden,
                [*((s, s.num_computed, s.num_tokens) for s in decoding), *((s, c.start, c.end) for s, c in chunks)],
            )
        return batch

    def _kept_inputs(self, hidden: HiddenMemory, rows: Sequence[tuple[EngineSequence, int, int]]) -> LayerInputs:
        """Return what writes the inputs of layers to the slots of each row's token; not those of rolling windows."""
        block_tokens = self._cache.block_tokens
        slots, offsets = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        for sequence, start, end in rows:
            positions = np.arange(start, end)
            own = np.full(len(positions), -1, np.int64)
            if sequence.rolling is None:
                own = sequence.table_of(start, end, block_tokens)[positions // block_tokens].astype(np.int64)
            slots.append(own)
            offsets.append(positions % block_tokens)
        slot, offset = np.concatenate(slots), np.concatenate(offsets)
        kept = np.flatnonzero(slot >= 0)
        index = torch.from_numpy(kept)
        return LayerInputs(
            self._kept_layers, lambda layer, x: hidden.put(layer, x[index.to(x.device)], slot[kept], offset[kept])
        )

    def _chunk(self, sequence: EngineSequence, start: int, end: int, want_logits: bool) -> SequenceChunk:
        whole = self._repeats and sequence.rolling is None  # for the steps that are made from this one
        used = sequence.table if whole else sequence.table_of(start, end, self._cache.block_tokens)
        seen = used if self._windows is None else self._windows.slot_of[used]
        return SequenceChunk(
            token_ids=sequence.tokens[start:end],
            start=start,
            slot_tables=tuple(seen if group.window else used for group in self._cache.groups),
            want_logits=want_logits or sequence.prompt_scores is not None,
            every=sequence.prompt_scores is not None and start < sequence.prompt_len,
            rolling=sequence.rolling,
        )

    def _slide(self, sequence: EngineSequence, rolling: RollingWindow, start: int) -> None:
        """Prepare the sinks' slot if the window has slid since the last chunk."""
        if rolling.start(start) == sequence.slid:
            return
        sinks, groups = int(sequence.table[-1]), len(self._cache.groups)
        source = sinks if sequence.has_sinks else int(sequence.table[0])
        self._model.keep_sinks(self._cache, (source,) * groups, (sinks,) * groups, rolling, start)
        sequence.slid, sequence.has_sinks = rolling.start(start), True


class Transformer(SteppedEngine):
    """A model on a device."""

    def __init__(self, model: Model, kv: KvSettings, hardware: str = "") -> None:
        self.model = model
        self.config = model.config
        self.fingerprint = model.fingerprint
        self.hardware = hardware
        self.allows_long_steps = model.device.type == "cpu"
        self.default_sinks = default_sinks(model.config)
        self._kv = kv

    @classmethod
    def of(cls, config: WorkerConfig) -> Transformer:
        """Load the configured model. Raises StartupError."""
        try:
            model = load_model(
                config.model.path,
                device=config.engine.device,
                dtype=config.engine.dtype,
                threads=config.engine.threads,
                backend=config.engine.engine_backend,
                block_tokens=config.blocks.block_tokens,
                kv_scale_group=config.kv.int8_scale_group,
                digests=DigestCache() if config.engine.digest_cache == "on" else None,
            )
        except EngineError as error:
            raise StartupError(str(error)) from error
        log.info("engine backend %s on %s in %s", model.backend.name, model.device, model.dtype)
        if config.engine.cuda_graphs == "on" and model.record_steps():
            log.info("decode steps are recorded as CUDA graphs")
        return cls(model, config.kv, hardware_name(model.device, config.engine.threads))

    def new_memory(
        self, messenger: Messenger, *, num_slots: int, block_tokens: int, limits: BatchLimits | None = None
    ) -> KvMemory:
        return KvMemory.of(
            self.model, messenger, num_slots=num_slots, block_tokens=block_tokens, kv=self._kv, limits=limits
        )

    def new_stored(self, memory: EngineMemory, messenger: Messenger) -> tuple[SlotMemory, Provenance]:
        if self._kv.kv_storage != "int8" or self.model.config.kv_scale_group:
            return memory, Provenance.EXACT
        assert isinstance(memory, KvMemory)
        return QuantisedMemory(memory, messenger, num_slots=memory.num_slots), Provenance.QUANTISED

    def steps(self, memory: EngineMemory) -> ModelSteps:
        assert isinstance(memory, KvMemory)
        return ModelSteps(self.model, memory.cache, memory.windows)

    def warm_up(self) -> None:
        self.model.warm_up()

    def check(self, request: Request) -> None:
        if request.rolling is None:
            return
        if not self.model.backend.computes_endless:
            raise RequestRefused(
                "bad_endless", f"endless: engine-backend {self.model.backend.name} does not compute it"
            )
        try:
            check_rolling(self.model.config, request.rolling)
        except InvalidBatch as error:
            raise RequestRefused("bad_endless", f"endless: {error}") from error
