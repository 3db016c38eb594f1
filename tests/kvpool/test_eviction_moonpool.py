"""Moonpool's own policy: what it holds dearer, what it learns, what a put is to it."""

from collections.abc import Callable

import pytest

from kvpool.policy.eviction import EvictionPolicy, Resident, Use, make_policy
from kvpool.policy.eviction import shadow_layout as at
from kvpool.policy.eviction.moonpool import Moonpool

SECOND = 10**9


def always(block: Resident) -> bool:
    return True


def stored(policy: EvictionPolicy, at_s: float, chain: list[str], *, first: int = 0) -> list[Resident]:
    """A prompt of whole blocks, stored from block `first` on by one request; its last block is offered."""
    after = chain[first - 1] if first else None
    use = Use(int(at_s * SECOND), len(chain), stores=True, after=after)
    blocks = [
        Resident(chain[depth], chain[depth - 1] if depth else None, 1, depth=depth)
        for depth in range(first, len(chain))
    ]
    for block in blocks:
        policy.insert(block, use)
    policy.offer(blocks[-1])
    return blocks


def used(policy: EvictionPolicy, at_s: float, blocks: list[Resident], request_blocks: int) -> None:
    use = Use(int(at_s * SECOND), request_blocks)
    for block in blocks:
        policy.hit(block, use)


def drained(policy: EvictionPolicy, at_s: float) -> list[object]:
    keys = []
    while (victim := policy.pop(int(at_s * SECOND), always)) is not None:
        keys.append(victim.key)
    return keys


def test_what_a_conversation_came_back_to_outlives_younger_prompts_of_one_request() -> None:
    policy = make_policy("moonpool", 100)
    proven = stored(policy, 0, ["a0"])
    for turn in range(1, 4):
        used(policy, 60 * turn, proven, 2)
    stored(policy, 190, ["b0"])
    assert drained(policy, 200) == ["b0", "a0"]


def test_a_conversation_that_stays_away_for_long_leaves_before_new_prompts() -> None:
    policy = make_policy("moonpool", 100)
    stale = stored(policy, 0, ["a0"])
    used(policy, 60, stale, 2)
    stored(policy, 3000, ["b0"])
    assert drained(policy, 3060) == ["a0", "b0"]


def test_a_prompt_is_evicted_from_its_end_before_a_younger_one_is_touched() -> None:
    policy = make_policy("moonpool", 100)
    policy.keep_to_recency()
    chains = [stored(policy, n, [f"{name}{depth}" for depth in range(4)]) for n, name in enumerate("abc")]
    by_key = {block.key: block for chain in chains for block in chain}
    found = list[object]()
    while (victim := policy.pop(10 * SECOND, always)) is not None:
        found.append(victim.key)
        if victim.parent is not None:
            policy.offer(by_key[victim.parent])
    assert found == [block.key for chain in chains for block in reversed(chain)]


@pytest.mark.parametrize(
    "cheapen",
    [
        lambda block: setattr(block, "replicas", 3),
        lambda block: setattr(block, "in_slower_tier", True),
        lambda block: setattr(block, "cost_s", 0.1),
    ],
    ids=["replicas", "in_slower_tier", "cost"],
)
def test_of_equally_likely_blocks_the_one_that_is_cheaper_to_have_again_leaves_first(
    cheapen: Callable[[Resident], None],
) -> None:
    policy = make_policy("moonpool", 100)
    use = Use(0, 1)
    older, cheaper = (Resident(key, None, 1, cost_s=1.0) for key in "ab")
    policy.insert(older, use)
    policy.insert(cheaper, Use(1, 1))
    policy.offer(older)
    policy.offer(cheaper)
    cheapen(cheaper)
    policy.offer(cheaper)
    assert drained(policy, 1) == ["b", "a"]


