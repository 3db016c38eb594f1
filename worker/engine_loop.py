"""The engine's own thread: plan, run, sample, report. It shares no thread with I/O.

Commands go in through `submit` and `cancel`; what happened comes out through one callback per step, called on the
engine thread. Whoever owns the slots may free a sequence's slots only after it was reported as `left`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from moonpool_proto.v1.worker_pb2 import Finish, LogProbs
from worker.engine_interface import StepRunner
from worker.errors import GroupLost
from worker.policy import BatchLimits, PrefillChunk, plan_step
from worker.request import EngineSequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token as it was generated: by the time it is sent, the sequence may have gone on."""

    sequence: EngineSequence
    index: int
    token: int
    finish: Finish.ValueType
    logprobs: LogProbs | None = None  # if asked for


@dataclass(slots=True)
class StepResult:
    """One step, or the removal of cancelled sequences."""

    tokens: list[GeneratedToken] = field(default_factory=list)
    left: list[EngineSequence] = field(
        default_factory=list
    )  # out of the loop: finished, handed over, cancelled or failed (`EngineSequence.error`)
    error: BaseException | None = None  # the step failed; `left` are its victims
    is_end: bool = False  # the thread has ended by that error: nothing more will be computed
    decode_batch: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    seconds: float = 0.0


LayerHook = Callable[[int, list[tuple[EngineSequence, int, int]]], None]


