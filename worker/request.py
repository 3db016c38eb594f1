"""Turns on the wire, where times are relative to when they are told: clocks of two hosts have nothing in common.

A request as a worker sees it: the parsed Submit, and the sequence the engine works on.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool_proto.v1 import conductor_pb2
from moonpool_proto.v1.conductor_pb2 import Placement
from moonpool_proto.v1.worker_pb2 import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, Finish, Submit
from worker.errors import RequestRefused, WorkerError, sequence_error
from worker.grammar_matching import GrammarMatcher
from worker.logprobs import PromptLogprobs
from worker.policy.scheduling_order import ALWAYS_NEXT, QueueEntry, RequestKey
from worker.sampling import SamplingParams
from worker.steering import Steering

KEY_NBYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One attempt of a request, checked. `prompt` [n] int32 holds the client's prompt and what was generated so far."""

    request_id: str
    attempt: int
    frontend_id: str
    prompt: NDArray[np.int32]
    generated: int
    keys: tuple[bytes, ...]  # chain key per full block of the prompt
    chain_seed: bytes
    sampling: SamplingParams
    max_tokens: int  # over all attempts
    vocab_size: int
    placement: Placement
    submitted: float  # time.monotonic() instants
    deadline: float
    idle_s: float  # > 0: endless; once it has a token its deadline is that of the next one
    proto: Submit
    queue_entry: QueueEntry

    @classmethod
    def from_proto(cls, submit: Submit, *, vocab_size: int, max_model_len: int, block_tokens: int) -> Request:
        """Check and parse. Raises RequestRefused naming what was wrong and what was expected."""
        if len(submit.prompt_ids) % 4:
            raise RequestRefused("bad_prompt", f"prompt_ids has {len(submit.prompt_ids)} bytes, not whole int32 values")
        prompt = np.frombuffer(submit.prompt_ids, dtype="<i4")
        if len(prompt) == 0:
            raise RequestRefused("bad_prompt", "the prompt is empty")
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
            raise RequestRefused("bad_prompt", f"a prompt token is outside the vocabulary of {vocab_size}")
        if len(prompt) >= max_model_len:
            raise RequestRefused(
                "too_long", f"the prompt has {len(prompt)} tokens; at most {max_model_len - 1} leave room for an answer"
            )
        if len(submit.chain) != KEY_NBYTES * (len(prompt) // block_tokens):
            raise RequestRefused(
                "bad_chain",
                f"{len(submit.chain)} bytes of chain keys for {len(prompt)} tokens in blocks of {block_tokens}: "
                "frontend and worker disagree about block_tokens",
            )
        if len(submit.chain_seed) != KEY_NBYTES:
            raise RequestRefused("bad_chain", f"chain_seed has {len(submit.chain_seed)} bytes, not {KEY_NBYTES}")
        if submit.generated >= len(prompt):
            raise RequestRefused(
                "bad_prompt",
                f"{submit.generated} of {len(prompt)} ids cannot all have been generated: there is no prompt",
            )
        if submit.sampling.max_tokens <= submit.generated:
            raise RequestRefused("bad_sampling", "no token is left to generate")
        _check_times(submit)
        now = time.monotonic()
        keys = tuple(submit.chain[i : i + KEY_NBYTES] for i in range(0, len(submit.chain), KEY_NBYTES))
        return cls(
            request_id=submit.request_id,
            attempt=submit.attempt,
            frontend_id=submit.frontend_id,
            prompt=prompt,
            generated=submit.generated,
            keys=keys,
            chain_seed=submit.chain_seed,
            sampling=SamplingParams.from_proto(submit.sampling, vocab_size=vocab_size),
            max_tokens=min(submit.sampling.max_tokens, submit.generated + max_model_len - len(prompt)),
            vocab_size=vocab_size,
            placement=submit.placement,
            submitted=now,
            deadline=now + (submit.timeout_s or 600.0),
            idle_s=submit.idle_s,
            proto=submit,
            queue_entry=queue_entry_from_proto(submit.placement.turn, now),
        )

    @property
    def key(self) -> RequestKey:
        """What it goes by in line."""
        return self.request_id, self.attempt

    @property
    def traceparent(self) -> str:
        """Of the sender's span; "" where it is not traced."""
        return self.proto.traceparent

    @property
    def said(self) -> dict[str, str | int]:
        """What a line of the log is told where it is not the request's own task that writes it."""
        return {"request_id": self.request_id, "attempt": self.attempt}

    @property
    def about(self) -> dict[str, str | int]:
        """What a span of it is told by."""
        return {"request_id": self.request_id, "attempt": self.attempt, "prompt_tokens": len(self.prompt)}

    @property
    def peak_tokens(self) -> int:
        """The most tokens of KV this attempt can need: the last token generated is never fed back."""
        return len(self.prompt) + self.max_tokens - self.generated - 1

    @property
    def time_left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def generated_ids(self) -> NDArray[np.int32]:
        """What earlier attempts generated."""
        return self.prompt[len(self.prompt) - self.generated :]

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of all of the prompt are still to be told: nothing of it is reused then."""
        return self.sampling.prompt_logprobs is not None and self.generated == 0


def _check_times(submit: Submit) -> None:
    for name, seconds in (("timeout_s", submit.timeout_s), ("idle_s", submit.idle_s)):
        if not math.isfinite(seconds):
            raise RequestRefused("bad_times", f"{name} is {seconds}; expected a finite number of seconds")


class GroupChunks(Protocol):
    """The chunks of a prompt that this node computes as a member of a prefill group, as the engine loop sees them.

    Implemented by `prefill_node.group_member.MemberChunks`. All methods but `lose` are called on the engine thread.
    """

    @property
    def next_span(self) -> tuple[int, int] | None:
        """Prompt tokens [start, end) of the next chunk; None when this member has computed all of its chunks."""

    @property
    def is_ready(self) -> bool:
        """True if the first layer of the next chunk can be computed, or if the group is lost."""

    def wait(self, layer: int) -> None:
        """Block until this layer of all preceding blocks is present. Raises GroupLost."""

    def layer_computed(self, layer: int) -> None:
        """Record one layer of the next chunk as computed and wait for the input of the next layer. Raises GroupLost."""

    def chunk_computed(self) -> None:
        """Record that all layers of the next chunk are computed."""

    def lose(self, why: str) -> None:
        """Mark the group as lost and wake the engine thread if it waits. Any thread."""


@dataclass(slots=True, eq=False)
class EngineSequence:
    """The engine's working state of one request. Written by the engine thread while it is in the loop."""

    request: Request
    slots: list[int]
    tokens: NDArray[np.int32]  # capacity for all tokens, prompt first
    num_tokens: int
    num_computed: int
    prefill_only: bool  # leaves the loop with its first token
    steering: Steering | None = None  # None: tokens are drawn as the model gives them
    prompt_scores: PromptLogprobs | None = None
    table: NDArray[np.int32] = field(init=False)
    error: WorkerError | None = None  # why it left unfinished, when that was its own fault
    finish: Finish.ValueType = FINISH_NONE
    cancelled: bool = False
    group_chunks: GroupChunks | None = None  # set while a prefill group computes the prompt
    compute_s: float = 0.0  # its share of the steps that computed its prompt
    computed_tokens: int = 0  # of its prompt, here
    is_beside_decodes: bool = False  # others decoded in some of those steps
    reused_tokens: int = field(init=False)  # of its prompt
    engine_state: object = None  # what the engine keeps of it
    kept_tokens: int | None = None  # prompt and answer as the next turn will hold them; None: all that is computed
    queue_entry: QueueEntry = ALWAYS_NEXT  # among the prompts being computed
    first_step_at: float = 0.0  # time.monotonic() instants
    first_token_at: float = 0.0  # of those generated here
    committed_at: float = 0.0  # handed over by a prefill node
    joined_at: float = 0.0  # began the first step after that

    def __post_init__(self) -> None:
        self.table = np.array(self.slots, dtype=np.int32)
        self.reused_tokens = self.num_computed

    @classmethod
    def of(
        cls,
        request: Request,
        slots: list[int],
        *,
        num_computed: int,
        prefill_only: bool,
        matcher: GrammarMatcher | None = None,
    ) -> EngineSequence:
        """`matcher` stands where the request's generated ids lead in its grammar, if it has one."""
        n = len(request.prompt)
        tokens = np.zeros(n + request.max_tokens - request.generated, dtype=np.int32)
        tokens[:n] = request.prompt
        sequence = cls(request, slots, tokens, n, num_computed, prefill_only)
        if Steering.is_wanted(request.sampling):
            sequence.steering = Steering(
                request.sampling,
                request.prompt,
                request.generated,
                capacity=len(tokens),
                vocab_size=request.vocab_size,
                matcher=matcher,
            )
        if request.scores_prompt and num_computed == 0:
            sequence.prompt_scores = PromptLogprobs(request.prompt, request.sampling.prompt_logprobs or 0)
        return sequence

    def extend(self, slots: list[int]) -> None:
        """Further slots, after those that it has."""
        self.slots.extend(slots)
        self.table = np.array(self.slots, dtype=np.int32)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def token_s(self) -> float:
        """What computing one token of its prompt took; 0 where none was."""
        return self.compute_s / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def next_index(self) -> int:
        """Index of the next token to be generated, over all attempts."""
        return self.request.generated + self.num_tokens - self.prompt_len

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - self.next_index

    @property
    def has_ended(self) -> bool:
        """Nothing more is generated: finished, or failed by its own fault."""
        return bool(self.finish) or self.error is not None

    def try_append(self, token: int) -> bool:
        """Append a generated token. Returns False and sets `error` if the sequence cannot continue with it."""
        try:
            self.append(token)
        except Exception as error:
            self.error = sequence_error(error)
        return self.error is None

    def append(self, token: int) -> None:
        """Take a generated token and decide whether it ends the request. Raises GrammarError."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        if self.steering is not None:
            self.steering.take(token)
        if token in self.request.sampling.stop_ids:
            self.finish = FINISH_STOP
        elif self.steering is not None and (finish := self.steering.finish):
            self.finish = finish
        elif self.remaining <= 0:
            self.finish = FINISH_LENGTH


def queue_entry_from_proto(message: conductor_pb2.Turn, now_s: float) -> QueueEntry:
    """As told at `now_s`. A message that nobody filled in is the turn of one that has just come.

    What is no time counts as none: among others' times it could not be put in order.
    """
    waited_s, due_in_s, ages_in_s = (
        told if math.isfinite(told) else 0.0 for told in (message.waited_s, message.due_in_s, message.ages_in_s)
    )
    return QueueEntry(
        arrived_s=now_s - waited_s,
        due_s=now_s + due_in_s,
        ages_s=now_s + ages_in_s,
        level=message.level,
        account=message.account,
        start_ns=message.start_ns,
        priority=message.priority,
    )


def queue_entry_to_proto(turn: QueueEntry, now_s: float) -> conductor_pb2.Turn:
    """To be told at `now_s`."""
    return conductor_pb2.Turn(
        level=turn.level,
        account=turn.account,
        start_ns=turn.start_ns,
        priority=turn.priority,
        waited_s=now_s - turn.arrived_s,
        due_in_s=turn.due_s - now_s,
        ages_in_s=turn.ages_s - now_s,
    )
