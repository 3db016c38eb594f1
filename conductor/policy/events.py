"""Events of a cluster, the input of the policy, as plain data; `decision_log.codec` converts them to JSON.

Events contain numbers of blocks, not block keys: the part of a prompt that is in the pool is described by arrays of
prefix lengths over a roster of pool nodes, which may have a thousand entries.

`clamp_event` bounds the numbers in events: a value out of bounds is replaced by the nearest one within. The policy
relies on these bounds, except for measurements, which `reports.learn` rejects and counts. They keep every sum and
product of the policy, in tokens, bytes and nanoseconds, far within 64 bits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from jit.fast_dataclass import fast_dataclass

__all__ = [
    "MOST_NS",
    "MOST_S",
    "MOST_TOKENS",
    "NO_MATCHES",
    "NO_QUEUE_KEY",
    "NS",
    "AdmissionAsked",
    "CopyFinished",
    "CostsGiven",
    "DecodeAsked",
    "DecodeSample",
    "Event",
    "FrontendLost",
    "Held",
    "KvSources",
    "NodeJoined",
    "NodeLost",
    "NodeReported",
    "NodeView",
    "ObjectivesChanged",
    "PathCosts",
    "Phase",
    "PoolMatch",
    "PoolMatches",
    "PrefillSample",
    "Progress",
    "QueueKey",
    "RequestArrived",
    "RequestCompleted",
    "Role",
    "Tick",
    "TransferSample",
    "clamp_event",
    "to_ns",
]

NS: Final = 1_000_000_000  # nanoseconds in a second
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """Leading blocks of a prompt on one pool node, or in one worker's memory.

    Of the `blocks`, `ssd_blocks` are on SSD only. `replica` is the `match_key` of the Copy that brought some of them
    there, or 0.
    """

    pool: str
    blocks: int
    ssd_blocks: int = 0
    replica: int = 0


class PoolMatches:
    """Leading blocks of a prompt on many pool nodes, or in many workers' memory, as arrays. Immutable.

    `roster` lists pool nodes in sorted order; `blocks` and `ssd_blocks` are int64 arrays with one entry per pool node
    (0: it holds nothing). `replicas` maps pool nodes to the `match_key` of the Copy that brought some of the blocks.
    Two instances are equal if they contain the same non-empty matches, whatever their rosters. Readers cache what they
    compute from a roster by its identity, so pass the same tuple again where possible.
    """

    __slots__ = ("blocks", "replicas", "roster", "ssd_blocks")

    def __init__(
        self, roster: tuple[str, ...], blocks: Ints, ssd_blocks: Ints, replicas: Mapping[str, int] | None = None
    ) -> None:
        self.roster = roster
        self.blocks = blocks
        self.ssd_blocks = ssd_blocks
        self.replicas = replicas or {}

    @classmethod
    def of(cls, *matches: PoolMatch) -> "PoolMatches":
        """Build from one object per pool node; of several for one pool node, the last one counts."""
        found = sorted({match.pool: match for match in matches}.values(), key=lambda match: match.pool)
        return cls(
            tuple(match.pool for match in found),
            np.array([match.blocks for match in found], np.int64),
            np.array([match.ssd_blocks for match in found], np.int64),
            {match.pool: match.replica for match in found if match.replica},
        )

    def __iter__(self) -> Iterator[PoolMatch]:
        held = np.flatnonzero(self.blocks)
        rows = zip(held.tolist(), self.blocks[held].tolist(), self.ssd_blocks[held].tolist(), strict=True)
        for index, blocks, ssd_blocks in rows:
            pool = self.roster[index]
            yield PoolMatch(pool, blocks, ssd_blocks, self.replicas.get(pool, 0))

    def __len__(self) -> int:
        return int(np.count_nonzero(self.blocks))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolMatches) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"PoolMatches.of({', '.join(map(repr, self))})"


NO_MATCHES = PoolMatches.of()


Role = Literal["prefill", "decode", "aggregated", "pool"]
Phase = Literal["prefill_started", "prefill_ended", "decode_joined", "ended"]


@dataclass(frozen=True, slots=True)
class NodeView:
    """Properties of a node that placement uses. For pool nodes only the first four fields are set."""

    node_id: str
    role: Role
    incarnation: int
    host_id: str
    pool_node_id: str = ""
    model: str = ""
    block_tokens: int = 1
    capacity_tokens: int = 0
    max_model_len: int = 0
    max_batch: int = 1
    kv_bytes_per_token: int = 0  # in KV groups without a window
    model_fingerprint: str = ""
    hardware: str = ""
    chunk_tokens: int = 0  # most prompt tokens of one step; 0: unknown
    window_blocks: int = 0  # at the end of a prefix, what is kept of it in KV groups with windows
    window_bytes_per_token: int = 0  # in these groups
    preempts: bool = False  # answers give up their pages to waiting requests of a more urgent class


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node joined. If its id is known with another incarnation, it replaces that node; with the same, it rejoins."""

    node: NodeView


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node's stream ended; everything that it held is lost."""

    node_id: str
    incarnation: int


