"""Eviction policies by themselves: who leaves first, what is skipped, what is remembered."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import PoolConfigError
from kvpool.policy.eviction import POLICIES, EvictionPolicy, Resident, Use, make_policy
from kvpool.policy.eviction.arc import Arc
from kvpool.policy.eviction.ranked import RankedQueue

NOW = Use(0)


def always(block: Resident) -> bool:
    return True


def block(key: int, depth: int = 0) -> Resident:
    return Resident(key, None, 1, depth=depth)


def filled(policy: EvictionPolicy, *blocks: Resident) -> EvictionPolicy:
    """The policy with these blocks stored, in order, all offered."""
    for one in blocks:
        policy.insert(one, NOW)
        policy.offer(one)
    return policy


def drained(policy: EvictionPolicy) -> list[object]:
    """The keys in the order of eviction."""
    keys = []
    while (victim := policy.pop(0, always)) is not None:
        keys.append(victim.key)
    return keys


def test_lru_evicts_the_oldest_use() -> None:
    a, b, c = block(1), block(2), block(3)
    policy = filled(make_policy("lru", 9), a, b, c)
    policy.hit(a, NOW)
    assert drained(policy) == [2, 3, 1]


def test_lfu_evicts_the_fewest_uses_and_of_those_the_oldest_use() -> None:
    a, b, c, d = block(1), block(2), block(3), block(4)
    policy = filled(make_policy("lfu", 9), a, b, c, d)
    for used in (d, a, a, b):
        policy.hit(used, NOW)
    assert drained(policy) == [3, 4, 2, 1]


def test_lfu_forgets_uses_with_the_block() -> None:
    policy = make_policy("lfu", 9)
    popular = block(1)
    filled(policy, popular)
    for _ in range(3):
        policy.hit(popular, NOW)
    assert policy.pop(0, always) is popular
    filled(policy, block(1), block(2))
    assert drained(policy) == [1, 2]


def test_length_aware_evicts_the_deeper_of_equally_used_blocks() -> None:
    a, b, c = block(1, depth=5), block(2, depth=0), block(3, depth=7)
    policy = filled(make_policy("length-aware", 9), a, b, c)
    policy.hit(c, NOW)
    assert drained(policy) == [1, 2, 3]


def test_arc_keeps_what_was_used_again_from_a_scan() -> None:
    policy = make_policy("arc", 10)
    kept = [block(key) for key in range(3)]
    filled(policy, *kept)
    for one in kept:
        policy.hit(one, NOW)
    filled(policy, *(block(key) for key in range(10, 17)))
    for key in range(20, 60):
        victim = policy.pop(0, always)
        assert victim is not None
        assert victim not in kept
        filled(policy, block(key))


def test_arc_gives_room_to_the_list_that_lost_what_comes_back() -> None:
    policy = Arc(2)
    used_again = block(1)
    filled(policy, used_again, block(2))
    policy.hit(used_again, NOW)
    lost = policy.pop(0, always)
    assert lost is not None
    assert lost.key == 2
    assert policy.target_nbytes == 0
    policy.insert(block(2), NOW)
    assert policy.target_nbytes == 1


def test_arc_remembers_a_hit_on_an_offered_block_as_offered() -> None:
    policy = make_policy("arc", 9)
    one = block(1)
    filled(policy, one)
    policy.hit(one, NOW)
    assert drained(policy) == [1]


class PaperArc:
    """Figure 4 of the paper, to the letter, for blocks of one size; ratios rounded down."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.target = capacity, 0
        self.once: OrderedDict[int, None] = OrderedDict()
        self.again: OrderedDict[int, None] = OrderedDict()
        self.lost_once: OrderedDict[int, None] = OrderedDict()
        self.lost_again: OrderedDict[int, None] = OrderedDict()

    def use(self, key: int) -> None:
        if key in self.once or key in self.again:
            self.once.pop(key, None)
            self.again.pop(key, None)
            self.again[key] = None
        elif key in self.lost_once:
            self.target = min(self.capacity, self.target + max(1, len(self.lost_again) // len(self.lost_once)))
            self._replace(False)
            del self.lost_once[key]
            self.again[key] = None
        elif key in self.lost_again:
            self.target = max(0, self.target - max(1, len(self.lost_once) // len(self.lost_again)))
            self._replace(True)
            del self.lost_again[key]
            self.again[key] = None
        else:
            self._use_new(key)

    def _use_new(self, key: int) -> None:
        first = len(self.once) + len(self.lost_once)
        total = first + len(self.again) + len(self.lost_again)
        if first == self.capacity:
            if len(self.once) < self.capacity:
                self.lost_once.popitem(last=False)
                self._replace(False)
            else:
                self.once.popitem(last=False)
        elif total >= self.capacity:
            if total == 2 * self.capacity:
                self.lost_again.popitem(last=False)
            self._replace(False)
        self.once[key] = None

    def _replace(self, back_to_again: bool) -> None:
        if self.once and ((back_to_again and len(self.once) == self.target) or len(self.once) > self.target):
            self.lost_once[self.once.popitem(last=False)[0]] = None
        else:
            self.lost_again[self.again.popitem(last=False)[0]] = None


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 11), max_size=150))
def test_arc_is_the_papers(capacity: int, keys: list[int]) -> None:
    paper, policy = PaperArc(capacity), Arc(capacity)
    present: dict[object, Resident] = {}
    for key in keys:
        paper.use(key)
        if key in present:
            policy.hit(present[key], NOW)
        else:
            new = block(key)
            if len(present) == capacity:
                assert policy.admits(new, NOW)
                victim = policy.pop(0, always)
                assert victim is not None
                del present[victim.key]
            present[key] = new
            filled(policy, new)
        assert set(present) == set(paper.once) | set(paper.again)
        assert policy.target_nbytes == paper.target


RANKS: dict[str, Callable[[Resident, int, int], tuple[int, ...]]] = {
    "lru": lambda block, uses, last: (last,),
    "lfu": lambda block, uses, last: (uses, last),
    "length-aware": lambda block, uses, last: (uses, -block.depth, last),
}
STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "hit", "lease", "release", "pop", "pop", "remove"]), st.integers(0, 7)),
    max_size=120,
)


