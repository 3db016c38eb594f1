"""Directory of blocks in memory: which pool node holds which blocks. Fed by the nodes' events; no I/O, no clock.

Blocks are identified by the short form of their chain keys (uint64) within a namespace. A match is only a hint: the
pool node's Pin checks it against full keys. Pool nodes are authoritative: the directory's part of a node is EXACT while
its event stream is connected and has no gaps, otherwise DEGRADED. Events contain a checksum of the node's contents
(`kvpool.events`); if it differs, the part is DEGRADED, too.

A node has a number in the table. A snapshot is received under a new number, and the blocks of the former number are
removed incrementally (`purge`), so that neither a snapshot nor the loss of a node blocks the event loop.
"""

import enum
import secrets
from collections import Counter
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conductor.directory.table import DirectoryTable, Replicas, code_of
from kvpool.address import Namespace, short_keys_from_bytes
from kvpool.errors import AddressError
from kvpool.events import BlockRun, PoolEvents, fold_of


class Match(NamedTuple):
    """Leading blocks of a chain that one node holds."""

    blocks: int  # number of leading blocks
    ssd_blocks: int  # number of these on SSD only


class WindowedBlocks(NamedTuple):
    """Where a model's windowed blocks are stored, and how many of them before a block its first token sees."""

    kv_namespace: Namespace
    num_seen: int

    def are_all(self, kv_namespace: Namespace) -> bool:
        """Return True if pools store nothing else of the model with this namespace: all of its layers have windows."""
        return self.kv_namespace == kv_namespace


class Matches(Mapping[str, Match]):
    """Nodes that hold the chain's first block, by id.

    `roster`: ids of all nodes, sorted; the same object as long as the nodes do not change. `held`, int64
    [2, len(roster)]: number of blocks that each node holds, and number of these on SSD only. `longest`: maximum of
    `held[0]`.
    """

    __slots__ = ("_items", "held", "longest", "roster")

    def __init__(self, roster: tuple[str, ...], held: NDArray[np.int64], longest: int) -> None:
        self.roster = roster
        self.held = held
        self.longest = longest
        self._items: dict[str, Match] | None = None  # matches by id, computed on demand

    def __getitem__(self, node: str) -> Match:
        return self._by_id()[node]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.held[0]))

    def __repr__(self) -> str:
        return f"Matches({self._by_id()})"

    def items(self) -> ItemsView[str, Match]:
        """Return (node id, match) pairs in the order of ids."""
        return self._by_id().items()

    def _by_id(self) -> dict[str, Match]:
        if self._items is None:
            where = np.flatnonzero(self.held[0])
            rows = zip(where.tolist(), *self.held[:, where].tolist(), strict=True)
            self._items = {self.roster[index]: Match(blocks, on_ssd) for index, blocks, on_ssd in rows}
        return self._items


_PATIENCE = 4096  # minimum events between snapshots because of checksum mismatches, doubled each time


class DirectoryState(enum.Enum):
    """Reliability of a node's part of the directory."""

    EXACT = "exact"
    DEGRADED = "degraded"


class Position(NamedTuple):
    """Position in a node's event stream; (0, 0): none."""

    incarnation: int
    seq: int


@dataclass
class FollowedNode:
    """State of one node's event stream. `synced`: a snapshot and all events up to `seq` are applied."""

    number: int
    incarnation: int = 0
    seq: int = 0
    synced: bool = False
    state: DirectoryState = DirectoryState.DEGRADED
    shadow: int | None = None  # number under which a snapshot is being received
    why: str = "new"  # reason for the next snapshot
    right_at: int = 0  # event from which on a restored dump is consistent
    generation: int = 0  # number of times the contents were replaced
    disagreements: int = 0  # consecutive checksum mismatches
    patient_until: int = 0  # event up to which mismatches do not cause another snapshot

    def restart(self, incarnation: int) -> None:
        """Discard the state, since the node has another incarnation."""
        self.why = "restart" if self.incarnation else self.why
        self.incarnation, self.synced, self.state = incarnation, False, DirectoryState.DEGRADED
        self.generation += 1
        self.right_at = self.disagreements = self.patient_until = 0

    def restore(self, position: Position, right_at: int) -> None:
        self.incarnation, self.seq = position
        self.synced, self.right_at, self.why = True, right_at, "behind"

    def begin_snapshot(self, shadow: int) -> None:
        self.shadow, self.synced, self.state = shadow, False, DirectoryState.DEGRADED

    def end_snapshot(self, seq: int) -> None:
        assert self.shadow is not None
        self.number, self.shadow = self.shadow, None
        self.generation += 1
        self.seq, self.synced, self.right_at, self.why = seq, True, 0, "behind"

    def refuse(self, why: str) -> None:
        """Record the reason why the stream cannot continue without a snapshot."""
        if self.synced or self.why == "behind":
            self.why = why
        self.synced, self.state = False, DirectoryState.DEGRADED

    def agree(self) -> None:
        """Record that the node's checksum matches."""
        self.state, self.disagreements = DirectoryState.EXACT, 0

    def go_on(self) -> None:
        """Record a message without checksum; the state stays as reliable as before."""
        if not self.disagreements:
            self.state = DirectoryState.EXACT

    def disagree(self) -> bool:
        """Record that the node's checksum differs. Return True if a snapshot should be requested.

        If the last snapshot did not help, another one soon would not either: the stream continues as DEGRADED. The
        usual cause is two blocks with the same short key; it disappears when one of them is removed.
        """
        self.state = DirectoryState.DEGRADED
        if self.disagreements and self.seq < self.patient_until:
            return False
        self.patient_until = self.seq + (_PATIENCE << min(self.disagreements, 20))
        self.disagreements += 1
        return True


