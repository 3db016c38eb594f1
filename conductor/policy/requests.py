"""What the placed requests claim, as a struct of arrays: prefill queues, the decode ledger, who sends to whom.

Every sum per node is computed from these rows when it is asked for (`kernels`). No total is kept beside them, so none
can drift.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from conductor.policy.charges import Charge
from conductor.policy.decisions import Reason
from conductor.policy.objectives import NOTHING_TO_MEET, EffectiveObjectives
from conductor.policy.row_kernels import TABLE_COLUMNS, row_kernels
from conductor.policy.turn_columns import NUM_COLUMNS

__all__ = [
    "COMMITTED",
    "CURVE",
    "DECODE_NODE",
    "GENERATED",
    "JOINED",
    "MAX_NEW",
    "NONE",
    "PREFILL_NODE",
    "PREFILL_NS",
    "PROMPT",
    "READY",
    "SENDER",
    "STARTED",
    "Claim",
    "RequestTable",
]

NONE = -1  # no node, no time yet
PREFILL_NODE, DECODE_NODE, SENDER, PREFILL_NS, STARTED, READY, JOINED, COMMITTED, PROMPT, MAX_NEW = range(10)
CURVE, GENERATED = range(10, 12)
_COLUMNS = (
    "prefill_node",  # slot of the node that prefills, NONE once it let go
    "decode_node",  # slot of the node whose pages are committed, NONE once they are free
    "sender",  # slot of the pool node that sends it a prefix, NONE once it has arrived
    "prefill_ns",  # predicted compute time; 0 once the prefill has ended
    "started_ns",  # when the prefill started, or NONE
    "ready_ns",  # when the prefill ends: predicted, then true
    "joined_ns",  # when it joined the decode batch, or NONE
    "committed",  # tokens of pages claimed on the decode node
    "prompt",
    "max_new",  # tokens that it may add; 0: not known
    "curve",  # of its length, in `Lengths.curves`
    "generated",  # tokens that its prompt has of the answer
    "seen_ns",  # when last placed, or held by a worker
    "placed_ns",
)
_SKEW = 8  # columns of 2**n numbers would lie in each other's way in a processor's cache
_NUMBERS = {name: number for number, name in enumerate(_COLUMNS)}
_NONES = (NONE,) * TABLE_COLUMNS
_NO_TURN = (NONE,) * NUM_COLUMNS


@dataclass(slots=True)
class Claim:
    """What of a row is not a number to sum."""

    request_id: str
    attempt: int
    model: str
    frontend_id: str
    predicted_ttft_s: float = 0.0
    predicted_tbt_s: float = 0.0
    prefill: str = ""  # node ids
    decode: str = ""
    is_revived: bool = False  # known only from what workers hold
    seen_prefill: bool = False  # a report of the prefill node held it
    seen_decode: bool = False
    tenant: str = ""
    objectives: EffectiveObjectives = NOTHING_TO_MEET
    charge: Charge | None = None  # None: what this conductor did not place
    curve: int = 0  # of the answer's length, in `Lengths.curves`
    max_tokens: int = 0  # longest answer, over all attempts
    unwanted: Reason | Literal[""] = ""  # why it would have been rejected, had that been enforced
    is_completed: bool = False  # its frontend has said the last word


class RequestTable:
    """Live requests, one row each, dense: rows [0, len) of every column."""

    def __init__(self) -> None:
        room = 64 + _SKEW
        self.table = np.full((TABLE_COLUMNS, room), NONE, np.int64)  # by column; of each, the first len(self) hold
        self.turns = np.full((NUM_COLUMNS, room), NONE, np.int64)  # likewise; who has none (revived) goes first
        self._rows: dict[str, int] = {}
        self.claims: list[Claim] = []

    def __len__(self) -> int:
        return len(self.claims)

    def column(self, name: str) -> NDArray[np.int64]:
        """A writable view int64 [len] of a column."""
        return self.table[_NUMBERS[name], : len(self.claims)]

    def add(self, claim: Claim, **values: int) -> int:
        """A new row; columns not named hold NONE. Returns its number, which holds until the next `remove`."""
        return self.append(claim, tuple(map(values.get, _COLUMNS, _NONES)), _NO_TURN)

    def append(self, claim: Claim, values: tuple[int, ...], turn: tuple[int, ...]) -> int:
        """Likewise, with a value for each column of `table` and of `turns` in their order."""
        assert claim.request_id not in self._rows
        row = len(self.claims)
        if row == self.table.shape[1]:
            self.table, self.turns = _widened(self.table), _widened(self.turns)
        row_kernels().write(self.table, self.turns, row, values, turn)
        self.claims.append(claim)
        self._rows[claim.request_id] = row
        return row

    def find(self, request_id: str, attempt: int | None = None) -> int | None:
        """The request's row; None when there is none, or none of this attempt."""
        row = self._rows.get(request_id)
        return row if row is not None and attempt in (None, self.claims[row].attempt) else None

    def remove(self, row: int) -> Claim:
        """Drop a row; the last row takes its number."""
        claim, last = self.claims[row], len(self.claims) - 1
        if row != last:
            row_kernels().move(self.table, self.turns, last, row)
            self.claims[row] = self.claims[last]
            self._rows[self.claims[row].request_id] = row
        del self._rows[claim.request_id]
        self.claims.pop()
        return claim

    def rows_at(self, slot: int) -> list[int]:
        """Rows with a claim on the node, highest first: safe to remove while iterating."""
        held = (self.column("prefill_node") == slot) | (self.column("decode_node") == slot)
        return [int(row) for row in np.flatnonzero(held)[::-1]]

    def drop_sender(self, slot: int) -> None:
        """The pool node sends nothing any more."""
        sender = self.column("sender")
        sender[sender == slot] = NONE


def _widened(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same with about twice the room."""
    columns, rows = table.shape
    wide = np.full((columns, 2 * rows - _SKEW), NONE, np.int64)
    wide[:, :rows] = table
    return wide
