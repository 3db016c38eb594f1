"""Events of a cluster as plain data, without behaviour; `codec` gives each a JSON form.

Blocks are counted, never named: the part of a prompt that pool nodes hold arrives as lengths, in arrays over a roster
of pool nodes, of which one event may contain a thousand.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from conductor.policy.fast_dataclass import fast_dataclass

__all__ = [
    "NO_MATCHES",
    "CopyFinished",
    "CostsGiven",
    "DecodeAsked",
    "DecodeSample",
    "Event",
    "Held",
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
]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """Leading blocks of a prompt on one pool node: `blocks`, of which `ssd_blocks` are on SSD only."""

    pool: str
    blocks: int
    ssd_blocks: int = 0
    replica: int = 0


class PoolMatches:
    """Pool nodes `roster`, sorted, hold `blocks` (int64, one each; 0: nothing), of which `ssd_blocks` are on SSD only.

    Nothing of it may be changed. Equal are those that tell of the same matches. A roster that is the very same object
    as before costs its readers nothing. `replicas`: per pool node, the match_key of the Copy that brought a part.
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
        """The same from one object per pool node; the last word on a pool node counts."""
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
    """Properties of a node that placement uses; pool nodes have only the first four fields."""

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
    kv_bytes_per_token: int = 0
    model_fingerprint: str = ""
    hardware: str = ""
    chunk_tokens: int = 0  # most prompt tokens of one step; 0: not known


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node is there. A known node id with another incarnation replaces the old node; with the same, it goes on."""

    node: NodeView


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node's stream ended: what it held is gone."""

    node_id: str
    incarnation: int


@fast_dataclass
@dataclass(frozen=True, slots=True)
class QueueKey:
    """Scheduling order of a waiting request on its node, as of this moment (`worker.policy.scheduling_order`)."""

    level: int = 0  # of its class: lower goes first
    account: str = ""  # token of the one who is charged
    start_ns: int = 0  # virtual start time among the accounts
    priority: int = 0  # among the account's own: lower goes first
    waited_s: float = 0.0  # since it came to the front door
    due_in_s: float = 0.0  # until its first token should be there
    ages_in_s: float = 0.0  # from then on nothing newer goes before it


NO_QUEUE_KEY = QueueKey()


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Held:
    """A request (attempt) that a worker holds right now."""

    request_id: str
    attempt: int
    committed_tokens: int = 0  # KV pages, in tokens; 0 on prefill nodes
    remaining_prefill_tokens: int = 0
    prompt_tokens: int = 0
    max_new_tokens: int = 0
    decode_node: str = ""  # told by prefill nodes: where the request decodes next
    turn: QueueKey = NO_QUEUE_KEY  # while it waits for its first token


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Progress:
    """A request (attempt) reached a phase on the reporting node."""

    request_id: str
    attempt: int
    phase: Phase


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One request's prefill, as computed."""

    new_tokens: int
    reused_tokens: int
    seconds: float


@fast_dataclass
@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One decode step."""

    batch: int
    context_tokens: int
    seconds: float


@fast_dataclass
@dataclass(frozen=True, slots=True)
class TransferSample:
    """One batch of bytes moved; path is "push", "group" (between members of a prefill group), "pull", "load" (from the
    host's own pool), "fetch" (from another's), "store", "copy", "ssd_read" or "ssd_write"."""

    nbytes: int
    seconds: float
    path: str


@fast_dataclass
@dataclass(frozen=True, slots=True)
class NodeReported:
    """A worker's report: all that it holds now, and what happened since its last report."""

    node_id: str
    draining: bool = False
    held: tuple[Held, ...] = ()
    progress: tuple[Progress, ...] = ()
    prefills: tuple[PrefillSample, ...] = ()
    decodes: tuple[DecodeSample, ...] = ()
    transfers: tuple[TransferSample, ...] = ()


@fast_dataclass
@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request, or a further attempt of one, wants a place.

    `matches`: what pool nodes hold of it. `match_key`: short key of the longest match's last block and its KV
    namespace, which names a hot prefix. `prompt_tokens` includes the `generated` ones.
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
    ttft_objective_s: float = 0.0  # 0 = the cluster's
    tbt_objective_s: float = 0.0
    tenant: str = ""
    slo_class: str = ""  # "" = that of its tenant, or the default one
    priority: int = 0  # among its tenant's requests of its class: lower goes first, as in vLLM
    waited_s: float = 0.0  # since it came to the front door
    endless: bool = False  # it goes on until its client leaves: constant load, which says nothing about lengths
    prompt_key: int = 0  # of its last whole block: the same prompt, the same key; 0: it has none


@fast_dataclass
@dataclass(frozen=True, slots=True)
class RequestCompleted:
    """The frontend's last word on an attempt; measured times are 0 where there are none."""

    request_id: str
    attempt: int
    outcome: str
    ttft_s: float = 0.0
    mean_tbt_s: float = 0.0
    generated: int = 0
    cached_tokens: int = 0  # of the prompt, not computed
    slow_tbt_s: float = 0.0  # mean of the longest tenth of its times between tokens; 0 = not measured


@dataclass(frozen=True, slots=True)
class CopyFinished:
    """A Copy decision was carried out, or could not be (`nbytes` 0)."""

    source: str
    target: str
    match_key: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ObjectivesChanged:
    """Another version of the record of objectives is in force; `content` is what `record_form.record_text` gives."""

    version: int
    content: str


@dataclass(frozen=True, slots=True)
class PathCosts:
    """Cost of one batch of bytes on a path; `nbytes` is the most that was measured."""

    path: str
    fixed_s: float
    per_byte_s: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class CostsGiven:
    """A measured profile of what a model's work costs, told before its nodes join.

    Coefficients are those of `worker.policy.cost_formulas`, in its order; the other numbers are the most measured.
    """

    model: str
    name: str
    model_fingerprint: str  # "" = of no weights in particular
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
    """The prefill has ended and the first token is withheld: may the request decode? A Reject says no, nothing yes.

    Asked where `Place.asks_again` says so, before the client has anything.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: orphans and silent nodes are looked for."""


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
    | Tick
)