@fast_dataclass
@dataclass(frozen=True, slots=True)
class QueueKey:
    """Ordering key of a waiting request on its node; times are relative to now (`worker.policy.scheduling_order`)."""

    level: int = 0  # priority of its class; lower goes first
    account: str = ""  # token of the account that is charged
    start_ns: int = 0  # virtual start time, compared between accounts
    priority: int = 0  # within the account; lower goes first
    waited_s: float = 0.0  # since it arrived at the frontend
    due_in_s: float = 0.0  # until its first token is due
    ages_in_s: float = 0.0  # until it has aged: from then on no newer request precedes it


NO_QUEUE_KEY = QueueKey()


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Held:
    """A request attempt that a worker currently holds."""

    request_id: str
    attempt: int
    committed_tokens: int = 0  # KV pages, in tokens; 0 on prefill nodes
    remaining_prefill_tokens: int = 0
    prompt_tokens: int = 0  # with a rolling window, at most as many as it holds; more may remain to be computed
    max_new_tokens: int = 0
    decode_node: str = ""  # reported by prefill nodes: where the request will decode
    turn: QueueKey = NO_QUEUE_KEY  # set while it waits for its first token


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Progress:
    """Phase that a request attempt reached on the reporting node."""

    request_id: str
    attempt: int
    phase: Phase


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PrefillSample:
    """Measured duration of one request's prefill."""

    new_tokens: int
    reused_tokens: int
    seconds: float


