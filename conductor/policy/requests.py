"""The request table: what placed requests claim on nodes, their ordering keys, and the work of prefill groups' helpers.

The table is a struct of int64 arrays, which compiled loops read (`kernels`). Sums per node are computed from its rows
when they are needed; no running totals are kept, so none can drift.
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

# Columns of `RequestTable.turns`: the ordering key of a request in the queue of its prefill node (`events.QueueKey`).
LEVEL = 0  # priority of its class; lower goes first
ACCOUNT = 1  # number of the account that is charged
TICKET = 2  # virtual start time that it uses in this queue, ns
PRIORITY = 3  # within the account; lower goes first
DUE = 4  # when its first token is due, ns of the policy's clock, as are the next two
ARRIVED = 5
AGES = 6  # from then on no newer request precedes it
NUM_COLUMNS = 7

TABLE_COLUMNS = 14  # of `RequestTable.table`


def write(table: Any, turns: Any, row: Any, values: Any, turn: Any) -> None:
    """Write a row of both tables, one value per column. Arguments are not checked."""
    for column, value in enumerate(values):
        table[column, row] = value
    for column, value in enumerate(turn):
        turns[column, row] = value


def move(table: Any, turns: Any, source: Any, target: Any) -> None:
    """Copy row `source` of both tables to row `target`."""
    for column in range(table.shape[0]):
        table[column, target] = table[column, source]
    for column in range(turns.shape[0]):
        turns[column, target] = turns[column, source]


class RowKernels(NamedTuple):
    """Compiled versions of the functions of the same names."""

    write: Any
    move: Any


@functools.cache
def row_kernels() -> RowKernels:
    """Return the compiled functions; the first call compiles them or loads them from the cache."""
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
    "prefill_node",  # slot of the node that prefills; NONE once that node has released it
    "decode_node",  # slot of the node whose pages are committed; NONE once they are free
    "sender",  # slot of the pool node that sends it a prefix; NONE once the prefix has arrived
    "prefill_ns",  # predicted compute time; 0 once the prefill has ended
    "started_ns",  # when the prefill started, or NONE
    "ready_ns",  # when the prefill ends: predicted, then actual
    "joined_ns",  # when it joined the decode batch, or NONE
    "committed",  # tokens of pages claimed on the decode node
    "prompt",
    "max_new",  # tokens that it may add; 0: unknown
    "curve",  # row of its answer length distribution in `Lengths.curves`
    "generated",  # tokens of its prompt that earlier attempts generated
    "seen_ns",  # when it was last placed, or reported as held by a worker
    "placed_ns",
)
_SKEW = 8  # columns of 2**n numbers would map to the same sets of the CPU cache
_NUMBERS = {name: number for number, name in enumerate(_COLUMNS)}
_NONES = (NONE,) * TABLE_COLUMNS
_NO_TURN = (NONE,) * NUM_COLUMNS


@dataclass(slots=True)
class Claim:
    """Part of a row of the request table that compiled loops do not read."""

    request_id: str
    attempt: int
    model: str
    frontend_id: str
    predicted_ttft_s: float = 0.0
    predicted_tbt_s: float = 0.0
    prefill: str = ""  # node ids
    decode: str = ""
    is_revived: bool = False  # not placed by this conductor; known only from workers' reports
    seen_prefill: bool = False  # a report of the prefill node has listed it
    seen_decode: bool = False
    tenant: str = ""
    objectives: EffectiveObjectives = NOTHING_TO_MEET
    charge: Charge | None = None  # None: not placed by this conductor
    curve: int = 0  # row of its answer length distribution in `Lengths.curves`
    max_tokens: int = 0  # longest possible answer, over all attempts
    unwanted: Reason | Literal[""] = ""  # why enforced admission would have rejected it
    is_completed: bool = False  # its frontend has reported its completion


class RequestTable:
    """Live requests, one per row; rows [0, len) of every column are in use."""

    def __init__(self) -> None:
        room = 64 + _SKEW
        self.table = np.full((TABLE_COLUMNS, room), NONE, np.int64)  # [column, row]
        self.turns = np.full((NUM_COLUMNS, room), NONE, np.int64)  # likewise; NONE, in revived requests, goes first
        self._rows: dict[str, int] = {}
        self.claims: list[Claim] = []

    def __len__(self) -> int:
        return len(self.claims)

    def column(self, name: str) -> NDArray[np.int64]:
        """Return a writable view, int64 [len], of a column of `table`."""
        return self.table[_NUMBERS[name], : len(self.claims)]

    def add(self, claim: Claim, **values: int) -> int:
        """Add a row, with NONE in columns that are not given; returns its number, valid until the next `remove`."""
        return self.append(claim, tuple(map(values.get, _COLUMNS, _NONES)), _NO_TURN)

    def append(self, claim: Claim, values: tuple[int, ...], turn: tuple[int, ...]) -> int:
        """Add a row as `add` does, from one value per column of `table` and of `turns`, in order."""
        assert claim.request_id not in self._rows
        row = len(self.claims)
        if row == self.table.shape[1]:
            self.table, self.turns = _widened(self.table), _widened(self.turns)
        row_kernels().write(self.table, self.turns, row, values, turn)
        self.claims.append(claim)
        self._rows[claim.request_id] = row
        return row

    def find(self, request_id: str, attempt: int | None = None) -> int | None:
        """Return the request's row; None if it has none, or only one of another attempt."""
        row = self._rows.get(request_id)
        return row if row is not None and attempt in (None, self.claims[row].attempt) else None

    def remove(self, row: int) -> Claim:
        """Remove a row and return its claim; the last row takes its number."""
        claim, last = self.claims[row], len(self.claims) - 1
        if row != last:
            row_kernels().move(self.table, self.turns, last, row)
            self.claims[row] = self.claims[last]
            self._rows[self.claims[row].request_id] = row
        del self._rows[claim.request_id]
        self.claims.pop()
        return claim

    def rows_at(self, slot: int) -> list[int]:
        """Return the rows with a claim on the node, in descending order, so that they can be removed one by one."""
        held = (self.column("prefill_node") == slot) | (self.column("decode_node") == slot)
        return [int(row) for row in np.flatnonzero(held)[::-1]]

    def drop_sender(self, slot: int) -> None:
        """Clear the pool node from the `sender` column of all rows."""
        sender = self.column("sender")
        sender[sender == slot] = NONE


