"""A put completed at once leaves what allocating and sealing it leaves: blocks, slots, events, counters and victims."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import KvGroup, KvSpec
from kvpool.policy import PoolCore, PoolLimits, PutRequest

NS = b"n" * 16
SPEC = KvSpec((KvGroup("full", 0, (0, 1), kv_heads=1, head_dim=4, dtype="float32"),), 16)
BLOCK_NBYTES = SPEC.block_nbytes
OWNER: dict[str, Any] = {"owner": "w", "owner_incarnation": 1}
MS = 10**6
CAPACITY = 12


def key(path: tuple[int, ...]) -> bytes:
    """Chain key of the block at the end of this path from the root; of no path, the root's."""
    return bytes(path).rjust(16, b"\1") if path else bytes(16)


class Pool:
    """PoolCore, and puts in two steps that others may see, or in one."""

    def __init__(self, policy: str, immediate: bool, quota: bool, runs: bool) -> None:
        limits = PoolLimits(
            CAPACITY * BLOCK_NBYTES, BLOCK_NBYTES, MS, 10**12, policy=policy, quotas={NS: 0.7} if quota else {}
        )
        self.core = PoolCore(limits, 7)
        self.core.take_dram_changes()
        self.immediate = immediate
        self.now = 0
        self.leases: list[str] = []
        if not runs:
            self.core.store.add_run = lambda *_: []  # type: ignore[method-assign]

    def put(self, paths: list[tuple[int, ...]], tail: bool, keep: list[bool]) -> list[int]:
        chain, parents = [key(path) for path in paths], [key(path[:-1]) for path in paths]
        num_tokens = [0] * (len(paths) - 1) + [3] if tail else ()
        request = PutRequest(NS, SPEC, chain, parents, num_tokens, compute_s=0.5)
        if not self.immediate:
            got = self.core.allocate(self.now, request, ttl_ns=MS, **OWNER)
            if got.new_blocks:
                digests = [(block.chain_key,) for block in got.new_blocks]
                self.core.seal(self.now, got.put_id, digests, keep[: len(digests)])
                self.core.fence_revoked(got.put_id)
            return list(got.status)
        new = self.core.add(self.now, request)
        if new.blocks:
            digests = [(block.chain_key,) for block in new.blocks]
            self.core.settle_new(new, self.core.seal_new(new, digests, keep[: len(digests)]))
        return list(new.status)

    def look_up(self, path: tuple[int, ...], lease: bool) -> int:
        chain = [key(path[: i + 1]) for i in range(len(path))]
        if not lease:
            self.core.use(self.now, NS, chain)
            return 0
        grant = self.core.pin(self.now, NS, chain, lease_ns=MS, tails=True, **OWNER)
        if grant is not None:
            self.leases.append(grant.lease_id)
        return 0 if grant is None else len(grant.blocks)

    def state(self) -> dict[str, Any]:
        core = self.core
        assert core.validate() == []
        blocks = {
            block.key: (
                block.offsets,
                block.digests,
                block.num_tokens,
                block.prefix_node.depth,
                block.cost_s,
                copy.hits,
            )
            for block in core.store.index
            if (copy := block.dram) is not None
        }
        return {
            "blocks": blocks,
            "uses": {c.key: (c.born_ns, c.used_ns, c.last_use) for c in core.store.dram.holders.values()},
            "events": core.log.after(7, 0),
            "changes": [(added, block.key) for added, block in core.take_dram_changes()],
            "counters": core.totals(),
            "victims": [copy.key for copy in core.store.dram.next_victims(self.now, 4)],
        }


PATHS = st.lists(st.integers(2, 4), min_size=1, max_size=5).map(tuple)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), PATHS, st.integers(0, 4), st.booleans(), st.lists(st.booleans(), min_size=5, max_size=5)
        ),
        st.tuples(st.just("put"), PATHS, st.just(0), st.just(False), st.just([True] * 5)),
        st.tuples(st.just("use"), PATHS),
        st.tuples(st.just("pin"), PATHS),
        st.tuples(st.just("unpin")),
        st.tuples(st.just("evict"), PATHS),
    ),
    max_size=25,
)


def run(pool: Pool, step: Any) -> Any:
    pool.now += 7 * MS
    match step:
        case ("put", path, first, tail, keep):
            paths = [path[: i + 1] for i in range(min(first, len(path) - 1), len(path))]
            return pool.put(paths, tail, keep)
        case ("evict", path):
            return pool.core.evict(NS, [key(path)])
        case ("unpin",):
            return pool.leases and pool.core.unpin(pool.leases.pop())
        case (kind, path):
            return pool.look_up(path, lease=kind == "pin")


@pytest.mark.parametrize("policy", ["lru", "moonpool"])
@given(steps=STEPS, quota=st.booleans())
@settings(max_examples=60, deadline=None)
def test_puts_completed_at_once_leave_what_allocated_and_sealed_ones_leave(
    policy: str, steps: Any, quota: bool
) -> None:
    pools = [Pool(policy, True, quota, True), Pool(policy, False, quota, True), Pool(policy, True, quota, False)]
    for step in steps:
        results = [run(pool, step) for pool in pools]
        assert results[0] == results[1] == results[2]
        states = [pool.state() for pool in pools]
        assert states[0] == states[1]
        assert states[0] == states[2]


def test_a_put_that_is_dropped_leaves_its_slots_free() -> None:
    pool = Pool("lru", True, False, True)
    new = pool.core.add(0, PutRequest(NS, SPEC, [key((2,)), key((2, 3))], [bytes(16), key((2,))]))
    assert len(new.blocks) == 2
    pool.core.drop_new(new)
    assert len(pool.core.store.index) == 0
    assert pool.core.store.dram.slabs.num_slots_used == 0
    assert pool.core.totals()["aborted_puts"] == 1
    assert pool.core.log.after(7, 0) == []
    assert pool.core.validate() == []
