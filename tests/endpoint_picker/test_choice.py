"""Order of the endpoints: dialogues stay, load is bounded, all pickers agree."""

from collections import Counter

from endpoint_picker.choice import EndpointLoad, ranked


def loads(**requests):
    return [EndpointLoad(name, count) for name, count in requests.items()]


def first(endpoints, number, *, slack=8):
    return ranked(endpoints, number.to_bytes(8, "little"), is_sticky=True, slack=slack)[0]


IDLE = loads(a=0, b=0, c=0, d=0)


def test_dialogues_spread_over_all_endpoints_and_each_stays_with_its_own():
    homes = [first(IDLE, number) for number in range(400)]
    assert homes == [first(list(reversed(IDLE)), number) for number in range(400)]
    assert set(Counter(homes)) == {"a", "b", "c", "d"}
    assert min(Counter(homes).values()) > 60


def test_another_endpoint_takes_over_its_share_and_moves_no_other_dialogue():
    before = [first(IDLE, number) for number in range(400)]
    after = [first([*IDLE, EndpointLoad("e", 0)], number) for number in range(400)]
    moved = [now for then, now in zip(before, after, strict=True) if then != now]
    assert set(moved) == {"e"}
    assert 40 < len(moved) < 130


def test_a_dialogue_leaves_an_endpoint_whose_load_exceeds_the_bound_and_returns():
    number = next(n for n in range(100) if first(IDLE, n) == "a")
    assert first(loads(a=10, b=2, c=2, d=2), number, slack=8) == "a"  # at most 1.25 * 4 + 8
    away = first(loads(a=30, b=2, c=2, d=2), number, slack=8)
    assert away == first(loads(b=2, c=2, d=2), number)
    assert first(loads(a=13, b=2, c=2, d=2), number, slack=8) == "a"


def test_a_request_that_stands_alone_goes_to_the_least_loaded_endpoint():
    order = ranked(loads(a=5, b=1, c=3), b"1", is_sticky=False, slack=100)
    assert order == ["b", "c", "a"]


def test_requests_that_stand_alone_spread_over_equally_loaded_endpoints():
    firsts = {ranked(IDLE, bytes([n]), is_sticky=False, slack=8)[0] for n in range(64)}
    assert firsts == {"a", "b", "c", "d"}


def test_fallbacks_are_the_least_loaded_others():
    number = next(n for n in range(100) if first(IDLE, n) == "a")
    order = ranked(loads(a=6, b=5, c=1, d=3), number.to_bytes(8, "little"), is_sticky=True, slack=8)
    assert order == ["a", "c", "d", "b"]
