"""Views of the pool for its state machine: prompts, places and events of blocks."""

from typing import Any

from kvpool import KvGroup, KvSpec
from kvpool.events import Tier
from kvpool.policy import Block, PoolCore

SPEC = KvSpec((KvGroup("full", 0, (0,), 4, 32, "float32"), KvGroup("window", 4, (1, 2), 4, 32, "float16")), 2)
# Of another model: slots that take two adjoining units of the arena, extents that take two of the SSD.
WIDE = KvSpec((KvGroup("full", 0, (0, 1), 4, 32, "float32"), KvGroup("window", 4, (2, 3), 4, 32, "float32")), 2)
SPECS = {b"a" * 16: SPEC, b"b" * 16: SPEC, b"c" * 16: WIDE}
NAMESPACES = sorted(SPECS)
DIGESTS = {ns: tuple(bytes(8 * spec.num_layers(g)) for g in range(spec.num_groups)) for ns, spec in SPECS.items()}
ROOT = bytes(16)

Address = tuple[bytes, bytes]  # namespace, chain key


def key(node: int) -> bytes:
    return node.to_bytes(16, "little")


def path(leaf: int) -> list[bytes]:
    """The chain from the root to a node of a binary tree: prompts that share prefixes."""
    nodes = []
    while leaf:
        nodes.append(leaf)
        leaf //= 2
    return [key(node) for node in reversed(nodes)]


def address(block: Block) -> Address:
    return block.kv_namespace, block.chain_key


def seen(core: PoolCore) -> dict[Address, tuple[bool, bool]]:
    """Where readers find each sealed block: in DRAM, on SSD."""
    return {address(b): (bool(b.offsets), b.ssd_offset is not None) for b in core.store.index if b.sealed}


def check_chains(
    before: dict[Address, tuple[bool, bool]], after: dict[Address, tuple[bool, bool]], parents: dict[Address, bytes]
) -> None:
    """Check that no block left a tier or the node before those that follow it, for changes that damaged nothing."""
    for where in before.keys() & after.keys():
        parent = where[0], parents[where]
        if parent in before:
            assert parent in after
            for tier in (0, 1):
                if before[where][tier] and after[where][tier] and before[parent][tier]:
                    assert after[parent][tier]


def dram_nbytes(core: PoolCore, ns: bytes) -> int:
    """Return the bytes of a namespace's blocks in DRAM."""
    return sum(SPECS[ns].block_nbytes for b in core.store.index if b.kv_namespace == ns and b.dram is not None)


def check_emptied(core: PoolCore, now: int, extents: list[int]) -> None:
    """At rest nothing is held; and when all is flushed, nothing is left, and all `extents` are given up."""
    assert (core.puts, core.leases, core.fenced) == ({}, {}, {})
    assert core.validate() == []
    used = sum(SPECS[b.kv_namespace].num_groups for b in core.store.index if b.dram is not None)
    assert core.store.dram.slabs.num_slots_used == used
    core.flush(now, None, dram_only=False)
    assert len(core.store.index) == 0
    assert sorted(core.take_ssd_freed()) == extents
    assert core.store.dram.slabs.num_slots_used == core.store.ssd.slabs.num_slots_used == 0
    assert core.validate() == []


class Told:
    """Reader that has followed the core's events, and its changes in DRAM, from the start."""

    def __init__(self, core: PoolCore) -> None:
        self._core = core
        self._blocks: dict[Address, Tier] = {}
        self._in_dram: set[Address] = set()
        self._seq = 0
        assert core.take_dram_changes() == []

    def check(self) -> None:
        """It is what is visible, and what a snapshot tells."""
        for message in self._core.log.after(1, self._seq) or []:
            self._replay(message)
            self._seq = message.seq
        there = seen(self._core)
        full = {a: where for a, where in there.items() if int.from_bytes(a[1], "little") < 1000}
        assert self._blocks == {a: Tier.DRAM if where[0] else Tier.SSD for a, where in full.items()}
        snapshot: dict[Address, Tier] = {}
        for message in self._core.store.snapshot():
            snapshot |= {(run.kv_namespace, k): run.tier for run in message.stored for k in _split(run.chain)}
        assert snapshot == self._blocks
        for is_added, block in self._core.take_dram_changes():
            (self._in_dram.add if is_added else self._in_dram.remove)(address(block))
        assert self._in_dram == {a for a, where in there.items() if where[0]}

    def _replay(self, message: Any) -> None:
        for run in message.removed:
            for k in _split(run.chain):
                del self._blocks[run.kv_namespace, k]
        for run in message.stored:
            self._blocks |= {(run.kv_namespace, k): run.tier for k in _split(run.chain)}


def _split(chain: bytes) -> list[bytes]:
    return [chain[i : i + 16] for i in range(0, len(chain), 16)]
