"""Decisions, the output of the policy, as plain data; `decision_log.codec` converts them to JSON."""

from dataclasses import dataclass
from typing import Literal

from conductor.policy.events import NO_QUEUE_KEY, QueueKey
from jit.fast_dataclass import fast_dataclass

__all__ = [
    "Admissible",
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
    "ttft",
    "tbt",
    "decode_capacity",
    "queue",
    "no_nodes",
    "unknown_model",
    "unknown_class",
    "denied_class",
    "too_long",
    "endless",
]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Holder:
    """Pool node from which blocks [first_block, first_block + num_blocks) of the prompt are to be read."""

    pool: str
    first_block: int
    num_blocks: int
    ssd_blocks: int = 0  # of these, on SSD only


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PrefillScore:
    """Terms of Algorithm 1 of the Mooncake paper for one candidate; the three times add up to its predicted TTFT."""

    node_id: str
    transfer_s: float
    queue_s: float
    prefill_s: float
    reuse_blocks: int
    local_blocks: int = 0  # of the prompt, in the node's own memory


@fast_dataclass
@dataclass(frozen=True, slots=True)
class DecodeScore:
    """One candidate for the decode: predicted TBT with this request in its batch, and free KV tokens without it."""

    node_id: str
    tbt_s: float
    free_tokens: int


# Reason why a prompt is not prefilled on its decode node; "" if it is, or may be.
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
    step_s: float = 0.0  # longest decode step during the prefill; 0: not computed, since the plan is not faster
    bound_s: float = 0.0  # limit of that step; 0: no other request decodes there
    is_better: bool = False  # faster, and within the limit
    why_not: WhyNot = ""


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Considered:
    """Inputs of a decision: the best candidates, the predictions at the best of each, and the objectives."""

    prefill: tuple[PrefillScore, ...] = ()
    num_prefill: int = 0  # number of all candidates, listed or not
    decode: tuple[DecodeScore, ...] = ()
    num_decode: int = 0
    ttft_s: float = 0.0  # predicted, including the wait for decode pages
    tbt_s: float = 0.0
    room_wait_s: float = 0.0  # until the decode node has the pages
    need_tokens: int = 0  # pages reserved there, in tokens
    ttft_objective_s: float = 0.0
    tbt_objective_s: float = 0.0
    ttft_from: str = ""
    tbt_from: str = ""
    colocated: ColocatedScore | None = None  # colocated prefill, where it is possible; not listed in `prefill`


NOTHING_CONSIDERED = Considered()


@fast_dataclass
@dataclass(frozen=True, slots=True)
class SiblingChoice:
    """Reuse of another model's KV of the prompt's first `num_blocks` blocks, after those that the model's own covers.

    The layers `first_layer` to `last_layer` are computed, from hidden states in `input_pool` unless they begin with
    layer 0.
    """

    sender: str  # fingerprint of the other model
    first_layer: int
    last_layer: int
    num_blocks: int
    pool: str  # of its KV
    input_pool: str
    quality_loss: float  # measured, see `worker.policy.reuse_profile`


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Place:
    """Run the request on these nodes. If `decode` is "", the prefill node also decodes.

    `holders` cover the blocks [0, n) in the pool in order, without gap or overlap, where n or `local_blocks` equals
    `reuse_blocks`, and neither exceeds it: the first `local_blocks` are in the prefill node's own memory, the others
    are loaded. `asks_again`: the first token must be
    withheld until a DecodeAsked has been answered.
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
    extrapolated: tuple[str, ...] = ()  # predictions beyond the measured range: "prefill", "decode", "load", ...
    asks_again: bool = False
    reserve_tokens: int = 0  # pages to reserve first where it decodes, in tokens; 0: the most that may be needed
    helpers: tuple[str, ...] = ()  # prefill nodes that may compute some of its chunks
    local_blocks: int = 0  # in the prefill node's own memory
    sibling: SiblingChoice | None = None  # None: only the model's own KV is reused


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not serve the request now. `retry_after_s` is in whole seconds; 0 if a retry cannot help.

    `may_return`: the only reason is that nodes are suspect, draining or just lost, so that they or their successors
    are likely to be available shortly. `after_prefill`: the request was rejected when its prompt had been computed.
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
class Admissible:
    """The request of an `AdmissionAsked` would be placed now, with these predictions. Nothing is reserved for it."""

    request_id: str
    reuse_blocks: int
    predicted_ttft_s: float
    predicted_tbt_s: float


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the prompt's leading `num_blocks` from pool node `source` into pool node `target`.

    `keeps_fetched`: the prefill node of the request, whose own pool node is `target`, fetches them anyway and stores
    them there, so that nothing else is sent.
    """

    source: str
    target: str
    num_blocks: int
    match_key: int
    keeps_fetched: bool = False


@dataclass(frozen=True, slots=True)
class Shrink:
    """Drop the prefix that Copy `match_key` brought to pool node `pool`, if another pool node has it.

    Its first `keep_blocks`, which were there before the copy, are kept.
    """

    pool: str
    match_key: int
    keep_blocks: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseOrphan:
    """Forget a request that no worker holds and no frontend completed; its claims were dropped."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """Change the role of node `node_id`, the one of the other role with the least work left, to `role`.

    `is_advice`: report the decision only, do not carry it out. `reason` is a message for operators.
    """

    node_id: str
    role: Literal["prefill", "decode"]
    reason: str
    is_advice: bool


Decision = Place | Reject | Admissible | Copy | Shrink | ReleaseOrphan | SwitchRole