@fast_dataclass
@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Measured duration of one decode step: its batch size and the tokens of context of all its sequences."""

    batch: int
    context_tokens: int
    seconds: float


@fast_dataclass
@dataclass(frozen=True, slots=True)
class TransferSample:
    """Measured duration of one batch of bytes.

    `path` is "push", "group" (between members of a prefill group), "pull", "load" (from the pool node of the same
    host), "fetch" (from another host's), "store", "copy", "ssd_read" or "ssd_write".
    """

    nbytes: int
    seconds: float
    path: str


@fast_dataclass
@dataclass(frozen=True, slots=True)
class NodeReported:
    """A node's report: all requests that it holds now, and progress and measurements since its last report."""

    node_id: str
    draining: bool = False
    held: tuple[Held, ...] = ()
    progress: tuple[Progress, ...] = ()
    prefills: tuple[PrefillSample, ...] = ()
    decodes: tuple[DecodeSample, ...] = ()
    transfers: tuple[TransferSample, ...] = ()


@fast_dataclass
@dataclass(frozen=True, slots=True)
class SiblingPoint:
    """Layers that are computed when a sibling's KV is reused, and the hidden states that enter them.

    `cost` is their share of a prefill's work, `quality_loss` the part of the model's lead over its sibling that is
    lost. `input_pool` has the states of the first `input_blocks` blocks, `input_nbytes` for each token; nothing for
    layer 0.
    """

    first_layer: int
    last_layer: int
    cost: float
    quality_loss: float
    input_pool: str = ""
    input_blocks: int = 0
    input_nbytes: int = 0


@fast_dataclass
@dataclass(frozen=True, slots=True)
class SiblingMatch:
    """Leading blocks of a prompt of which `pool` has another model's KV, the most of all pool nodes."""

    sender: str  # fingerprint of the other model
    pool: str
    blocks: int
    points: tuple[SiblingPoint, ...]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request, or a further attempt of one, is to be placed.

    `matches` describes the blocks of its prompt that are in the pool, `in_workers` those that workers hold in their own
    memory. `match_key` identifies the longest prefix in the pool: a short hash of its last block's key and the KV
    namespace. `prompt_tokens` includes the `generated` tokens of earlier attempts.
    """

    request_id: str
    attempt: int
    frontend_id: str
    model: str
    prompt_tokens: int
    max_new_tokens: int
    matches: PoolMatches = NO_MATCHES
    match_key: int = 0
    generated: int = 0
    excluded: tuple[str, ...] = ()
    ttft_objective_s: float = 0.0  # from the request's header; 0: none
    tbt_objective_s: float = 0.0
    tenant: str = ""
    slo_class: str = ""  # "": that of its tenant, or the default class
    priority: int = 0  # within its tenant and class; lower goes first, as in vLLM
    waited_s: float = 0.0  # since it arrived at the frontend
    endless: bool = False  # generates until the client disconnects; not used to learn answer lengths
    prompt_key: int = 0  # short key of its last full block, which identifies the prompt; 0: it has no full block
    allowed_classes: tuple[str, ...] = ()  # that its tenant may use; (): all
    in_workers: PoolMatches = NO_MATCHES  # leading blocks in workers' own memory; `pool` is the worker's id
    previous_tokens: int = 0  # length of the previous answer in its dialogue; 0: there is none, or it is not known
    expected_tokens: int = 0  # of its whole answer, as its client expects; 0: the client does not say
    session: int = 0  # hash of its session's id and its tenant; 0: it has none
    parent_session: int = 0  # likewise, of the session that started its session
    pause_s: float = 0.0  # until the next request of its session, as its client expects; 0: unknown
    lifetime_s: float = 0.0  # for which pools should retain its KV; 0: its client announces no further request
    window_tokens: int = 0  # most tokens whose KV it holds at once; 0: that of all
    siblings: tuple[SiblingMatch, ...] = ()  # KV of other models that its model may reuse

    @property
    def seen_tokens(self) -> int:
        """Prompt tokens that the first token of the answer sees at most."""
        return self.most_held(self.prompt_tokens)

    def most_held(self, tokens: int) -> int:
        """Return the tokens whose KV it holds at most, of `tokens`."""
        return min(tokens, self.window_tokens) if self.window_tokens else tokens


@fast_dataclass
@dataclass(frozen=True, slots=True)
class KvSources:
    """Prompt tokens of an attempt whose KV was reused, and of these those that came from the pool, by tier.

    The rest of `cached_tokens` was in the worker's own memory; all other tokens of the prompt were computed.
    """

    cached_tokens: int = 0
    cached_dram_tokens: int = 0  # memory of the pool node on the worker's host
    cached_ssd_tokens: int = 0  # that pool node's SSD
    cached_remote_tokens: int = 0  # a pool node on another host
    recomputed_blocks: int = 0  # reusable blocks that could not be loaded and were computed instead
    sibling_tokens: int = 0  # reused beside `cached_tokens`: another model computed their KV


@fast_dataclass
@dataclass(frozen=True, slots=True)
class RequestCompleted:
    """The frontend's final report on an attempt; times that were not measured are 0."""

    request_id: str
    attempt: int
    outcome: str
    ttft_s: float = 0.0
    mean_tbt_s: float = 0.0
    generated: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    slow_tbt_s: float = 0.0  # mean of the longest tenth of its times between tokens
    kv: KvSources | None = None  # for receipts: set if one was requested and the attempt has had a token


@dataclass(frozen=True, slots=True)
class CopyFinished:
    """A Copy decision was carried out, or failed (`nbytes` 0)."""

    source: str
    target: str
    match_key: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ObjectivesChanged:
    """A new version of the record of objectives is in force; `content` is its text as of `objectives.record_text`."""

    version: int
    content: str


@dataclass(frozen=True, slots=True)
class PathCosts:
    """Measured cost of one batch of bytes on a path; `nbytes` is the largest batch measured."""

    path: str
    fixed_s: float
    per_byte_s: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class CostsGiven:
    """A measured cost profile of a model, provided before its nodes join.

    `prefill` and `decode` are the coefficients of `worker.policy.cost_formulas`, in its order. `new_tokens`,
    `prompt_tokens`, `batch` and `context_tokens` are the largest values measured.
    """

    model: str
    name: str
    model_fingerprint: str  # "": valid for any weights
    hardware: str
    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    new_tokens: float
    prompt_tokens: float
    batch: float
    context_tokens: float
    paths: tuple[PathCosts, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeAsked:
    """Request for permission to decode, sent when the prefill has ended and while the first token is withheld.

    Sent if `Place.asks_again` is set. The policy answers with a Reject, or with no decision, which admits the request.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class FrontendLost:
    """A frontend has ended: nobody will complete the requests that it had."""

    frontend_id: str


@dataclass(frozen=True, slots=True)
class AdmissionAsked:
    """Would this request be admitted? Nothing is placed: an API server asks for the placement afterwards, if so."""

    request: RequestArrived


@dataclass(frozen=True, slots=True)
class Tick:
    """Periodic event without data: triggers time-outs, the release of orphans, and role planning."""


Event = (
    NodeJoined
    | NodeLost
    | NodeReported
    | RequestArrived
    | DecodeAsked
    | RequestCompleted
    | CopyFinished
    | ObjectivesChanged
    | CostsGiven
    | FrontendLost
    | AdmissionAsked
    | Tick
)


MOST_TOKENS: Final = 1 << 31
MOST_S: Final = 1e6  # of any prediction: eleven days
MOST_NS: Final = 10**15
_MOST_BYTES: Final = 1 << 50
_MOST_PRIORITY: Final = 1 << 31
_MOST_VIRTUAL_NS: Final = 1 << 60
_MOST_HASH: Final = (1 << 64) - 1
_OUTCOMES: Final = frozenset({"finished", "failed", "cancelled", "retry", "rejected"})
T = TypeVar("T", int, float)
D = TypeVar("D", RequestArrived, RequestCompleted, CopyFinished, Held, NodeView)


def clamp_event(event: Event) -> Event:
    """Return the event itself if all its numbers are within bounds, otherwise a copy with bounded numbers."""
    match event:
        case RequestArrived():
            return _arrival(event)
        case AdmissionAsked(request):
            bounded = _arrival(request)
            return event if bounded is request else AdmissionAsked(bounded)
        case NodeReported():
            return _report(event)
        case RequestCompleted():
            return _completion(event)
        case CopyFinished():
            return _within(event, {"nbytes": _MOST_BYTES}, ("seconds",))
        case NodeJoined(node):
            names = (
                "capacity_tokens",
                "max_model_len",
                "max_batch",
                "kv_bytes_per_token",
                "block_tokens",
                "chunk_tokens",
                "window_blocks",
                "window_bytes_per_token",
            )
            view = _within(node, dict.fromkeys(names, MOST_TOKENS), ())
            view = view if view.block_tokens else replace(view, block_tokens=1)
            return event if view is node else NodeJoined(view)
    return event


def to_ns(seconds: float) -> int:
    """Convert predicted seconds to nanoseconds, bounded so that thousands of them can be added in 64 bits."""
    if -MOST_S < seconds < MOST_S:
        return round(seconds * 1e9)
    return round(max(-MOST_S, min(seconds, MOST_S)) * 1e9)


def _arrival(event: RequestArrived) -> RequestArrived:
    if (
        0 < event.prompt_tokens <= MOST_TOKENS
        and 0 <= event.max_new_tokens <= MOST_TOKENS
        and 0 <= event.generated < event.prompt_tokens
        and -_MOST_PRIORITY <= event.priority <= _MOST_PRIORITY
        and 0 <= event.ttft_objective_s < MOST_S
        and 0 <= event.tbt_objective_s < MOST_S
        and 0 <= event.waited_s < MOST_S
        and 0 <= event.previous_tokens <= MOST_TOKENS
        and 0 <= event.expected_tokens <= MOST_TOKENS
        and 0 <= event.session <= _MOST_HASH
        and 0 <= event.parent_session <= _MOST_HASH
        and 0 <= event.pause_s < MOST_S
        and 0 <= event.lifetime_s < MOST_S
    ):
        return event
    counts = {"max_new_tokens": MOST_TOKENS, "previous_tokens": MOST_TOKENS, "expected_tokens": MOST_TOKENS}
    counts |= {"session": _MOST_HASH, "parent_session": _MOST_HASH}
    prompt_tokens = min(max(1, event.prompt_tokens), MOST_TOKENS)
    return replace(
        _within(event, counts, ("ttft_objective_s", "tbt_objective_s", "waited_s", "pause_s", "lifetime_s")),
        prompt_tokens=prompt_tokens,
        generated=min(max(0, event.generated), prompt_tokens - 1),
        priority=min(max(-_MOST_PRIORITY, event.priority), _MOST_PRIORITY),
    )


def _completion(event: RequestCompleted) -> RequestCompleted:
    if (
        0 <= event.generated <= MOST_TOKENS
        and 0 <= event.cached_tokens <= MOST_TOKENS
        and 0 <= event.ttft_s < MOST_S
        and 0 <= event.mean_tbt_s < MOST_S
        and 0 <= event.slow_tbt_s < MOST_S
        and event.outcome in _OUTCOMES
    ):
        return event
    counts = {"generated": MOST_TOKENS, "cached_tokens": MOST_TOKENS}
    event = _within(event, counts, ("ttft_s", "mean_tbt_s", "slow_tbt_s"))
    return event if event.outcome in _OUTCOMES else replace(event, outcome="failed")


def _report(event: NodeReported) -> NodeReported:
    held = tuple([_held(one) for one in event.held])
    return event if held == event.held else replace(event, held=held)


def _held(held: Held) -> Held:
    names = ("committed_tokens", "remaining_prefill_tokens", "prompt_tokens", "max_new_tokens")
    held = _within(held, dict.fromkeys(names, MOST_TOKENS), ())
    turn = _turn(held.turn)
    return held if turn is held.turn else replace(held, turn=turn)


def _turn(turn: QueueKey) -> QueueKey:
    if turn is NO_QUEUE_KEY:
        return turn
    found = QueueKey(
        _between(turn.level, _MOST_PRIORITY),
        turn.account,
        _between(turn.start_ns, _MOST_VIRTUAL_NS),
        _between(turn.priority, _MOST_PRIORITY),
        *(_between(seconds, MOST_S) if isfinite(seconds) else 0.0 for seconds in _turn_times(turn)),
    )
    return turn if found == turn else found


def _turn_times(turn: QueueKey) -> tuple[float, float, float]:
    return turn.waited_s, turn.due_in_s, turn.ages_in_s


def _between(value: T, most: T) -> T:
    return min(max(-most, value), most)


def _is_time(seconds: float) -> bool:
    return 0 <= seconds < MOST_S


def _within(value: D, counts: dict[str, int], times: tuple[str, ...]) -> D:
    """Bound counts to 0..bound and times to 0..MOST_S; NaN and negative times become 0."""
    changed: dict[str, Any] = {
        name: min(max(0, getattr(value, name)), most)
        for name, most in counts.items()
        if not 0 <= getattr(value, name) <= most
    }
    for name in times:
        seconds = getattr(value, name)
        if not _is_time(seconds):
            changed[name] = MOST_S if isfinite(seconds) and seconds > 0 else 0.0
    return replace(value, **changed) if changed else value
