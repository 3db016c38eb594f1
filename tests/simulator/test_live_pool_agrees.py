"""The simulated pool decides what the live pool's core decides, block by block, under every policy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import KvGroup, KvSpec, kv_namespace
from kvpool.policy import PoolCore, PoolLimits, PutRequest, SlotStatus
from kvpool.policy.eviction import POLICIES, Use, make_policy
from simulator.pool import SimulatedPool

SPEC = KvSpec((KvGroup("full", 0, (0,), kv_heads=1, head_dim=4, dtype="float32"),), 2)
NAMESPACE = kv_namespace("weights", SPEC)
SLOT_NBYTES = SPEC.slot_nbytes(0)
DIGESTS = (bytes(8),)
PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 7)), min_size=1, max_size=50)


class LivePool:
    """A pool node's core of so many blocks, asked as a worker asks it: look up, compute, store the rest."""

    def __init__(self, policy: str, capacity: int) -> None:
        arena_nbytes = capacity * SLOT_NBYTES
        self.core = PoolCore(PoolLimits(arena_nbytes, SLOT_NBYTES, 1, 10**18, policy=policy), incarnation=1)
        self._owner = {"owner": "worker", "owner_incarnation": 1}

    def request(self, now_ns: int, chain: list[bytes]) -> int:
        grant = self.core.pin(now_ns, NAMESPACE, chain, lease_ns=10, **self._owner)
        found = 0 if grant is None else len(grant.blocks)
        rest, parents = chain[found:], [bytes(16), *chain][found:-1]
        if rest:
            got = self.core.allocate(now_ns, PutRequest(NAMESPACE, SPEC, rest, parents), ttl_ns=10**15, **self._owner)
            if got.put_id:
                self.core.seal(now_ns, got.put_id, [DIGESTS] * list(got.status).count(SlotStatus.NEW))
                self.core.fence_revoked(got.put_id)
        if grant is not None:
            self.core.unpin(grant.lease_id)
        return found


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20, deadline=None)
@given(prompts=PROMPTS, capacity=st.integers(1, 12))
def test_both_pools_find_and_hold_the_same(policy: str, prompts: list[tuple[int, int, int]], capacity: int) -> None:
    live = LivePool(policy, capacity)
    simulated = SimulatedPool(make_policy(policy, capacity), capacity, leaf_first=True)
    held = 0
    for second, (family, branch, length) in enumerate(prompts):
        # Branches of a family share their first two blocks.
        chain = [bytes([1 + family, branch if i >= 2 else 0, *bytes(13), i]) for i in range(length)]
        now_ns = second * 10**9
        use = Use(now_ns, length)
        found = simulated.look_up(chain, use)
        simulated.store(chain, found, use)
        assert live.request(now_ns, chain) == found
        held = len(simulated.present)
        assert {block.chain_key for block in live.core.store.index} == set(simulated.present)
    assert held <= capacity
    assert live.core.validate() == []
