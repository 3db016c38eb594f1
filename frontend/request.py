"""The generation request as plain data: token ids, sampling parameters, limits, statistics and time breakdowns.

Each part of a time breakdown is a duration measured by one process on its own clock. The frontend measures the whole;
`delivery_s` is the rest, the time between the processes, so the parts sum to the whole.
"""

import functools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from frontend.reasoning import ReasoningFormat, ReasoningParser, ReasoningStart
from frontend.token_intervals import TokenIntervals
from kvpool import chain_keys
from moonpool_proto.v1 import common_pb2, conductor_pb2, worker_pb2
from telemetry.tracing import OFF, Span

_UNIT: Final = "_s"


class _Parts:
    """Duration in seconds, split into fields that sum to it."""

    def parts(self) -> Mapping[str, float]:
        """Return the parts by name without their unit, in order of time."""
        return {name: getattr(self, attribute) for name, attribute in self._names}

    @property
    def whole_s(self) -> float:
        """Sum of all parts, in seconds."""
        return float(sum([getattr(self, attribute) for _, attribute in self._names]))

    @property
    def _names(self) -> tuple[tuple[str, str], ...]:
        kind: Any = type(self)  # mypy takes a class of dataclasses as not hashable
        return _names_of(kind)


@functools.cache
def _names_of(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    """Return (name without its unit, attribute) of each part."""
    return tuple((each.name.removesuffix(_UNIT), each.name) for each in fields(kind))


@dataclass(frozen=True)
class TtftBreakdown(_Parts):
    """Time from a request's arrival at the frontend to the arrival of its first token there."""

    tokenize_s: float  # receiving, checking and tokenising the request
    sibling_s: float  # further choices only: waiting for the first choice's first token
    schedule_s: float  # waiting for placements, over all attempts until then
    lost_s: float  # failed attempts, from their placement to the next attempt's
    queue_s: float  # this and the next two: of the attempt that gave the token
    load_s: float  # loading reused KV
    prefill_s: float  # from the first step to the token
    delivery_s: float  # the rest: to the worker and back, and between the frontend's threads

    @classmethod
    def of(
        cls,
        whole_s: float,
        timing: worker_pb2.Timing,
        *,
        tokenize_s: float,
        sibling_s: float,
        schedule_s: float,
        lost_s: float,
    ) -> "TtftBreakdown":
        """Split `whole_s` into its parts; `timing` arrived with the token."""
        before_s = tokenize_s + sibling_s + schedule_s + lost_s
        left_s = whole_s - before_s - timing.queue_s - timing.load_s - timing.prefill_s
        return cls(
            tokenize_s,
            sibling_s,
            schedule_s,
            lost_s,
            timing.queue_s,
            timing.load_s,
            timing.prefill_s,
            left_s,
        )


@dataclass(frozen=True)
class HandoffBreakdown(_Parts):
    """Time from the prefill node's token to the decode node's first token, as they arrive at the frontend."""

    tail_s: float  # until the last KV was pushed
    join_s: float  # until the first step on the decode node: verification and joining the batch
    step_s: float  # the first step on the decode node
    delivery_s: float  # the rest: the Commit's transport, and this token's transport minus the first one's

    @classmethod
    def of(cls, gap_s: float, timing: worker_pb2.HandoffTiming) -> "HandoffBreakdown":
        """Split `gap_s`, the time between both tokens, into its parts; `timing` arrived with the second token."""
        left_s = gap_s - timing.tail_s - timing.join_s - timing.step_s
        return cls(timing.tail_s, timing.join_s, timing.step_s, left_s)


@dataclass(frozen=True)
class Grammar:
    """Grammar that constrains the answer's text; kind and source as in the protocol message."""

    kind: common_pb2.Grammar.Kind.ValueType
    source: str


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. `stop_token_ids` are the client's; the model's end tokens are in `eos_token_ids`."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int  # 0 = off
    seed: int  # unsigned 64-bit
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    choice: int = 0  # index among a prompt's choices: all but the first wait for the first token of the first one
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None  # number of top ids returned with each token; None: no log-probabilities
    prompt_logprobs: int | None = None  # the same for the prompt, requested with its first choice only
    grammar: Grammar | None = None

    def to_proto(self) -> common_pb2.Sampling:
        """Return the protocol message, in which end tokens are stop tokens unless `ignore_eos` is set."""
        ends = () if self.ignore_eos else self.eos_token_ids
        sampling = common_pb2.Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop_token_ids=sorted({*self.stop_token_ids, *ends}),
            choice=self.choice,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs if self.choice == 0 else None,
        )
        if self.repetition_penalty != 1.0:
            sampling.repetition_penalty = self.repetition_penalty
        if self.grammar is not None:
            sampling.grammar.kind, sampling.grammar.source = self.grammar.kind, self.grammar.source
        return sampling


@dataclass(frozen=True)
class ReasoningOptions:
    """Format of an answer's reasoning, and the state in which the prompt leaves it."""

    form: ReasoningFormat
    start: ReasoningStart

    def parser(self) -> ReasoningParser:
        """Return a fresh parser of the answer."""
        return self.form.parser(self.start)


