"""Everything the policy can decide, as plain data; `codec` gives each a JSON form. No behaviour lives here."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Copy", "Decision", "Holder", "Place", "PrefillScore", "Reason", "Reject", "ReleaseOrphan", "Shrink"]

Reason = Literal["ttft", "tbt", "decode_capacity", "queue", "no_nodes", "unknown_model", "unknown_class", "too_long"]


@dataclass(frozen=True, slots=True)
class Holder:
    """Blocks [first_block, first_block + num_blocks) of the prompt can be read at this pool node."""

    pool: str
    first_block: int
    num_blocks: int
    ssd_blocks: int = 0  # of them, those that are on SSD only


@dataclass(frozen=True, slots=True)
class PrefillScore:
    """Algorithm 1's terms for one candidate; their sum is its predicted TTFT."""

    node_id: str
    transfer_s: float
    queue_s: float
    prefill_s: float
    reuse_blocks: int


@dataclass(frozen=True, slots=True)
class Place:
    """Run the request here. `decode` "" means that the prefill node goes on to the end.

    `holders` cover [0, reuse_blocks) without gap or overlap, in order. `scores` is filled when the policy explains.
    """

    request_id: str
    attempt: int
    prefill: str
    decode: str
    reuse_blocks: int
    holders: tuple[Holder, ...]
    predicted_ttft_s: float
    predicted_tbt_s: float
    scores: tuple[PrefillScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not serve the request now; `retry_after_s` is in whole seconds, 0 where trying again cannot help.

    `may_return`: nothing is missing but nodes that are silent now, which may report again at any moment.
    """

    request_id: str
    attempt: int
    reason: Reason
    message: str
    retry_after_s: float
    may_return: bool = False


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


Decision = Place | Reject | Copy | Shrink | ReleaseOrphan
