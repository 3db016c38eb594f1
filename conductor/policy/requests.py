"""The table of live requests: what each claims (prefill queue, decode memory, senders) and its position in the queue.

Every sum per node is computed from the rows when it is needed (`kernels`). No total is kept beside them, so none can
drift. Likewise the work that members of prefill groups have still to compute is kept per request and ends with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from conductor.policy.decisions import Reason
from conductor.policy.events import NS
from conductor.policy.fairness import Charge
from conductor.policy.nodes import NodeTable
from conductor.policy.objectives import NOTHING_TO_MEET, EffectiveObjectives

__all__ = [
    "NONE",
    "REQUEST",
    "Claim",
    "GroupMemberWork",
    "RequestTable",
]

NONE = -1  # no node, no time yet

REQUEST: Final = np.dtype(
    [
        # What the loops read of a decoding request comes first, in 64 bytes.
        ("prefill_node", np.int32),  # slot of the node that prefills; NONE once that node has released it
        ("decode_node", np.int32),  # slot of the node whose pages are committed; NONE once they are free
        ("sender", np.int32),  # slot of the pool node that sends it a prefix; NONE once the prefix has arrived
        ("curve", np.int32),  # row of its answer length distribution in `Lengths.curves`
        ("joined_ns", np.int64),  # when it joined the decode batch, or NONE
        ("ready_ns", np.int64),  # when the prefill ends: predicted, then measured
        ("committed", np.int64),  # tokens of pages claimed on the decode node
        ("prompt", np.int64),  # tokens
        ("max_new", np.int64),  # tokens that it may add; 0: unknown
        ("generated", np.int64),  # tokens of its prompt that earlier attempts generated
        ("prefill_ns", np.int64),  # predicted compute time; 0 once the prefill has ended
        ("started_ns", np.int64),  # when the prefill starts, after those that its node started before, or NONE
        ("seen_ns", np.int64),  # when it was last placed, or reported as held by a worker
        ("placed_ns", np.int64),
        # Its position in the queue of the prefill node; all NONE, which precedes all others, if unknown.
        ("level", np.int64),  # of its class: the lowest is served first
        ("account", np.int64),  # number of the account that is charged
        ("ticket_ns", np.int64),  # virtual start time that it uses there now
        ("priority", np.int64),  # among the account's own: the lowest is served first
        ("due_ns", np.int64),  # when its first token is due, by the policy's clock, as are the next two
        ("arrived_ns", np.int64),
        ("ages_ns", np.int64),  # from then on nothing newer precedes it
    ]
)
"""A row of the table of requests. Times without another unit are ns of the policy's clock."""

_NAMES: Final = REQUEST.names or ()
_NONES: Final = (NONE,) * len(_NAMES)


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
        self._table: NDArray[np.void] = np.full(64, NONE, REQUEST)  # the first len(self) rows are in use
        self._rows: dict[str, int] = {}
        self.claims: list[Claim] = []

    def __len__(self) -> int:
        return len(self.claims)

    @property
    def records(self) -> NDArray[np.void]:
        """Return a writable view, REQUEST [len], of the rows in use."""
        return self._table[: len(self.claims)]

    def column(self, name: str) -> NDArray[np.int64]:
        """Return a writable view, int64 [len], of a field."""
        return self._table[name][: len(self.claims)]

    def get(self, row: int, name: str) -> int:
        """Return one field of a row."""
        value: int = self._table[name].item(row)
        return value

    def add(self, claim: Claim, **values: int) -> int:
        """Add a row, with NONE in fields that are not given; returns its number, valid until the next `remove`."""
        return self.append(claim, tuple(map(values.get, _NAMES, _NONES)))

    def append(self, claim: Claim, values: tuple[int, ...]) -> int:
        """Add a row as `add` does, from one value per field of REQUEST, in order."""
        assert claim.request_id not in self._rows
        row = len(self.claims)
        if row == len(self._table):
            self._table = np.concatenate([self._table, np.full_like(self._table, NONE)])
        self._table[row] = values
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
            self._table[row] = self._table[last]
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
            left_ns = one.share_ns - (max(0, now_ns - started_ns) if started_ns != NONE else 0)
            slots = [nodes.slot(node_id) for node_id in one.helpers] if left_ns > 0 else []
            load_ns[[slot for slot in slots if slot != NONE]] += left_ns
        return load_ns / NS
