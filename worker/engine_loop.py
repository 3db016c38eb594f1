"""The engine thread: plans steps, runs them, samples and reports. It does no I/O.

Commands arrive through `submit`, `cancel` and `extend`; results leave through one callback per step, on the engine
thread. A sequence's slots may be freed only after a StepResult has listed the sequence in `left`.

Threads, locks and lifetimes:

  event loop                        engine thread                          verifier thread
  submit, cancel, extend, wake ──▶  _take_commands: inbox → _prefilling    LayerGate.mark ──▶ wake
  (under `_wake`)                   or _decoding                           (the first layer has arrived)
  on_step callback ◀──────────────  _step ends: StepResult
  (call_soon_threadsafe)            on_layer(layer, spans) within a step

- `_wake` guards `_inbox`, `_calls`, `_closing`, `_ended_by` and the growth of a sequence's slot table. The engine
  thread holds it only in `_take_commands`, `_make_call` and when it ends, never during a step, a call or a callback.
- `_prefilling` and `_decoding` belong to the engine thread. Other threads read only their lengths (`num_sequences`).
- A sequence belongs to the engine thread from `submit` until a StepResult lists it in `left`; other threads may only
  cancel it or extend its slot table. Steps read and write its slots, so a cancelled sequence keeps them until the step
  in progress has ended.
- A step of a prefill group, or of a prompt whose reused KV is on its way, blocks in `LayerGate.wait` before each layer
  that is not here yet; `cancel` ends that wait by `lose`. Such a prompt is alone in its step. While its KV is on its
  way, all other work that is ready comes first, and its step gives up when other work has to wait for it.
- The thread runs from `start` until `close` joins it or an error ends it. `close` does not report the sequences that
  are still in the loop. After an error `_ended_by` is set, all sequences are reported as left, and later submits are
  answered at once, on the caller's thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from jit.fast_dataclass import fast_dataclass
from moonpool_proto.v1.worker_pb2 import Finish, LogProbs
from worker.engine_interface import StepRunner
from worker.errors import GroupLost, LoadLost, OutOfMemory, WorkerError, sequence_error
from worker.policy import BatchLimits, PlanStep, PrefillChunk, StepBudget, plan_step
from worker.request import EngineSequence

log = logging.getLogger(__name__)

_GRAMMAR_WAIT_S = 0.005
_LONGEST_WAIT_S = 1.0  # for one layer of reused KV while other prompts could be computed


@fast_dataclass
@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One generated token with its values at that time: the sequence may have advanced before the token is sent."""

    sequence: EngineSequence
    index: int
    token: int
    finish: Finish.ValueType
    logprobs: LogProbs | None = None  # if the request needs them


@dataclass(slots=True)
class StepResult:
    """Result of one step, or the removal of cancelled sequences."""

    tokens: list[GeneratedToken] = field(default_factory=list)
    # Sequences that left the loop: finished, handed over, cancelled or failed (`EngineSequence.error`).
    left: list[EngineSequence] = field(default_factory=list)
    error: BaseException | None = None  # the step failed, and with it the sequences in `left`
    is_end: bool = False  # the thread has ended with that error: no further step will run
    decode_batch: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    seconds: float = 0.0
    divisions: int = 0  # of a step that needed more memory than there was

    def add(self, other: StepResult) -> None:
        """Add another part of the same step."""
        self.tokens += other.tokens
        self.left += other.left
        self.decode_batch += other.decode_batch
        self.decode_context += other.decode_context
        self.prefill_tokens += other.prefill_tokens
        self.seconds += other.seconds
        self.divisions += other.divisions


LayerHook = Callable[[int, list[tuple[EngineSequence, int, int]]], None]