class NodeNumbers:
    """Allocator of node numbers from 1; a retired number is reused once no blocks are stored under it."""

    def __init__(self) -> None:
        self._names: list[str | None] = [None]
        self.version = 0  # incremented when names change
        self._free: list[int] = []
        self._dying: set[int] = set()
        self._late: set[int] = set()  # dying numbers that were retired during the current removal pass

    @property
    def dying(self) -> Set[int]:
        """Retired numbers whose blocks have not been removed yet."""
        return self._dying

    @property
    def names(self) -> Sequence[str | None]:
        """Node ids by number; see `name`."""
        return self._names

    def name(self, number: int) -> str | None:
        """Return the number's node id; None if its blocks are not visible."""
        return self._names[number]

    def take(self, name: str | None) -> int:
        """Allocate a number for a node, or for contents that are not visible yet (None)."""
        self.version += 1
        if not self._free:
            self._names.append(name)
            return len(self._names) - 1
        number = self._free.pop()
        self._names[number] = name
        return number

    def rename(self, number: int, name: str) -> None:
        self.version += 1
        self._names[number] = name

    def retire(self, number: int, *, holds: bool, in_pass: bool) -> None:
        """Release a number. `holds`: it has blocks; `in_pass`: a removal pass is running."""
        self.version += 1
        self._names[number] = None
        if not holds:
            self._free.append(number)
            return
        self._dying.add(number)
        if in_pass:
            self._late.add(number)

    def end_pass(self) -> None:
        """Free the numbers that were dying when this pass started, since all their blocks are removed."""
        self._free += sorted(self._dying - self._late)
        self._dying, self._late = self._late, set()


_HALF = 32  # bits of a generation below the count of dropped nodes


class DumpedNode(NamedTuple):
    """Node of a dump: contents as of `position`, possibly including events up to `right_at` applied during the dump."""

    node: str
    number: int  # in the dump
    generation: int
    position: Position
    right_at: int


class _Places(NamedTuple):
    """Mapping from node numbers to indices in the roster."""

    version: int  # of NodeNumbers
    roster: tuple[str, ...]
    of_numbers: NDArray[np.int64]  # -1: not visible

    @classmethod
    def of(cls, numbers: NodeNumbers, former: "_Places | None") -> "_Places":
        names = numbers.names
        roster = tuple(sorted(name for name in names if name is not None))
        if former is not None and former.roster == roster:
            roster = former.roster
        places = {name: place for place, name in enumerate(roster)}
        of_numbers = np.array([-1 if name is None else places[name] for name in names], np.int64)
        return cls(numbers.version, roster, of_numbers)


