"""Shadow caches of the experts, and the tier that follows one of them: random uses against the stated invariants."""

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.policy.eviction import Resident, Use, make_policy
from kvpool.policy.eviction import shadow_layout as at
from kvpool.policy.eviction.moonpool import Moonpool
from kvpool.policy.eviction.shadows import UNBOUNDED, Shadows
from simulator.pool import SimulatedPool

SECOND = 10**9
EXPERTS = range(at.NUM_EXPERTS)


def held_by(shadows: Shadows, expert: int) -> set[object]:
    """Return the keys in the cache of an expert."""
    return {key for key, row in shadows.rows_by_key.items() if shadows.rows[row, at.IN] >> expert & 1}


def problems_of(shadows: Shadows) -> list[str]:
    """Return descriptions of all inconsistencies of the shadow caches."""
    rows, head, problems = shadows.rows, shadows.head, []
    known = sorted(shadows.rows_by_key.values())
    for expert in EXPERTS:
        inside = {row for row in known if rows[row, at.IN] >> expert & 1}
        followers = dict.fromkeys(inside, 0)
        for row in inside:
            parent = int(rows[row, at.PARENT])
            if parent >= 0:
                if parent not in inside:
                    problems.append(f"expert {expert} holds a block without its parent")
                else:
                    followers[parent] += 1
        if any(rows[row, at.KIDS + expert] != count for row, count in followers.items()):
            problems.append(f"expert {expert} miscounts followers")
        if len(inside) > head[at.CAPACITY]:
            problems.append(f"expert {expert} holds {len(inside)} blocks")
        if expert == at.MODEL_POLICY:
            leaves = {int(row) for row in rows[: head[at.NUM_LEAVES], at.LEAF]}
            if leaves != {row for row, count in followers.items() if not count} or head[at.NUM_STORED] != len(inside):
                problems.append("the model's leaves are wrong")
            for place in range(head[at.NUM_LEAVES]):
                row = rows[place, at.LEAF]
                copied = rows[place, [at.LEAF_USED_NS, at.LEAF_CLASS, at.LEAF_VALUE]]
                if not np.array_equal(copied, rows[row, [at.USED_NS, at.CLASS, at.VALUE]]):
                    problems.append("a leaf's copy is outdated")
    lists = ((at.RECENT, at.LRU_LINKS), (at.HISTORY, at.HISTORY_LINKS))
    for which, links in (*lists, *((which, at.ARC_LINKS) for which in range(at.ONCE, at.AGAIN_GHOSTS + 1))):
        row, length = int(head[at.LISTS + 3 * which]), 0
        while row >= 0:
            length += 1
            row = int(rows[row, links + 1])
        if links == at.ARC_LINKS:
            length += sum(1 for row in known if rows[row, at.PARKED] and rows[row, at.ARC_LIST] == which)
        if length != head[at.LISTS + 3 * which + 2]:
            problems.append(f"list {which} has {length} rows")
    if len(known) != head[at.NUM_ROWS]:
        problems.append("the count of rows is wrong")
    return problems


class Leases(SimulatedPool):
    """Pool whose leased blocks may not be evicted."""

    def __init__(self, policy: Moonpool, capacity: int) -> None:
        super().__init__(policy, capacity, leaf_first=True)
        self.leased: set[object] = set()
        self._may_take = lambda block: self._is_leaf(block) and block.key not in self.leased


class Following(RuleBasedStateMachine):
    """Requests, leases, removals and switches in any order."""

    capacity = 12

    def __init__(self) -> None:
        super().__init__()
        self.policy = Moonpool(self.capacity)
        self.pool = Leases(self.policy, self.capacity)
        self.now_ns = 0

    @rule(family=st.integers(0, 4), branch=st.integers(0, 3), length=st.integers(1, 16), gap_s=st.integers(0, 90))
    def request(self, family: int, branch: int, length: int, gap_s: int) -> None:
        chain = [(family, 0 if depth < 2 else branch, depth) for depth in range(length)]
        self.now_ns += gap_s * SECOND
        use = Use(self.now_ns, length)
        found = self.pool.look_up(chain, use)
        self.pool.store(chain, found, use, length % 2)

    @precondition(lambda self: self.pool.present)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        self.pool.leased.add(data.draw(st.sampled_from(list(self.pool.present))))

    @rule()
    def release(self) -> None:
        leased, self.pool.leased = self.pool.leased, set()
        for key in sorted(leased & set(self.pool.present)):  # type: ignore[type-var]
            self.policy.offer(self.pool.present[key])

    @precondition(lambda self: self.pool.present)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.pool.present)))
        if key not in self.pool.leased:
            self.pool.remove(key)

    @rule(expert=st.sampled_from(list(EXPERTS)))
    def switch(self, expert: int) -> None:
        before = set(self.pool.present)
        self.policy.follow(expert)
        assert set(self.pool.present) == before

    @invariant()
    def tier_is_whole(self) -> None:
        present = self.pool.present
        assert len(present) <= self.capacity
        assert all(block.parent is None or block.parent in present for block in present.values())
        live = {block.key for block in self.policy._blocks.values()}
        assert live == set(present)
        evictable = {key for key, block in present.items() if self.pool._may_take(block)}
        victims = self.policy.next_victims(self.now_ns, len(present), self.pool._may_take)
        assert {block.key for block in victims} == evictable
        assert len(victims) == len(evictable)

    @invariant()
    def shadows_are_consistent(self) -> None:
        self.policy._flush()
        if self.policy._shadows.capacity != UNBOUNDED:
            assert self.policy._shadows.capacity <= self.capacity
        assert problems_of(self.policy._shadows) == []


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