@pytest.mark.parametrize("name", RANKS)
@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_who_leaves_is_what_looking_at_every_block_says(name: str, steps: list[tuple[str, int]]) -> None:
    policy = make_policy(name, 100)
    present: dict[object, Resident] = {}
    uses: dict[object, tuple[int, int]] = {}  # number since it came, time of the last
    leased: set[object] = set()
    for time, (step, key) in enumerate(steps):
        here = present.get(key)
        if step == "insert" and here is None:
            present[key], uses[key] = block(key, depth=key % 3), (0, time)
            filled(policy, present[key])
        elif step == "hit" and here is not None:
            uses[key] = (uses[key][0] + 1, time)
            policy.hit(here, NOW)
        elif step == "lease" and here is not None:
            leased.add(key)
        elif step == "release" and key in leased:
            leased.remove(key)
            policy.offer(present[key])
        elif step == "remove" and here is not None:
            policy.remove(present.pop(key))
            leased.discard(key)
        elif step == "pop":
            free = [one for one in present.values() if one.key not in leased]
            expected = min(free, key=lambda one: RANKS[name](one, *uses[one.key]), default=None)
            assert policy.pop(time, lambda one: one.key not in leased) is expected
            if expected is not None:
                del present[expected.key]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_each_offered_block_once(name: str) -> None:
    policy = make_policy(name, 20)
    blocks = [block(key, depth=key % 4) for key in range(20)]
    filled(policy, *blocks)
    for one in blocks[::3]:
        policy.hit(one, NOW)
    policy.remove(blocks[7])
    assert sorted(map(str, drained(policy))) == sorted(str(one.key) for one in blocks if one is not blocks[7])


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_takes_nothing_that_was_not_offered(name: str) -> None:
    policy = make_policy(name, 20)
    policy.insert(block(1), NOW)
    assert policy.pop(0, always) is None


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_skips_what_may_not_be_taken_until_it_is_offered_again(name: str) -> None:
    policy = make_policy(name, 20)
    one = block(1)
    filled(policy, one)
    assert policy.pop(0, lambda asked: False) is None
    policy.offer(one)
    assert policy.pop(0, always) is one


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_say_who_is_next_without_letting_it_go(name: str) -> None:
    policy = make_policy(name, 20)
    filled(policy, *(block(key) for key in range(10)))
    coming = [one.key for one in policy.next_victims(0, 3, always)]
    assert len(coming) == 3
    assert drained(policy)[:3] == coming


def test_a_queue_does_not_grow_with_uses_or_departures() -> None:
    queue, blocks = RankedQueue(), [block(key) for key in range(10)]
    for time in range(2000):
        one = blocks[time % 10]
        if one.state is not None and time % 3:
            queue.discard(one)
        if one.state is None:
            queue.add(one, (time,))
        else:
            queue.raise_rank(one, (time,))
        queue.offer(one)
        assert queue.num_entries <= 2 * len(queue) + 64


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        PoolConfigError, match=r"unknown eviction policy 'mru': expected one of lru, lfu, length-aware, arc"
    ):
        make_policy("mru", 10)


def test_a_tier_without_bytes_has_no_policy() -> None:
    with pytest.raises(PoolConfigError, match="must be positive"):
        make_policy("lru", 0)