class Directory:
    """Directory of one conductor. Creating the first one compiles its kernels."""

    def __init__(self) -> None:
        self._table = DirectoryTable(secrets.randbits(64))
        self._nodes: dict[str, FollowedNode] = {}
        self._numbers = NodeNumbers()
        self._places: _Places | None = None  # cache of the last match
        self._folds: dict[bytes, int] = {}  # by matched namespace; bounded, since only joined nodes' are matched
        self._purged = 0  # parts done in the current removal pass
        self._dropped = 0  # number of dropped nodes
        self.snapshots: Counter[str] = Counter()  # snapshots received, by reason
        self.resyncs: Counter[str] = Counter()  # snapshots requested, by reason
        self.mismatches: Counter[str] = Counter()  # messages with another checksum, by node

    def apply(self, node: str, events: PoolEvents) -> bool:
        """Apply one message of `node`'s stream. Return False if it does not follow the last one: a snapshot is needed.

        During a snapshot the former contents of the same incarnation stay in use, as DEGRADED; those of another
        incarnation are dropped at its first message. Raises AddressError, after which a snapshot is also needed.
        """
        known = self._nodes.get(node) or self._add(node)
        try:
            return self._apply(node, known, events)
        except AddressError:
            self._end_snapshot(known)
            self._refuse(known, "malformed")
            raise

    def _apply(self, node: str, known: FollowedNode, events: PoolEvents) -> bool:
        if known.incarnation != events.incarnation:
            self._retire(known.number)
            known.number = self._number_for(node)
            known.restart(events.incarnation)
        if events.snapshot_begin:
            self.snapshots[known.why] += 1
            self._end_snapshot(known)
            known.begin_snapshot(self._number_for(None))
        if known.shadow is not None:
            self._take(known.shadow, events)
            if events.snapshot_end:
                self._numbers.rename(known.shadow, node)
                self._retire(known.number)
                known.end_snapshot(events.seq)
                return self._judge(node, known, events)
            return True
        if not known.synced or events.first_seq != known.seq + 1:
            return self._refuse(known, "gap")
        self._take(known.number, events)
        known.seq = events.seq
        return self._judge(node, known, events)

    def match(
        self, kv_namespace: Namespace, keys: NDArray[np.uint64], windows: WindowedBlocks | None = None
    ) -> Matches:
        """Return the number of leading blocks of the chain (uint64 [n], see `keys_u64`) that each node holds.

        With `windows`, of those after which it also holds the windowed blocks that the next token sees. If these are
        all that pools store of the model, nothing else must be there.
        """
        places = self._places
        if places is None or places.version != self._numbers.version:
            places = self._places = _Places.of(self._numbers, places)
        fold = self._fold(kv_namespace)
        if not keys.flags.c_contiguous:
            keys = np.ascontiguousarray(keys)
        _, roster, of_numbers = places
        held = np.zeros((2, len(roster)), np.int64)
        if windows is not None and windows.are_all(kv_namespace):
            held[0], longest = len(keys), len(keys) if roster else 0
        else:
            longest = self._table.match(keys, fold, of_numbers, held)
        if windows is not None and windows.num_seen and longest:
            fold = self._fold(windows.kv_namespace)
            longest = self._table.match_windows(keys, fold, of_numbers, windows.num_seen, held)
        return Matches(roster, held, longest)

    def _fold(self, kv_namespace: Namespace) -> int:
        fold = self._folds.get(kv_namespace)
        if fold is None:
            fold = self._folds[bytes(kv_namespace)] = fold_of(kv_namespace)
        return fold

    def mark_degraded(self, node: str, *, malformed: bool = False) -> None:
        """Mark the node's part as DEGRADED because its stream was interrupted.

        It stays in use until the stream continues or the node is dropped. `malformed`: a message was unreadable, so the
        stream can continue only with a snapshot.
        """
        known = self._nodes.get(node)
        if known is not None:
            known.state = DirectoryState.DEGRADED
            self._end_snapshot(known)
            if malformed and known.synced:
                self._refuse(known, "malformed")

    def drop_node(self, node: str) -> None:
        """Remove a lost node; its blocks no longer match."""
        known = self._nodes.pop(node, None)
        if known is not None:
            self._end_snapshot(known)
            self._retire(known.number)
            self._dropped += 1

    def purge(self, num_parts: int = 8) -> bool:
        """Remove lost nodes' blocks from the next parts of the table (2,048 slots each). Return False if none are left.

        A part takes about 0.3 ms if a lost node's blocks are adjacent, which they are if they were stored together.
        """
        dying = self._numbers.dying
        if not dying:
            return False
        self._purged = self._table.purge(dying, self._purged, num_parts)
        if self._purged >= self._table.num_parts:
            self._purged = 0
            self._numbers.end_pass()
        return bool(self._numbers.dying)

    def state(self, node: str) -> DirectoryState:
        """Return the node's state; DEGRADED if it is unknown."""
        known = self._nodes.get(node)
        return known.state if known is not None else DirectoryState.DEGRADED

    def position(self, node: str) -> Position:
        """Return the last event applied, after which the stream can continue; (0, 0) if it cannot."""
        known = self._nodes.get(node)
        return Position(known.incarnation, known.seq) if known is not None and known.synced else Position(0, 0)

    def num_blocks(self, node: str) -> int:
        """Return the number of blocks that the node holds, over all namespaces."""
        return sum(self.blocks_by_tier(node))

    def blocks_by_tier(self, node: str) -> tuple[int, int]:
        """Return the numbers of blocks that the node holds: (in DRAM, on SSD only)."""
        known = self._nodes.get(node)
        return self._table.num_blocks(known.number) if known is not None else (0, 0)

    @property
    def num_followed(self) -> int:
        """Number of known nodes."""
        return len(self._nodes)

    @property
    def nodes(self) -> list[str]:
        """Ids of the known nodes, sorted."""
        return sorted(self._nodes)

    def begin_dump(self) -> list[DumpedNode]:
        """Return the nodes that `dump` covers: those with a position."""
        return [
            DumpedNode(node, known.number, known.generation, Position(known.incarnation, known.seq), known.right_at)
            for node, known in sorted(self._nodes.items())
            if known.synced
        ]

    def end_dump(self, dumped: Iterable[DumpedNode]) -> list[DumpedNode]:
        """Return the nodes that a finished dump contains completely, with the event from which on it is consistent."""
        return [
            each._replace(right_at=max(known.seq, known.right_at))
            for each in dumped
            if (known := self._nodes.get(each.node)) is not None
            and known.synced
            and known.generation == each.generation
        ]

    def dump(self, numbers: frozenset[int], num_parts: int = 16) -> Iterator[Replicas]:
        """Yield the contents of these numbers, a few parts at a time; events may be applied in between.

        The dump is fuzzy, like a database checkpoint (Mohan et al., ARIES, ACM TODS 17(1), 1992): it is consistent
        after the events between its start and its end are applied again.
        """
        begin = 0
        while begin < self._table.num_parts:
            yield self._table.extract(numbers, begin, num_parts)
            begin += num_parts

    def restore_node(self, dumped: DumpedNode) -> int:
        """Add a node of a dump without contents. Return the number under which to restore them."""
        assert dumped.node not in self._nodes, f"node {dumped.node!r} is known"
        known = self._add(dumped.node)
        known.restore(dumped.position, dumped.right_at)
        return known.number

    def restore(self, replicas: Replicas) -> None:
        """Store part of a dump, with the numbers from `restore_node`.

        Contents of nodes lost since are left out, because their numbers may have been reused.
        """
        followed = np.array([name is not None for name in self._numbers.names], bool)[replicas.codes >> 1]
        self._table.store(replicas.keys[followed], replicas.codes[followed])

    def validate(self) -> list[str]:
        """Describe inconsistencies; empty if there are none."""
        problems = self._table.validate()
        for name, known in sorted(self._nodes.items()):
            if self._numbers.name(known.number) != name:
                problems.append(f"node {name!r} has number {known.number}, which belongs to another node")
        return problems

    def _add(self, node: str) -> FollowedNode:
        # A node that was dropped and returns must not reuse one of its former generations.
        self._nodes[node] = known = FollowedNode(self._number_for(node), generation=self._dropped << _HALF)
        return known

    def _number_for(self, node: str | None) -> int:
        number = self._numbers.take(node)
        self._table.reserve_numbers(number + 1)
        return number

    def _retire(self, number: int) -> None:
        """Hide the number's blocks; they are removed incrementally."""
        self._numbers.retire(number, holds=any(self._table.num_blocks(number)), in_pass=self._purged > 0)

    def _end_snapshot(self, known: FollowedNode) -> None:
        if known.shadow is not None:
            self._retire(known.shadow)
            known.shadow = None

    def _take(self, number: int, events: PoolEvents) -> None:
        for run in events.removed:
            self._table.remove(number, short_keys_from_bytes(run.chain), fold_of(run.kv_namespace))
        for run in events.stored:
            self._store(number, run)
        if self._numbers.dying:
            self.purge(1)

    def _store(self, number: int, run: BlockRun) -> None:
        keys = short_keys_from_bytes(run.chain)
        codes = np.full(len(keys), code_of(number, run.tier), np.uint32)
        self._table.store(keys, codes, fold_of(run.kv_namespace))

    def _judge(self, node: str, known: FollowedNode, events: PoolEvents) -> bool:
        """Update the node's state after a message. Return False if a snapshot is needed."""
        if known.seq < known.right_at:
            return True
        if events.contents_sum is None:
            known.go_on()
        elif events.contents_sum == self._table.contents_sum(known.number):
            known.agree()
        else:
            self.mismatches[node] += 1
            if known.disagree():
                return self._refuse(known, "mismatch")
        return True

    def _refuse(self, known: FollowedNode, why: str) -> bool:
        known.refuse(why)
        self.resyncs[why] += 1
        return False