def _widened(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a copy with about twice as many rows."""
    columns, rows = table.shape
    wide = np.full((columns, 2 * rows - _SKEW), NONE, np.int64)
    wide[:, :rows] = table
    return wide


NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _GroupWork:
    attempt: int
    helpers: tuple[str, ...]
    share_ns: int  # compute time of each helper


class GroupMemberWork:
    """Work of prefill groups' helpers, by request.

    An entry ends with the prefill of its request, which the request table shows; `load_s` removes it then.
    """

    def __init__(self) -> None:
        self._work: dict[str, _GroupWork] = {}

    def __len__(self) -> int:
        return len(self._work)

    def add(self, request_id: str, attempt: int, helpers: Sequence[str], share_ns: int) -> None:
        """Record that each of `helpers` computes `share_ns` for the request."""
        self._work[request_id] = _GroupWork(attempt, tuple(helpers), share_ns)

    def load_s(self, now_ns: int, nodes: NodeTable, requests: RequestTable) -> NDArray[np.float64]:
        """Return float64 [slots]: seconds of group work left per node.

        Removes entries whose prefill has ended or whose prefill node was lost.
        """
        load_ns = np.zeros(nodes.num_slots, np.int64)
        for request_id, one in list(self._work.items()):
            row = requests.find(request_id, one.attempt)
            if row is None or requests.column("prefill_node")[row] == NONE or requests.column("prefill_ns")[row] <= 0:
                del self._work[request_id]
                continue
            started_ns = int(requests.column("started_ns")[row])
            left_ns = one.share_ns - (now_ns - started_ns if started_ns != NONE else 0)
            slots = [nodes.slot(node_id) for node_id in one.helpers] if left_ns > 0 else []
            load_ns[[slot for slot in slots if slot != NONE]] += left_ns
        return load_ns / NS