@dataclass(frozen=True)
class TextOptions:
    """Options of the answer's text."""

    echo: bool = False  # the prompt precedes the answer
    hides_answer: bool = False  # only the prompt is shown, and no token is counted
    skip_special_tokens: bool = True
    include_stop: bool = False  # the text includes the stop string or stop token
    shown_ids: frozenset[int] = frozenset()  # special tokens that parsers need to see in the text
    reasoning: ReasoningOptions | None = None  # None: the answer is not parsed for reasoning


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Expectations of the client; 0: it does not say."""

    expected_tokens: int = 0  # of the whole answer
    pause_s: float = 0.0  # from the answer's end to the next request that continues it
    lifetime_s: float = 0.0  # for which the prompt's KV should be kept

    def to_proto(self) -> conductor_pb2.RequestHints | None:
        """Return the message; None if there are no hints."""
        if self == NO_HINTS:
            return None
        return conductor_pb2.RequestHints(
            expected_output_tokens=self.expected_tokens, pause_s=self.pause_s, lifetime_s=self.lifetime_s
        )


NO_HINTS = RequestHints()


@dataclass(frozen=True)
class GenerationRequest:
    """Request to generate one answer to one prompt. Times are seconds of the monotonic clock."""

    request_id: str
    model: str
    prompt_ids: NDArray[np.int32]  # [n], n > 0
    chain: NDArray[np.uint8]  # [full blocks, 16]
    chain_seed: bytes
    block_tokens: int
    sampling: SamplingParams
    arrival_s: float
    deadline_s: float
    tokenize_s: float = 0.0
    ttft_objective_s: float = 0.0  # 0: the cluster's objective
    tpot_objective_s: float = 0.0
    tenant: str = ""
    slo_class: str = ""  # "": the tenant's class, or the default one
    allowed_classes: tuple[str, ...] = ()  # that the tenant may use; (): all
    priority: int = 0  # among the tenant's requests of the same class: lower goes first
    rolling: worker_pb2.RollingWindow | None = None  # of an endless request; None: everything stays visible
    idle_s: float = 0.0  # > 0: endless; after the first token, the deadline is this long after the last one
    place: bytes = b""  # of a chat's answer, where it is remembered; b"": it is not
    previous_tokens: int = 0  # estimated length of the last answer in a chat's history; 0: there is none
    head_tokens: int = 0  # before a chat's first message that is not the system's; 0: unknown
    dropped_messages: int = 0  # number of chat messages dropped to fit into the context
    text: TextOptions = TextOptions()
    wants_receipt: bool = False
    hints: RequestHints = NO_HINTS
    prefills_next_turn: bool = False  # after the answer, the known part of the next prompt is computed
    session: int = 0  # see `frontend.sessions`; 0: the client named none
    parent_session: int = 0
    span: Span = OFF  # span of the client's HTTP request

    @property
    def shows_prompt(self) -> bool:
        """True if the answer includes the prompt or its log-probabilities."""
        return self.text.echo or self.sampling.prompt_logprobs is not None

    def other_choice(self, choice: int) -> "GenerationRequest":
        """Return the request of another choice of the same prompt; `choice` makes its random numbers differ."""
        sampling = replace(self.sampling, choice=choice)
        return replace(self, request_id=f"{self.request_id}-{choice}", sampling=sampling)

    def extended(self, generated: Sequence[int]) -> tuple[NDArray[np.int32], bytes]:
        """Return prompt ids and encoded chain keys of a further attempt, whose prompt includes the generated tokens."""
        if not generated:
            return self.prompt_ids, self.chain.tobytes()
        ids = np.concatenate([self.prompt_ids, np.array(generated, np.int32)])
        done = len(self.chain)
        parent = self.chain[-1].tobytes() if done else None
        rest = chain_keys(self.chain_seed, ids[done * self.block_tokens :], self.block_tokens, parent=parent)
        return ids, self.chain.tobytes() + rest.tobytes()


@dataclass
class AttemptRecord:
    """One placement of a request, for its receipt."""

    placement: conductor_pb2.Placement
    tokens_before: int  # tokens of the answer that the client already had
    kv: conductor_pb2.KvSources | None = None  # None until the attempt's first token


@dataclass
class RequestStats:
    """Statistics of a running or finished request, filled in by its Generation."""

    attempts: int = 0
    prefill_node: str = ""
    decode_node: str = ""
    schedule_s: float = 0.0
    lost_s: float = 0.0  # time of failed attempts, from their placement to the next attempt
    cached_tokens: int = 0
    cached_dram_tokens: int = 0  # of these, from the memory of the prefill worker's pool node
    cached_ssd_tokens: int = 0  # from that pool node's SSD
    cached_remote_tokens: int = 0  # from another pool node; the rest were in the worker's own pages
    approximate_tokens: int = 0  # tokens whose reused KV may have been stored as int8, on any worker, or a sibling's
    sibling_tokens: int = 0  # reused beside `cached_tokens`: another model computed their KV
    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    ttft: TtftBreakdown | None = None  # None before the first token
    handoff: HandoffBreakdown | None = None  # of the last attempt with a hand-off
    first_token_s: float | None = None  # the monotonic clock
    last_token_s: float | None = None
    has_timing: bool = False
    intervals: TokenIntervals = field(default_factory=TokenIntervals)
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))  # all: another attempt computes them again
    prompt_logprobs: worker_pb2.PromptLogProbs | None = None
    placements: list[AttemptRecord] = field(default_factory=list)  # one per attempt; empty unless a receipt is wanted

    @property
    def mean_tbt_s(self) -> float:
        """Mean time between tokens in seconds; 0 with fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or len(self.token_ids) < 2:
            return 0.0
        return (self.last_token_s - self.first_token_s) / (len(self.token_ids) - 1)
