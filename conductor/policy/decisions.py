"""Everything the policy can decide, as plain data; `codec` gives each a JSON form. No behaviour lives here."""

from dataclasses import dataclass
from typing import Literal

from conductor.policy.events import NO_QUEUE_KEY, QueueKey
from conductor.policy.fast_dataclass import fast_dataclass

__all__ = [
    "ColocatedScore",
    "Considered",
    "Copy",
    "Decision",
    "DecodeScore",
    "Holder",
    "Place",
    "PrefillScore",
    "Reason",
    "Reject",
    "ReleaseOrphan",
    "Shrink",
    "SwitchRole",
    "WhyNot",
]

Reason = Literal[
    "ttft", "tbt", "decode_capacity", "queue", "no_nodes", "unknown_model", "unknown_class", "too_long", "endless"
]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Holder:
    """Blocks [first_block, first_block + num_blocks) of the prompt can be read at this pool node."""

    pool: str
    first_block: int
    num_blocks: int
    ssd_blocks: int = 0  # of them, those that are on SSD only


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PrefillScore:
    """Algorithm 1's terms for one candidate; their sum is its predicted TTFT."""

    node_id: str
    transfer_s: float
    queue_s: float
    prefill_s: float
    reuse_blocks: int


@fast_dataclass
@dataclass(frozen=True, slots=True)
class DecodeScore:
    """One candidate for the decode: predicted time between tokens with this request in its batch, and room before."""

    node_id: str
    tbt_s: float
    free_tokens: int


# Why a prompt is not computed where it decodes; "": it is, or may be.
WhyNot = Literal["", "no_room", "not_sooner", "unknown_chunks", "slows_others"]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class ColocatedScore:
    """Predictions for prefilling on the decode node, beside the TTFT of the plan with a separate prefill node."""

    node_id: str
    transfer_s: float
    queue_s: float
    prefill_s: float
    divided_s: float  # TTFT of the other plan
    step_s: float = 0.0  # the longest step there meanwhile; 0: not asked, since it is no faster
    bound_s: float = 0.0  # what that may take; 0: it disturbs nobody
    is_better: bool = False  # faster, and harmless
    why_not: WhyNot = ""


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Considered:
    """Inputs of a decision: the best candidates, the predictions at the best of each, and the objectives."""

    prefill: tuple[PrefillScore, ...] = ()
    num_prefill: int = 0  # candidates that there were
    decode: tuple[DecodeScore, ...] = ()
    num_decode: int = 0
    ttft_s: float = 0.0  # predicted, with the wait for decode pages
    tbt_s: float = 0.0
    room_wait_s: float = 0.0  # until the decode node has the pages
    need_tokens: int = 0  # pages reserved there, in tokens
    ttft_objective_s: float = 0.0
    tbt_objective_s: float = 0.0
    ttft_from: str = ""
    tbt_from: str = ""
    undivided: ColocatedScore | None = (
        None  # the plan without hand-over, where there may be one; `prefill` has none of it
    )


NOTHING_CONSIDERED = Considered()


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Place:
    """Run the request here. `decode` "" means that the prefill node goes on to the end.

    `holders` cover [0, reuse_blocks) without gap or overlap, in order. `asks_again`: the first token is to be withheld
    until a DecodeAsked was answered.
    """

    request_id: str
    attempt: int
    prefill: str
    decode: str
    reuse_blocks: int
    holders: tuple[Holder, ...]
    predicted_ttft_s: float
    predicted_tbt_s: float
    turn: QueueKey = NO_QUEUE_KEY
    considered: Considered = NOTHING_CONSIDERED
    extrapolated: tuple[str, ...] = ()  # predicted beyond what was measured: "prefill", "decode", "load", ...
    asks_again: bool = False
    reserve_tokens: int = 0  # pages to begin with on the decode node, in tokens; 0 = for the most that may be needed
    helpers: tuple[str, ...] = ()  # prefill nodes that may compute some of its chunks


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not serve the request now; `retry_after_s` is in whole seconds, 0 where trying again cannot help.

    `may_return`: nothing is missing but nodes that are silent, leave, or left just now: they or their successors are
    likely to be there in a moment.
    `after_prefill`: the prompt was computed in vain.
    """

    request_id: str
    attempt: int
    reason: Reason
    message: str
    retry_after_s: float
    may_return: bool = False
    considered: Considered = NOTHING_CONSIDERED
    extrapolated: tuple[str, ...] = ()  # as in Place
    after_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the prompt's leading `num_blocks` from pool node `source` into pool node `target`."""

    source: str
    target: str
    num_blocks: int
    match_key: int


@dataclass(frozen=True, slots=True)
class Shrink:
    """The prefix that Copy `match_key` brought to pool node `pool` is used no more: drop it there if another has it,
    but for its first `keep_blocks`, which were there before."""

    pool: str
    match_key: int
    keep_blocks: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseOrphan:
    """Nobody holds or completes this request: its claims were dropped."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """One more node should have `role`: this one, of the other role, has the least to finish.

    `is_advice`: it is only said. `reason` is for people.
    """

    node_id: str
    role: Literal["prefill", "decode"]
    reason: str
    is_advice: bool


Decision = Place | Reject | Copy | Shrink | ReleaseOrphan | SwitchRole
