"""What a request is once it is understood: token ids, sampling, limits. Plain data, no HTTP and no wire."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from frontend.timing import Handoff, Ttft
from kvpool import chain_keys
from moonpool_proto.v1 import common_pb2, worker_pb2
from telemetry.tracing import OFF, Span


@dataclass(frozen=True)
class Grammar:
    """A language that the answer's text is held to; kind and source are the wire's."""

    kind: common_pb2.Grammar.Kind.ValueType
    source: str


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. `stop_token_ids` are the client's own; the model's end tokens are apart."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int  # 0 = off
    seed: int  # unsigned 64-bit
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    choice: int = 0  # which of a prompt's answers: those after the first wait for the first one's first token
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None  # likeliest ids told beside each token; None: no log-probabilities
    prompt_logprobs: int | None = None  # the same of the prompt, asked for with its first answer only
    grammar: Grammar | None = None

    def to_proto(self) -> common_pb2.Sampling:
        """The wire's form: end tokens are stop tokens there, unless they are to be ignored."""
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
class TextOptions:
    """How the answer's tokens are shown."""

    echo: bool = False  # the prompt stands before the answer
    hides_answer: bool = False  # nothing but the prompt is shown, and no token is counted
    skip_special_tokens: bool = True
    include_stop: bool = False  # what ended the answer is part of it


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be continued. Times are of the monotonic clock, in seconds."""

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
    ttft_objective_s: float = 0.0  # 0 = the cluster's
    tpot_objective_s: float = 0.0
    tenant: str = ""
    slo_class: str = ""  # "" = that of its tenant, or the default one
    priority: int = 0  # among its tenant's requests of its class: lower goes first
    idle_s: float = 0.0  # > 0: endless; once it has a token its deadline is so long after the last one
    place: bytes = b""  # of a chat's answer, where it is remembered; b"": it is not
    dropped_messages: int = 0  # of a chat, so that it fits into the context
    text: TextOptions = TextOptions()
    span: Span = OFF  # of the client's request

    @property
    def tells_prompt(self) -> bool:
        """Whether the prompt, or its log-probabilities, stands before the answer."""
        return self.text.echo or self.sampling.prompt_logprobs is not None

    def other_choice(self, choice: int) -> "GenerationRequest":
        """Another answer to the same prompt: with one seed, their noise differs by `choice`."""
        sampling = replace(self.sampling, choice=choice)
        return replace(self, request_id=f"{self.request_id}-{choice}", sampling=sampling)

    def extended(self, generated: list[int]) -> tuple[NDArray[np.int32], bytes]:
        """Prompt and chain (as on the wire) of a further attempt: generated tokens count as prompt there."""
        if not generated:
            return self.prompt_ids, self.chain.tobytes()
        ids = np.concatenate([self.prompt_ids, np.array(generated, np.int32)])
        done = len(self.chain)
        parent = self.chain[-1].tobytes() if done else None
        rest = chain_keys(self.chain_seed, ids[done * self.block_tokens :], self.block_tokens, parent=parent)
        return ids, self.chain.tobytes() + rest.tobytes()


@dataclass
class Facts:
    """What a finished or running request can tell about itself; filled in by its driver."""

    attempts: int = 0
    prefill_node: str = ""
    decode_node: str = ""
    schedule_s: float = 0.0
    lost_s: float = 0.0  # of attempts that are over, from placement to the next try for one
    cached_tokens: int = 0
    cached_dram_tokens: int = 0  # of them, from the memory of the prefill worker's pool node
    cached_ssd_tokens: int = 0  # from its SSD
    cached_remote_tokens: int = 0  # from another pool node; the rest were in the worker's own pages
    approximate_tokens: int = 0  # tokens whose KV was reused and may have been through int8 storage: on any worker
    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    ttft: Ttft | None = None  # None: there is no token yet
    handoff: Handoff | None = None  # of the last attempt that had one
    first_token_s: float | None = None  # the monotonic clock
    last_token_s: float | None = None
    has_timing: bool = False
    intervals_s: "array[float]" = field(default_factory=lambda: array("f"))  # between tokens, as they came
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: worker_pb2.PromptLogProbs | None = None

    @property
    def mean_tbt_s(self) -> float:
        """Mean time between tokens; 0 with fewer than two."""
        if self.first_token_s is None or self.last_token_s is None or len(self.token_ids) < 2:
            return 0.0
        return (self.last_token_s - self.first_token_s) / (len(self.token_ids) - 1)

    @property
    def slow_tbt_s(self) -> float:
        """Mean of the longest tenth of the times between tokens, rounded up to whole ones; 0 with fewer than two."""
        count = -(-len(self.intervals_s) // 10)
        return sum(sorted(self.intervals_s)[-count:]) / count if count else 0.0