def drawn_requests(seed: int, number: int) -> list[list[tuple[int, int]]]:
    """Draw prompts with shared beginnings, repetitions and scans."""
    rng = random.Random(seed)
    prompts: list[list[tuple[int, int]]] = []
    for n in range(number):
        if prompts and rng.random() < 0.6:
            base = prompts[-1 - min(int(rng.expovariate(1 / 12)), len(prompts) - 1)]
            base = base[: rng.randint(1, len(base))]
        else:
            base = []
        prompts.append(base + [(n, i) for i in range(rng.randint(1, 9))])
    return prompts


def run(pool: SimulatedPool, prompts: Sequence[Sequence[tuple[int, int]]]) -> int:
    hits = 0
    for second, prompt in enumerate(prompts):
        use = Use(second * SECOND, len(prompt))
        found = pool.look_up(prompt, use)
        pool.store(prompt, found, use)
        hits += found
    return hits


def test_the_lru_shadow_decides_as_lru_does() -> None:
    prompts = drawn_requests(1, 1200)
    lru = SimulatedPool(make_policy("lru", 60), 60, leaf_first=True)
    policy = Moonpool(60)
    policy._shadows.choose = lambda: False  # type: ignore[method-assign]
    policy.follow(at.LRU)
    followed = SimulatedPool(policy, 60, leaf_first=True)
    for start in range(0, len(prompts), 100):
        assert run(followed, prompts[start : start + 100]) == run(lru, prompts[start : start + 100])
        assert set(followed.present) == set(lru.present)


def test_the_arc_shadow_has_about_the_hits_of_arc() -> None:
    prompts = drawn_requests(2, 2500)
    arc = run(SimulatedPool(make_policy("arc", 60), 60, leaf_first=True), prompts)
    policy = Moonpool(60)
    policy._shadows.choose = lambda: False  # type: ignore[method-assign]
    policy.follow(at.ARC)
    assert abs(run(SimulatedPool(policy, 60, leaf_first=True), prompts) - arc) < 0.02 * sum(map(len, prompts))


def test_a_full_tier_holds_what_the_followed_expert_holds() -> None:
    policy = Moonpool(50)
    policy._shadows.choose = lambda: False  # type: ignore[method-assign]
    pool = SimulatedPool(policy, 50, leaf_first=True)
    prompts = drawn_requests(3, 600)
    run(pool, prompts[:300])
    for expert in EXPERTS:
        policy.follow(expert)
        for prompt in prompts[300:]:
            run(pool, [prompt])
        lacking = held_by(policy._shadows, expert) - set(pool.present)
        # What left the tier before the switch is stored again when it is used.
        assert len(lacking) <= 5


def test_the_tier_follows_the_expert_with_more_hits() -> None:
    policy = Moonpool(50)
    policy.follow(at.LRU)
    pool = SimulatedPool(policy, 50, leaf_first=True)
    loop = [[(text, depth) for depth in range(5)] for text in range(14)]
    run(pool, loop * 40)
    assert policy._shadows.followed == at.MODEL_POLICY
    assert run(pool, loop * 10) > 0.4 * 10 * 70


def test_two_policies_with_the_same_uses_decide_the_same() -> None:
    prompts = drawn_requests(4, 800)
    pools = [SimulatedPool(Moonpool(70), 70, leaf_first=True) for _ in range(2)]
    assert run(pools[0], prompts) == run(pools[1], prompts)
    assert list(pools[0].present) == list(pools[1].present)


def test_memory_is_bounded_by_the_capacity() -> None:
    policy = Moonpool(16)
    pool = SimulatedPool(policy, 16, leaf_first=True)
    run(pool, [[(n, depth) for depth in range(8)] for n in range(6000)])
    assert len(policy._shadows.rows_by_key) < 20_000  # of 48,000 keys
    assert len(policy._shadows.rows) <= 32_768
    assert len(policy._expected) <= 4096 + 16
    assert len(policy._unwanted) <= 2 * 16 + 256


def test_the_capacity_follows_that_of_a_tier_that_shrinks() -> None:
    policy = Moonpool(200)
    pool = SimulatedPool(policy, 200, leaf_first=True)
    run(pool, drawn_requests(5, 400))
    assert policy._shadows.capacity == 200
    pool._capacity = 40
    while len(pool.present) > 40:
        victim = policy.pop(10**12, pool._may_take)
        assert isinstance(victim, Resident)
        pool._forget(victim)
    run(pool, drawn_requests(6, 600))
    assert policy._shadows.capacity == 40
    assert problems_of(policy._shadows) == []