class EngineLoop:
    """Runs the engine over the sequences it was given, until closed."""

    def __init__(
        self,
        steps: StepRunner,
        limits: BatchLimits,
        on_step: Callable[[StepResult], None],
    ) -> None:
        self._steps = steps
        self._limits = limits
        self._on_step = on_step
        self._on_layer: LayerHook | None = None
        self._wake = threading.Condition()
        self._inbox: deque[EngineSequence] = deque()
        self._closing = False
        self._ended_by: BaseException | None = None  # what ended the thread without being asked to
        self._decoding: list[EngineSequence] = []
        self._prefilling: list[EngineSequence] = []
        self._was_shared = False  # whether the last step was a chunk for a group
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)

    def on_layer(self, hook: LayerHook) -> None:
        """From the start on, call `hook(layer, chunks)` on the engine thread once the KV of a layer is written for
        those prompt chunks (sequence, start, end) of the running step whose sequences leave with their first token."""
        self._on_layer = hook

    def start(self) -> None:
        self._thread.start()

    def submit(self, sequence: EngineSequence) -> None:
        """Hand a sequence over; its slots belong to the loop until it is reported as left."""
        with self._wake:
            if self._ended_by is None:
                self._inbox.append(sequence)
                self._wake.notify()
                return
        self._on_step(StepResult(error=self._ended_by, left=[sequence], is_end=True))

    def cancel(self, sequence: EngineSequence) -> None:
        """Ask for a sequence to leave; it is reported as left after the running step."""
        with self._wake:
            sequence.cancelled = True
            self._wake.notify()
        if sequence.group_chunks is not None:  # the running step may be its own, and wait for other nodes
            sequence.group_chunks.lose("the request was cancelled")

    def extend(self, sequence: EngineSequence, slots: list[int]) -> None:
        """Give a sequence that decodes further slots."""
        with self._wake:
            sequence.extend(slots)
            self._wake.notify()

    def wake(self) -> None:
        """A sequence's share may be ready now."""
        with self._wake:
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def num_sequences(self) -> int:
        return len(self._inbox) + len(self._prefilling) + len(self._decoding)

    def _live(self) -> None:
        try:
            self._run()
        except BaseException as error:
            log.exception("the engine's thread ends")
            with self._wake:
                self._ended_by = error
                left = [*self._decoding, *self._prefilling, *self._inbox]
            self._on_step(StepResult(error=error, left=left, is_end=True))

    def _run(self) -> None:
        while self._take_commands():
            self._drop_cancelled()
            now_s = time.monotonic()
            # At every step: what is urgent goes first from its next chunk on, and what was computed of others stays.
            self._prefilling.sort(key=lambda sequence: sequence.queue_entry.rank(now_s))
            ready = [s for s in self._decoding if self._has_room(s)]
            prompts = [s for s in self._prefilling if s.group_chunks is None or s.group_chunks.is_ready]
            # A chunk for a group may wait for other nodes, layer by layer: nothing else goes into its step, and those
            # that decode have every other one.
            self._was_shared = bool(prompts and prompts[0].group_chunks is not None) and not (
                ready and self._was_shared
            )
            if self._was_shared:
                self._step_share(prompts[0])
                continue
            prompts = [s for s in prompts if s.group_chunks is None]
            plan = plan_step(
                [s.remaining for s in ready],
                [(s.num_computed, s.prompt_len) for s in prompts],
                self._limits,
            )
            if not plan.is_empty:
                self._step([ready[i] for i in plan.decode], [(prompts[c.index], c) for c in plan.prefill])

    def _take_commands(self) -> bool:
        with self._wake:
            while not (self._closing or self._inbox or self._can_prefill() or self._can_decode()):
                self._wake.wait()
            while self._inbox:
                sequence = self._inbox.popleft()
                prefilling = sequence.num_computed < sequence.prompt_len
                (self._prefilling if prefilling else self._decoding).append(sequence)
            return not self._closing

    def _can_prefill(self) -> bool:
        return any(s.group_chunks is None or s.cancelled or s.group_chunks.is_ready for s in self._prefilling)

    def _can_decode(self) -> bool:
        return any(sequence.cancelled or self._has_room(sequence) for sequence in self._decoding)

    def _has_room(self, sequence: EngineSequence) -> bool:
        """Whether its last token, which the next step computes, has a slot: an answer may wait for more of them."""
        return sequence.num_tokens <= len(sequence.table) * self._limits.block_tokens

    def _drop_cancelled(self) -> None:
        gone = [s for s in (*self._decoding, *self._prefilling) if s.cancelled]
        if gone:
            self._remove(gone)
            self._on_step(StepResult(left=gone))

    def _remove(self, gone: list[EngineSequence]) -> None:
        ids = {id(s) for s in gone}
        self._decoding = [s for s in self._decoding if id(s) not in ids]
        self._prefilling = [s for s in self._prefilling if id(s) not in ids]

    def _step_share(self, sequence: EngineSequence) -> None:
        assert sequence.group_chunks is not None
        try:
            sequence.group_chunks.wait(0)
            span = sequence.group_chunks.next_span
            assert span is not None
        except GroupLost as error:
            sequence.error = error
            self._remove([sequence])
            self._on_step(StepResult(left=[sequence]))
            return
        self._step([], [(sequence, PrefillChunk(0, *span, last=span[1] == sequence.prompt_len))])

    def _step(self, decoding: list[EngineSequence], chunks: list[tuple[EngineSequence, PrefillChunk]]) -> None:
        try:
            result = self._run_batch(decoding, chunks)
        except GroupLost as error:  # of a chunk that had the step for itself
            chunks[0][0].error = error
            result = StepResult(left=[chunks[0][0]])
        except Exception as error:  # the thread must outlive any of its sequences
            log.exception("engine step failed: %d decoding, %d prompts", len(decoding), len(chunks))
            result = StepResult(error=error, left=decoding + [s for s, _ in chunks])
        # More sequences than rows take turns: none waits for another one's end.
        stepped = {id(sequence) for sequence in decoding}
        self._decoding = [s for s in self._decoding if id(s) not in stepped] + decoding
        self._remove(result.left)
        self._on_step(result)

    def _run_batch(
        self, decoding: list[EngineSequence], chunks: list[tuple[EngineSequence, PrefillChunk]]
    ) -> StepResult:
        began = time.monotonic()
        for sequence, _ in chunks:
            sequence.first_step_at = sequence.first_step_at or began
        result = StepResult(decode_batch=len(decoding), decode_context=sum(s.num_computed for s in decoding))
        rows = decoding + [s for s, c in chunks if c.last]
        hook = None
        spans = [(s, c.start, c.end) for s, c in chunks if s.prefill_only]
        if self._on_layer is not None and spans:
            report = self._on_layer

            def hook(layer: int) -> None:
                report(layer, spans)
                for sequence, _ in chunks:
                    if sequence.group_chunks is not None:
                        sequence.group_chunks.layer_computed(layer)

        chosen = self._steps.run(decoding, chunks, hook)
        ended = time.monotonic()
        result.seconds = ended - began
        for sequence in decoding:
            sequence.num_computed += 1
        result.prefill_tokens = sum(c.end - c.start for _, c in chunks)
        for sequence, chunk in chunks:
            sequence.num_computed = chunk.end
            sequence.computed_tokens += chunk.end - chunk.start
            sequence.is_beside_decodes |= bool(decoding)
            sequence.compute_s += result.seconds * (chunk.end - chunk.start) / result.prefill_tokens
        for sequence, row in zip(rows, chosen, strict=True):
            index = sequence.next_index
            if row is not None and sequence.try_append(row.token):
                sequence.first_token_at = sequence.first_token_at or ended
                result.tokens.append(GeneratedToken(sequence, index, row.token, sequence.finish, row.logprobs))
        for sequence, chunk in chunks:
            if chunk.last and not sequence.prefill_only and not sequence.has_ended:
                self._prefilling.remove(sequence)
                self._decoding.append(sequence)
        result.left = [s for s in decoding if s.has_ended]
        for sequence, _ in chunks:
            if sequence.group_chunks is not None:
                sequence.group_chunks.chunk_computed()
        result.left += [s for s, c in chunks if s.has_ended or _has_left(s, c)]
        return result


def _has_left(sequence: EngineSequence, chunk: PrefillChunk) -> bool:
    """Whether nothing more of it is computed here once this chunk is."""
    return (
        sequence.group_chunks.next_span is None
        if sequence.group_chunks is not None
        else chunk.last and sequence.prefill_only
    )
