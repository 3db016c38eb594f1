"""The host side of a server: admission by pages, growth of answers, and the engine loop that computes them.

It uses the workers' own parts: the engine loop, slots, safe growth and the conductor's predictor of answer lengths.
Pool, hand-off and network are left out. All methods are called on one thread, `step_ended` with what the loop reports.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from benchmarks.techniques.workload import LIMITS, MAX_TOKENS, Technique, earlier_lengths, plan_apart
from conductor.policy.lengths import Lengths
from engine import Model
from moonpool_proto.v1.worker_pb2 import Submit
from worker.engine_loop import EngineLoop, StepResult
from worker.node_slots import GrowingAnswers
from worker.policy import OutOfSlots, SlotPool, plan_step
from worker.request import EngineSequence, Request
from worker.transformer import ModelSteps

OVERRUN: Final = 0.1  # accepted probability that an answer needs more pages than were reserved
Tokens = list[tuple[int, int]]
"""(request, token id) of each token of a step."""


class BatchServer:
    """A server with one technique; `on_step` receives each step's result on the engine's thread."""

    def __init__(
        self, model: Model, technique: Technique, capacity_tokens: int, on_step: Callable[[StepResult], None]
    ) -> None:
        num_slots = capacity_tokens // LIMITS.block_tokens
        self._technique = technique
        self._vocab, self._most = model.config.vocab_size, model.config.max_positions
        cache = model.new_cache((num_slots,) * len(model.kv_groups), LIMITS.block_tokens)
        plan = plan_apart if technique.batching == "apart" else plan_step
        self.loop = EngineLoop(ModelSteps(model, cache), LIMITS, on_step, plan=plan)
        self._slots = SlotPool(num_slots)
        self._growing = GrowingAnswers(
            num_slots,
            LIMITS.block_tokens,
            allocate=self._slots.allocate,
            extend=self.loop.extend,
            waits=self._count_wait,
        )
        self._lengths = Lengths()
        for prompt, answer in earlier_lengths():
            curve = self._lengths.curve_of(time.monotonic_ns(), "m", "", prompt)
            self._lengths.learn(time.monotonic_ns(), curve, answer, ended=True)
        self._waiting: deque[tuple[int, list[int], int]] = deque()
        self._answer_tokens: dict[int, int] = {}
        self.num_waits = 0
        self.max_running = 0
        self.loop.start()

    def submit(self, number: int, prompt: list[int], answer_tokens: int) -> None:
        """Queue a request, whose client ends the answer after `answer_tokens`."""
        self._waiting.append((number, prompt, answer_tokens))
        self._admit()

    def step_ended(self, result: StepResult) -> Tokens:
        """Return a step's tokens; those that a client no longer takes are left out."""
        if result.error is not None:
            raise result.error
        tokens: Tokens = []
        for generated in result.tokens:
            sequence, number = generated.sequence, int(generated.sequence.request.request_id)
            self._growing.stepped(sequence)
            if generated.index < self._answer_tokens[number]:
                tokens.append((number, generated.token))
            if generated.index + 1 == self._answer_tokens[number] and not generated.finish:
                self.loop.cancel(sequence)
        for sequence in result.left:
            self._leave(sequence)
        if result.left:
            self._growing.serve()
            self._admit()
        return tokens

    def _leave(self, sequence: EngineSequence) -> None:
        request = sequence.request
        self._growing.leave(sequence)
        self._growing.end(request.key)
        self._slots.release(sequence.slots)
        answer = self._answer_tokens.pop(int(request.request_id))
        now_ns = time.monotonic_ns()
        curve = self._lengths.curve_of(now_ns, "m", "", len(request.prompt))
        self._lengths.learn(now_ns, curve, answer, ended=True)

    def _admit(self) -> None:
        if self._technique.batching == "static" and self._answer_tokens:
            return
        while self._waiting and not self._growing.is_short:
            number, prompt, answer_tokens = self._waiting[0]
            most = -(-(len(prompt) + MAX_TOKENS - 1) // LIMITS.block_tokens)
            first = min(most, -(-(len(prompt) + self._expected(len(prompt))) // LIMITS.block_tokens))
            try:
                slots = self._slots.allocate(first)
            except OutOfSlots:
                return
            sequence = self._sequence(number, prompt, slots)
            if most > first and not self._growing.begin(sequence.request.key, slots, most - first):
                self._slots.release(slots)
                return
            self._waiting.popleft()
            self._answer_tokens[number] = answer_tokens
            self.loop.submit(sequence)
            self._growing.run(sequence)
            self.max_running = max(self.max_running, self.loop.num_sequences)

    def _expected(self, prompt_tokens: int) -> int:
        """Return the answer's tokens for which pages are taken at first."""
        if self._technique.allocation == "reserve-max":
            return MAX_TOKENS
        if self._technique.allocation == "pages":
            return 1
        curve = self._lengths.curve_of(time.monotonic_ns(), "m", "", prompt_tokens)
        return self._lengths.quantile(curve, OVERRUN, 0, MAX_TOKENS)

    def _sequence(self, number: int, prompt: list[int], slots: list[int]) -> EngineSequence:
        submit = Submit(request_id=str(number), prompt_ids=np.array(prompt, dtype="<i4").tobytes())
        submit.chain, submit.chain_seed = bytes(16 * (len(prompt) // LIMITS.block_tokens)), bytes(16)
        submit.sampling.max_tokens, submit.sampling.top_p = MAX_TOKENS, 1.0
        request = Request.from_proto(
            submit, vocab_size=self._vocab, max_model_len=self._most, block_tokens=LIMITS.block_tokens
        )
        return EngineSequence.of(request, slots, num_computed=0, prefill_only=False)

    def _count_wait(self) -> None:
        self.num_waits += 1