def test_a_block_that_got_dearer_while_it_waited_is_not_taken_for_what_it_was() -> None:
    policy = make_policy("moonpool", 100)
    use = Use(0, 1)
    once_below, plain = (Resident(key, None, 1, in_slower_tier=key == "a") for key in "ab")
    for block in (once_below, plain):
        policy.insert(block, use)
        policy.offer(block)
    once_below.in_slower_tier = False
    plain.replicas = 1
    policy.offer(plain)
    assert drained(policy, 1) == ["b", "a"]


def turn_of(policy: Moonpool, block: Resident) -> int:
    policy._flush()
    shadows = policy._shadows
    visit = int(shadows.rows[shadows.rows_by_key[block.key], at.VISIT])
    return int(shadows.head[at.VISITS + visit * at.VISIT_FIELDS + at.V_TURN])


def test_the_blocks_of_a_put_are_of_the_turn_that_looked_up_what_they_come_after() -> None:
    policy = Moonpool(100)
    begin = stored(policy, 0, ["a0"])
    for turn in range(1, 4):
        used(policy, 60 * turn, begin, 2)
    answer = Resident("a1", "a0", 1, depth=1)
    policy.insert(answer, Use(182 * SECOND, 2, stores=True, after="a0"))
    assert turn_of(policy, answer) == 3


def test_a_put_after_a_beginning_that_others_went_through_since_is_a_first_turn() -> None:
    policy = Moonpool(100)
    begin = stored(policy, 0, ["a0"])
    for turn in range(1, 4):
        used(policy, 60 * turn, begin, 2)
    stored(policy, 181, ["a0", "a1"], first=1)
    answer = Resident("b1", "a0", 1, depth=1)
    policy.insert(answer, Use(182 * SECOND, 2, stores=True, after="a0"))
    assert turn_of(policy, answer) == 0


def test_what_a_put_finds_is_not_used_again() -> None:
    policy = make_policy("moonpool", 100)
    (block,) = stored(policy, 0, ["a0"])
    policy.hit(block, Use(5 * SECOND, 1, stores=True))
    assert block.hits == 0
    policy.hit(block, Use(9 * SECOND, 1))
    assert block.hits == 1


def test_a_block_that_comes_back_soon_is_known_for_what_it_was() -> None:
    policy = make_policy("moonpool", 100)
    stored(policy, 0, ["a0"])
    assert drained(policy, 1) == ["a0"]
    (again,) = stored(policy, 30, ["a0"])
    assert again.hits == 1


def test_it_learns_which_blocks_are_never_used_again() -> None:
    """Short prompts come back after ten seconds, long ones never: a new long one leaves before an older short one."""
    policy = Moonpool(400)
    shorts: list[list[Resident]] = []
    for number in range(1500):
        if number >= 10:
            used(policy, number, shorts[number - 10], 2)
        shorts.append(stored(policy, number, [f"s{number}-0", f"s{number}-1"]))
        long = [Resident(f"l{number}-{depth}", f"l{number}-{depth - 1}", 1, depth=depth) for depth in range(30)]
        use = Use(number * SECOND, 30)
        for block in long:
            policy.insert(block, use)
        for block in reversed(long):
            policy.remove(block)
    # What it has learnt is about the kind, not about the time: the short one is seven seconds older.
    last_short = shorts[-8][-1]
    stored(policy, 1500, [f"new{depth}" for depth in range(30)])
    victim = policy.pop(1500 * SECOND, lambda block: block is last_short or str(block.key).startswith("new"))
    assert victim is not None
    assert victim.key == "new29"


def test_uses_and_departures_leave_no_entries_behind() -> None:
    policy = Moonpool(100)
    blocks = [stored(policy, 0, [f"{number}"])[0] for number in range(20)]
    for second in range(300):
        used(policy, second, blocks, 1)
    for block in blocks[1:]:
        policy.remove(block)
    for second in range(300, 700):
        used(policy, second, blocks[:1], 1)
    assert len(policy._unwanted) <= 2 * 1 + 256
    assert len(policy._shadows.events) <= 2048