class EngineLoop:
    """Loop that runs the engine over the submitted sequences, on its own thread, until it is closed."""

    computes_in_slots = True

    def __init__(
        self,
        steps: StepRunner,
        limits: BatchLimits,
        on_step: Callable[[StepResult], None],
        *,
        allows_long_steps: bool = False,
        plan: PlanStep = plan_step,
    ) -> None:
        """`allows_long_steps`: prompts that wait for reused KV may be computed in longer steps than `limits`. `plan`
        decides what each step computes.
        """
        self._plan = plan
        self._budget = StepBudget(limits.step_s, limits.block_tokens)
        self._steps = steps
        self._limits = limits
        self._allows_long_steps = allows_long_steps
        self._on_step = on_step
        self._on_layer: LayerHook | None = None
        self._wake = threading.Condition()
        self._inbox: deque[EngineSequence] = deque()
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._closing = False
        self._ended_by: BaseException | None = None  # the error that ended the thread
        self._num_begun = 0  # steps and calls, each time that they begin to compute
        self._is_computing = False
        self._decoding: list[EngineSequence] = []
        self._prefilling: list[EngineSequence] = []
        self._was_shared = False  # the last step was a chunk of a prefill group
        self._thread = threading.Thread(target=self._thread_main, name="engine", daemon=True)

    def on_layer(self, hook: LayerHook) -> None:
        """Set `hook(layer, chunks)`; call before `start`. It runs on the engine thread when a layer's KV is written,
        with the chunks (sequence, start, end) of the step whose sequences leave with their first token."""
        self._on_layer = hook

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def submit(self, sequence: EngineSequence) -> None:
        """Pass a sequence to the loop; its slots belong to the loop until the sequence is reported as left."""
        with self._wake:
            if self._ended_by is None:
                self._inbox.append(sequence)
                self._wake.notify()
                return
        self._on_step(StepResult(error=self._ended_by, left=[sequence], is_end=True))

    def cancel(self, sequence: EngineSequence) -> None:
        """Request the removal of a sequence; it is reported as left when the step in progress has ended."""
        with self._wake:
            sequence.cancelled = True
            self._wake.notify()
        gate = sequence.gate
        if gate is not None:  # its own step may be in progress and waiting for other nodes
            gate.lose("the request was cancelled")

    def extend(self, sequence: EngineSequence, slots: list[int]) -> None:
        """Add slots to a decoding sequence."""
        with self._wake:
            sequence.extend(slots)
            self._wake.notify()

    def between_steps(self, function: Callable[[], None]) -> Future[None]:
        """Let the engine thread call `function` once, between two steps; the future ends with it."""
        done: Future[None] = Future()
        with self._wake:
            if self._ended_by is None and not self._closing:
                self._calls.append((function, done))
                self._wake.notify()
                return done
        done.set_exception(self._ended_by or RuntimeError("the engine is closed"))
        return done

    def wake(self) -> None:
        """Wake the engine thread to look at prefill groups again: the next chunk of one may be ready."""
        with self._wake:
            self._wake.notify()

    def close(self) -> None:
        """Stop when the step in progress has ended, and join the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def step_in_progress(self) -> int:
        """Number of the step that computes now; 0 between steps, and while one waits for layers."""
        return self._num_begun if self._is_computing else 0

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        self._computes(True)
        try:
            yield
        finally:
            self._computes(False)

    def _computes(self, computes: bool) -> None:
        self._num_begun += computes
        self._is_computing = computes

    @property
    def num_sequences(self) -> int:
        """Number of submitted sequences that have not left."""
        return len(self._inbox) + len(self._prefilling) + len(self._decoding)

    def _thread_main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            log.exception("the engine thread ends")
            with self._wake:
                self._ended_by = error
                left = [*self._decoding, *self._prefilling, *self._inbox]
            self._on_step(StepResult(error=error, left=left, is_end=True))
        finally:
            with self._wake:
                self._closing, calls = True, list(self._calls)
                self._calls.clear()
            for _, done in calls:
                done.cancel()

    def _run(self) -> None:
        while self._take_commands():
            self._make_call()
            self._drop_cancelled()
            if self._prefilling:
                self._look_at_gates()
                now_s = time.monotonic()
                # Sorted before every step: an urgent prompt takes precedence from its next chunk on.
                self._prefilling.sort(key=lambda sequence: sequence.queue_entry.rank(now_s))
            ready = [s for s in self._decoding if self._is_ready(s)]
            if len(ready) > self._limits.max_batch:  # those of the most urgent class first, in turns within a class
                now_s = time.monotonic()
                ready.sort(key=lambda sequence: sequence.queue_entry.step_rank(now_s))
            prompts = [s for s in self._prefilling if s.gate is None or s.gate.is_ready]
            arriving = [s for s in prompts if s.loading is not None]
            prompts = [s for s in prompts if s.loading is None]
            # A chunk of a group may wait for other nodes at every layer, so it runs in its own step, and decoding
            # sequences get every other step.
            self._was_shared = bool(prompts and prompts[0].group_chunks is not None) and not (
                ready and self._was_shared
            )
            if self._was_shared:
                self._step_share(prompts[0])
                continue
            prompts = [s for s in prompts if s.group_chunks is None]
            limits = self._limits
            if arriving and not (ready or prompts):
                prompts = arriving[:1]
                # Where sequences decode, the next one waits for the end of the step; where there are windows, every
                # token of a step takes a slot in them.
                if self._allows_long_steps and prompts[0].prefill_only and prompts[0].window is None:
                    limits = limits.while_arriving(prompts[0].reused_tokens)
            if ready and prompts:
                limits = replace(limits, chunk_tokens=self._budget.tokens(limits.chunk_tokens))
            plan = self._plan(
                [s.remaining for s in ready],
                [(s.num_computed, s.chunk_end) for s in prompts],
                limits,
            )
            if not plan.is_empty:
                chunks = [(prompts[c.index], c) for c in plan.prefill]
                chunks = [(s, replace(c, last=c.end == s.prompt_len)) for s, c in chunks]
                self._step([ready[i] for i in plan.decode], chunks)

    def _take_commands(self) -> bool:
        self._await_grammars()
        with self._wake:
            while True:
                # Before `_can_decode`: a mask that comes between the two wakes nobody.
                waits_for_mask = any(s.waits_for_grammar for s in self._decoding)
                if self._closing or self._inbox or self._calls or self._can_prefill() or self._can_decode():
                    break
                self._wake.wait(_GRAMMAR_WAIT_S if waits_for_mask else None)
            while self._inbox:
                sequence = self._inbox.popleft()
                prefilling = sequence.num_computed < sequence.prompt_len
                (self._prefilling if prefilling else self._decoding).append(sequence)
            return not self._closing

    def _make_call(self) -> None:
        """Make one call that waits for its turn between two steps."""
        with self._wake:
            if not self._calls:
                return
            function, done = self._calls.popleft()
        if done.set_running_or_notify_cancel():
            try:
                with self._computing():
                    function()
            except Exception as error:  # whoever asked for the call is told
                done.set_exception(error)
            else:
                done.set_result(None)

    def _can_prefill(self) -> bool:
        return any(s.cancelled or s.gate is None or s.gate.is_ready for s in self._prefilling)

    def _can_decode(self) -> bool:
        return any(sequence.cancelled or self._is_ready(sequence) for sequence in self._decoding)

    def _await_grammars(self) -> None:
        """Wait a moment for the grammars' masks of the next step.

        Masks normally come within a fraction of a millisecond. A sequence whose mask takes longer sits out steps until
        it is there, so that slow grammars delay others by at most _GRAMMAR_WAIT_S per step.
        """
        for sequence in self._decoding:
            if sequence.steering is not None and not sequence.steering.is_ready():
                sequence.steering.is_ready(max(0.0, sequence.steering.asked_at + _GRAMMAR_WAIT_S - time.monotonic()))

    def _is_ready(self, sequence: EngineSequence) -> bool:
        """Return True if the next step can compute the sequence: its mask is there, and a slot for its last token.

        A growing answer may have to wait for a slot.
        """
        has_room = sequence.has_room(self._limits.block_tokens)
        return has_room and (sequence.steering is None or not sequence.waits_for_grammar)

    def _drop_cancelled(self) -> None:
        gone = [s for s in self._decoding if s.cancelled] + [s for s in self._prefilling if s.cancelled]
        if gone:
            self._remove(gone)
            self._settle()
            self._on_step(StepResult(left=gone))

    def _remove(self, gone: list[EngineSequence]) -> None:
        ids = {id(s) for s in gone}
        self._decoding = [s for s in self._decoding if id(s) not in ids]
        self._prefilling = [s for s in self._prefilling if id(s) not in ids]

    def _look_at_gates(self) -> None:
        """Remove prompts whose KV never arrives, and forget the gates of those whose reused KV is here."""
        lost: list[EngineSequence] = []
        for sequence in self._prefilling:
            gate = sequence.gate
            if gate is not None and gate.error is not None:
                sequence.error = gate.error
                lost.append(sequence)
            elif sequence.loading is not None and sequence.loading.is_open:
                sequence.loading = None
        if lost:
            self._remove(lost)
            self._on_step(StepResult(left=lost))

    def _step_share(self, sequence: EngineSequence) -> None:
        assert sequence.group_chunks is not None
        span = sequence.group_chunks.next_span
        assert span is not None
        self._step([], [(sequence, PrefillChunk(0, *span, last=span[1] == sequence.prompt_len))])

    def _await_layer(self, sequence: EngineSequence, layer: int) -> None:
        """Wait until a layer of the blocks before the sequence's next chunk is here. Raises GroupLost or LoadLost."""
        gate = sequence.gate
        if gate is None or (gate.error is None and gate.has(layer)):
            return
        began_s = time.monotonic()
        self._computes(False)
        if sequence.loading is None:
            gate.wait(layer)
        else:
            gate.wait(layer, lambda: self._must_give_up(sequence, time.monotonic() - began_s))
            sequence.waited_s += time.monotonic() - began_s
        self._computes(True)

    def _must_give_up(self, sequence: EngineSequence, waited_s: float) -> bool:
        """Return True if other work waits only because the sequence's step waits for a layer.

        Sequences that could decode wait for no layer; prompts that could be computed wait for a while, as they would
        for a computation.
        """
        with self._wake:
            arrived = list(self._inbox)
        if any(s.num_computed >= s.prompt_len for s in arrived) or any(self._is_ready(s) for s in self._decoding):
            return True
        prompts = [s for s in (*arrived, *self._prefilling) if s is not sequence]
        return waited_s >= _LONGEST_WAIT_S and any(s.gate is None or s.gate.is_open for s in prompts)

    def _step(self, decoding: list[EngineSequence], chunks: list[tuple[EngineSequence, PrefillChunk]]) -> None:
        try:
            result = self._run_batch(decoding, chunks)
        except (GroupLost, LoadLost) as error:  # a chunk that waits for layers is the only one in its step
            chunks[0][0].error = error
            result = StepResult(left=[chunks[0][0]])
        except OutOfMemory as error:
            result = self._divided(decoding, chunks, error)
        except Exception as error:  # a failed step must not end the thread
            log.exception("engine step failed: %d decoding, %d prompts", len(decoding), len(chunks))
            result = StepResult(error=error, left=decoding + [s for s, _ in chunks])
        # Rotate: with more sequences than rows, each gets its share of the steps.
        if len(decoding) < len(self._decoding):
            stepped = {id(sequence) for sequence in decoding}
            self._decoding = [s for s in self._decoding if id(s) not in stepped] + decoding
        if result.left:
            self._remove(result.left)
            self._settle()  # before their slots are read or given away
        self._on_step(result)

    def _settle(self) -> None:
        """Wait for what the engine's device still does; if that never ends, the step watch notices it."""
        with self._computing():
            self._steps.settle()

    def _divided(
        self, decoding: list[EngineSequence], chunks: list[tuple[EngineSequence, PrefillChunk]], error: OutOfMemory
    ) -> StepResult:
        """Run a step that needs too much memory in parts, and make later ones smaller.

        A sequence that needs too much by itself fails alone.
        """
        parts = _parts(decoding, chunks, self._limits.block_tokens)
        result = StepResult(divisions=1)
        if not parts:
            return _failed([*decoding, *(s for s, _ in chunks)], error, result)
        self._shrink(decoding, chunks)
        log.warning(
            "%s: it is divided, and steps have at most %d prompt tokens and %d sequences from now on",
            *(error, self._limits.chunk_tokens, self._limits.max_batch),
        )
        for some_decoding, some_chunks in parts:
            try:
                result.add(self._run_batch(some_decoding, some_chunks))
            except OutOfMemory as again:
                result.add(self._divided(some_decoding, some_chunks, again))
            except Exception as other:  # the other parts have been computed
                log.exception("part of an engine step failed")
                _failed([*some_decoding, *(s for s, _ in some_chunks)], sequence_error(other), result)
        return result

    def _shrink(self, decoding: list[EngineSequence], chunks: list[tuple[EngineSequence, PrefillChunk]]) -> None:
        """Halve the bounds of steps: of their prompt tokens, or if they have hardly any, of their sequences."""
        limits = self._limits
        half = sum(c.end - c.start for _, c in chunks) // 2
        chunk_tokens = max(limits.block_tokens, half - half % limits.block_tokens)
        if chunks and chunk_tokens < limits.chunk_tokens:
            self._limits = replace(limits, chunk_tokens=chunk_tokens)
        else:
            sequences = max(1, (len(decoding) + len(chunks)) // 2)
            self._limits = replace(limits, max_batch=min(limits.max_batch, sequences))

    def _run_batch(
        self, decoding: list[EngineSequence], chunks: list[tuple[EngineSequence, PrefillChunk]]
    ) -> StepResult:
        began = time.monotonic()
        for sequence, _ in chunks:
            sequence.first_step_at = sequence.first_step_at or began
        result = StepResult(decode_batch=len(decoding), decode_context=sum(s.visible_tokens for s in decoding))
        rows = decoding + [s for s, c in chunks if c.last]
        hook = before = None
        spans = [(s, c.start, c.end) for s, c in chunks if s.prefill_only]
        if self._on_layer is not None and spans:
            report = self._on_layer

            def hook(layer: int) -> None:
                report(layer, spans)
                for sequence, _ in chunks:
                    if sequence.group_chunks is not None:
                        sequence.group_chunks.layer_computed(layer)

        if any(sequence.gate is not None for sequence, _ in chunks):
            assert len(chunks) == 1, "a prompt that waits for layers is alone in its step"

            def before(layer: int) -> None:
                self._await_layer(chunks[0][0], layer)

        windowed = [(s.window, s.num_computed, s.num_tokens) for s in decoding if s.window is not None]
        windowed += [(s.window, c.start, c.end) for s, c in chunks if s.window is not None]
        block_tokens = self._limits.block_tokens
        for window, start, end in windowed:
            window.step(start // block_tokens, -(-end // block_tokens))
        waited_s = sum(s.waited_s for s, _ in chunks)
        with self._computing():
            chosen = self._steps.run(decoding, chunks, hook, before)
        waited_s = sum(s.waited_s for s, _ in chunks) - waited_s
        for window, _, end in windowed:  # the step has ended, on the device, too
            window.leave(end // block_tokens)
        ended = time.monotonic()
        result.seconds = ended - began
        for sequence in decoding:
            sequence.num_computed += 1
        result.prefill_tokens = sum(c.end - c.start for _, c in chunks)
        self._budget.observe(len(decoding), result.prefill_tokens, result.seconds - waited_s)
        for sequence, chunk in chunks:
            sequence.num_computed = chunk.end
            sequence.computed_tokens += chunk.end - chunk.start
            sequence.is_beside_decodes |= bool(decoding)
            sequence.compute_s += (result.seconds - waited_s) * (chunk.end - chunk.start) / result.prefill_tokens
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


def _parts(
    decoding: list[EngineSequence], chunks: list[tuple[EngineSequence, PrefillChunk]], block_tokens: int
) -> list[tuple[list[EngineSequence], list[tuple[EngineSequence, PrefillChunk]]]]:
    """Return the parts of a step, of a single chunk its first half; none of what cannot be divided."""
    if decoding and chunks:
        return [(decoding, []), ([], chunks)]
    if len(decoding) > 1:
        half = len(decoding) // 2
        return [(decoding[:half], []), (decoding[half:], [])]
    if len(chunks) > 1:
        half = len(chunks) // 2
        return [([], chunks[:half]), ([], chunks[half:])]
    for sequence, chunk in chunks:
        middle = (chunk.start + chunk.end) // 2
        middle -= middle % block_tokens
        if middle > chunk.start and sequence.group_chunks is None:
            return [([], [(sequence, replace(chunk, end=middle, last=False))])]
    return []


def _failed(sequences: list[EngineSequence], error: WorkerError, result: StepResult) -> StepResult:
    """Record in a step's result that these sequences fail by themselves."""
    for sequence in sequences:
        sequence.error = error
    result.left += sequences
    return result


def _has_left(sequence: EngineSequence, chunk: PrefillChunk) -> bool:
    """Return True if this node computes nothing more of the sequence after this chunk."""
    return (
        sequence.group_chunks.next_span is None
        if sequence.group_chunks is not None
        else chunk.last and sequence.prefill_only
    )
