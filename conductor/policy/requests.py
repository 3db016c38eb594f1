"""The numbers of a request's turn in the line of its prefill node, as rows of `RequestTable.turns`. Nothing else.

The compiled writing of rows of the table of requests, all columns at once. Nothing here checks its arguments.

What the placed requests claim, as a struct of arrays: prefill queues, the decode ledger, who sends to whom.

Every sum per node is computed from these rows when it is asked for (`kernels`). No total is kept beside them, so none
can drift.

What helpers of prefill groups still have to compute, besides what was placed on them. Pure.

An entry lives no longer than its head's prefill, which the table of requests knows; nothing else has to end it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from conductor.policy.decisions import Reason
from conductor.policy.fairness import Charge
from conductor.policy.nodes import NodeTable
from conductor.policy.objectives import NOTHING_TO_MEET, EffectiveObjectives
from jit.compiling import compiled_with_gil

__all__ = [
    "ACCOUNT",
    "AGES",
    "ARRIVED",
    "COMMITTED",
    "CURVE",
    "DECODE_NODE",
    "DUE",
    "GENERATED",
    "JOINED",
    "LEVEL",
    "MAX_NEW",
    "NONE",
    "NUM_COLUMNS",
    "PREFILL_NODE",
    "PREFILL_NS",
    "PRIORITY",
    "PROMPT",
    "READY",
    "SENDER",
    "STARTED",
    "TABLE_COLUMNS",
    "TICKET",
    "Claim",
    "GroupMemberWork",
    "RequestTable",
    "RowKernels",
    "row_kernels",
]

LEVEL = 0  # of its class: lower goes first
ACCOUNT = 1  # number of the account that is charged
TICKET = 2  # virtual start time that it uses there now, ns
PRIORITY = 3  # among the account's own: lower goes first
DUE = 4  # when its first token should be there, ns of the policy's clock, as are the next two
ARRIVED = 5
AGES = 6  # from then on nothing newer goes before it
NUM_COLUMNS = 7


TABLE_COLUMNS = 14


def write(table: Any, turns: Any, row: Any, values: Any, turn: Any) -> None:
    """Into one row: a value for each column of both."""
    for column, value in enumerate(values):
        table[column, row] = value
    for column, value in enumerate(turn):
        turns[column, row] = value


def move(table: Any, turns: Any, source: Any, target: Any) -> None:
    """A row takes another number."""
    for column in range(table.shape[0]):
        table[column, target] = table[column, source]
    for column in range(turns.shape[0]):
        turns[column, target] = turns[column, source]


class RowKernels(NamedTuple):
    """See the functions of the same names."""

    write: Any
    move: Any


@functools.cache
def row_kernels() -> RowKernels:
    """Both, compiled or loaded at the first call."""
    signatures: Any = types
    n = types.int64
    wide, row = types.Array(n, 2, "C"), signatures.UniTuple(n, TABLE_COLUMNS)
    return RowKernels(
        compiled_with_gil(write, types.void(wide, wide, n, row, signatures.UniTuple(n, NUM_COLUMNS))),
        compiled_with_gil(move, types.void(wide, wide, n, n)),
    )


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
    """Non-numeric part of a row of the request table."""

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


NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Help:
    attempt: int
    helpers: tuple[str, ...]
    share_ns: int  # that each of them computes


class GroupMemberWork:
    """By request."""

    def __init__(self) -> None:
        self._helps: dict[str, _Help] = {}

    def __len__(self) -> int:
        return len(self._helps)

    def add(self, request_id: str, attempt: int, helpers: Sequence[str], share_ns: int) -> None:
        """From now on these nodes compute `share_ns` each for the request."""
        self._helps[request_id] = _Help(attempt, tuple(helpers), share_ns)

    def load_s(self, now_ns: int, nodes: NodeTable, requests: RequestTable) -> NDArray[np.float64]:
        """Per slot: seconds that helping will still take. Forgets those whose prefill is over, or lost its head."""
        load_ns = np.zeros(nodes.num_slots, np.int64)
        for request_id, one in list(self._helps.items()):
            row = requests.find(request_id, one.attempt)
            if row is None or requests.column("prefill_node")[row] == NONE or requests.column("prefill_ns")[row] <= 0:
                del self._helps[request_id]
                continue
            started_ns = int(requests.column("started_ns")[row])
            left_ns = one.share_ns - (now_ns - started_ns if started_ns != NONE else 0)
            slots = [nodes.slot(node_id) for node_id in one.helpers] if left_ns > 0 else []
            load_ns[[slot for slot in slots if slot != NONE]] += left_ns
        return load_ns / NS
