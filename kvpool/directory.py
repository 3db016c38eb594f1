"""Which pool node holds which blocks: a conductor's index in memory, fed by the nodes' events. Pure: no I/O, no clock.

Blocks are known by the short form of their chain keys (uint64) within a namespace: a match is a hint that the pool
node's Pin checks against full keys. Pool nodes are the truth; what is known of a node is EXACT while its stream is up
and came without a gap, DEGRADED otherwise (never silently stale).
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.address import KEY_NBYTES, Namespace, keys_from_bytes, keys_u64
from kvpool.directory_table import DirectoryTable, warm_up
from kvpool.errors import AddressError
from kvpool.events import BlockRun, PoolEvents
from kvpool.tiers import Tier

__all__ = ["Directory", "DirectoryState", "Match"]


class DirectoryState(enum.Enum):
    """How far a node's part of the directory can be trusted."""

    EXACT = "exact"
    DEGRADED = "degraded"


class Match(NamedTuple):
    """What one node holds of a chain."""

    blocks: int  # the leading run
    ssd_blocks: int  # of these, how many are on SSD only


@dataclass
class _Node:
    number: int
    incarnation: int = 0
    seq: int = 0
    synced: bool = False  # a snapshot is in, and every event since up to seq
    state: DirectoryState = DirectoryState.DEGRADED
    num_blocks: int = 0
    staged: list[BlockRun] | None = field(default=None, repr=False)  # of a snapshot under way


class Directory:
    """The full index: per namespace, short chain key -> holders. Making the first one compiles what it runs on."""

    def __init__(self) -> None:
        warm_up()
        self._tables: dict[Namespace, DirectoryTable] = {}
        self._on_ssd: dict[Namespace, DirectoryTable] = {}  # of the held, those that are on SSD only
        self._nodes: dict[str, _Node] = {}
        self._numbers: list[str | None] = []

    def apply(self, node: str, events: PoolEvents) -> bool:
        """Take in one message of `node`'s stream. False: it does not follow what is known, a snapshot is needed.

        During a snapshot the former contents of the same incarnation stay in use, as DEGRADED; those of another
        incarnation are dropped at its first message.
        """
        known = self._nodes.get(node) or self._add_node(node)
        if known.incarnation != events.incarnation:
            self._forget_blocks(known)
            known.incarnation, known.staged = events.incarnation, None
            known.synced, known.state = False, DirectoryState.DEGRADED
        if events.snapshot_begin:
            known.staged, known.synced, known.state = [], False, DirectoryState.DEGRADED
        if known.staged is not None:
            return self._apply_snapshot(known, events)
        if not known.synced or events.first_seq != known.seq + 1:
            known.synced, known.state = False, DirectoryState.DEGRADED
            return False
        for run in events.removed:
            self._remove(known, run)
        for run in events.stored:
            self._store(known, run)
        known.seq, known.state = events.seq, DirectoryState.EXACT
        return True

    def match(self, kv_namespace: Namespace, keys: NDArray[np.uint64]) -> dict[str, Match]:
        """What each node holds of the leading blocks of the chain (uint64 [n], see `keys_u64`).

        Nodes with none are left out; the others come in the order of their ids.
        """
        table = self._tables.get(kv_namespace)
        if table is None or not len(keys):
            return {}
        keys = np.ascontiguousarray(keys, np.uint64)
        lengths = table.match(keys, len(self._numbers))
        on_ssd = self._on_ssd.get(kv_namespace)
        held: dict[str, Match] = {}
        for i in np.flatnonzero(lengths).tolist():
            name, length = self._numbers[i], int(lengths[i])
            if name is not None:
                held[name] = Match(length, on_ssd.count(i, keys[:length]) if on_ssd is not None else 0)
        return {node: held[node] for node in sorted(held)}

    def mark_degraded(self, node: str) -> None:
        """The node's stream broke: what is known stays in use until the stream goes on or the node is dropped."""
        if node in self._nodes:
            self._nodes[node].state, self._nodes[node].staged = DirectoryState.DEGRADED, None

    def drop_node(self, node: str) -> None:
        """The node is lost: nothing of it matches any more."""
        known = self._nodes.pop(node, None)
        if known is not None:
            self._forget_blocks(known)
            self._numbers[known.number] = None

    def state(self, node: str) -> DirectoryState:
        """DEGRADED for a node that is not known."""
        known = self._nodes.get(node)
        return known.state if known is not None else DirectoryState.DEGRADED

    def position(self, node: str) -> tuple[int, int]:
        """(incarnation, seq) of the last event taken in, where its stream can be continued; (0, 0) when it cannot."""
        known = self._nodes.get(node)
        return (known.incarnation, known.seq) if known is not None and known.synced else (0, 0)

    def num_blocks(self, node: str) -> int:
        """Blocks that the node is known to hold, over all namespaces."""
        return self._nodes[node].num_blocks if node in self._nodes else 0

    @property
    def nodes(self) -> list[str]:
        """The known nodes' ids, sorted."""
        return sorted(self._nodes)

    def validate(self) -> list[str]:
        """What does not fit together, in words; empty when all does."""
        problems = [f"{ns.hex()}: {what}" for ns, table in self._tables.items() for what in table.validate()]
        problems += [f"{ns.hex()}: an empty table was kept" for ns, t in self._tables.items() if t.num_alive == 0]
        for name, known in sorted(self._nodes.items()):
            held = sum(table.num_held(known.number) for table in self._tables.values())
            if held != known.num_blocks:
                problems.append(f"node {name!r} holds {held} blocks, {known.num_blocks} are counted")
            if self._numbers[known.number] != name:
                problems.append(f"node {name!r} has number {known.number}, which is {self._numbers[known.number]!r}'s")
        return problems

    def _add_node(self, node: str) -> _Node:
        if None in self._numbers:
            number = self._numbers.index(None)
            self._numbers[number] = node
        else:
            number = len(self._numbers)
            self._numbers.append(node)
        self._nodes[node] = known = _Node(number)
        return known

    def _apply_snapshot(self, known: _Node, events: PoolEvents) -> bool:
        assert known.staged is not None
        known.staged += events.stored
        if not events.snapshot_end:
            return True
        staged, known.staged = known.staged, None
        self._forget_blocks(known)
        for run in staged:
            self._store(known, run)
        known.seq, known.synced, known.state = events.seq, True, DirectoryState.EXACT
        return True

    def _store(self, known: _Node, run: BlockRun) -> None:
        keys = _short_keys(run)
        if len(keys):
            table = self._tables.setdefault(run.kv_namespace, DirectoryTable())
            known.num_blocks += table.add(known.number, keys)
            if run.tier is Tier.SSD:
                self._on_ssd.setdefault(run.kv_namespace, DirectoryTable()).add(known.number, keys)
            else:
                self._leave_ssd(known, run.kv_namespace, keys)

    def _remove(self, known: _Node, run: BlockRun) -> None:
        table = self._tables.get(run.kv_namespace)
        if table is not None:
            keys = _short_keys(run)
            known.num_blocks -= table.remove(known.number, keys)
            self._leave_ssd(known, run.kv_namespace, keys)
            self._drop_if_empty(run.kv_namespace)

    def _leave_ssd(self, known: _Node, kv_namespace: Namespace, keys: NDArray[np.uint64]) -> None:
        if kv_namespace in self._on_ssd:
            self._on_ssd[kv_namespace].remove(known.number, keys)

    def _forget_blocks(self, known: _Node) -> None:
        for kv_namespace in list(self._tables):
            known.num_blocks -= self._tables[kv_namespace].remove_all(known.number)
            if kv_namespace in self._on_ssd:
                self._on_ssd[kv_namespace].remove_all(known.number)
            self._drop_if_empty(kv_namespace)

    def _drop_if_empty(self, kv_namespace: Namespace) -> None:
        if self._tables[kv_namespace].num_alive == 0:
            del self._tables[kv_namespace]
            self._on_ssd.pop(kv_namespace, None)


def _short_keys(run: BlockRun) -> NDArray[np.uint64]:
    if len(run.kv_namespace) != KEY_NBYTES:
        raise AddressError(f"a namespace of {len(run.kv_namespace)} bytes: expected {KEY_NBYTES}")
    return keys_u64(keys_from_bytes(run.chain))
