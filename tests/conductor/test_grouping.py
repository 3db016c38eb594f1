"""Which prefill nodes compute a long prompt together: only those that are free for it, and only where it pays."""

import pytest

from conductor.policy.decisions import Place
from conductor.policy.events import NodeLost, NodeReported, RequestCompleted

LONG = 3000


@pytest.fixture
def crowd(cluster, make):
    """Clusters of some prefill nodes, whose tokens cost a millisecond each, and two decode nodes."""

    def build(*nodes, size=2, least=1000, **config):
        names = [f"prefill-{i}" for i in range(4)]
        nodes = nodes or tuple(make.node(name, "prefill") for name in names)
        decodes = (make.node("decode-0", "decode"), make.node("decode-1", "decode"))
        c = cluster(*nodes, *decodes, prefill_group_size=size, prefill_group_min_tokens=least, **config)
        c.learn(nodes[0].node_id)
        return c

    return build


def placed(decisions):
    assert isinstance(decisions[0], Place), decisions
    return decisions[0]


def test_without_being_asked_for_there_are_no_groups(cluster, make):
    c = cluster()
    c.learn("prefill-0")
    assert placed(c.send(make.request(prompt=LONG))).helpers == ()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_long_prompt_is_computed_by_as_many_as_may_and_sooner(size, crowd, make):
    alone = placed(crowd(size=1).send(make.request(prompt=LONG)))
    place = placed(crowd(size=size).send(make.request(prompt=LONG)))
    assert (place.prefill, place.helpers) == ("prefill-0", tuple(f"prefill-{i}" for i in range(1, size)))
    assert place.predicted_ttft_s == pytest.approx(alone.predicted_ttft_s / size, rel=0.25)
    assert place.predicted_ttft_s > alone.predicted_ttft_s / size


def test_only_tokens_that_are_not_in_the_pool_make_a_prompt_long(cluster, make):
    nodes = [make.node(f"{kind}-{i}", kind) for kind in ("pool", "prefill", "decode") for i in (0, 1)]
    c = cluster(*nodes, prefill_group_size=2, prefill_group_min_tokens=1000)
    c.learn("prefill-0")
    blocks = (LONG - 900) // make.block
    assert placed(c.send(make.request("a", prompt=LONG, matches=(("pool-0", blocks),)))).helpers == ()
    c.send(RequestCompleted("a", 0, "finished", 1.0, 0.01, 10, 0, 0.01))
    blocks = (LONG - 1200) // make.block
    assert placed(c.send(make.request("b", prompt=LONG, matches=(("pool-0", blocks),)))).helpers == ("prefill-1",)


def test_a_group_that_would_take_longer_than_one_node_is_not_made(crowd, make):
    assert placed(crowd(least=1).send(make.request(prompt=48))).helpers == ()


def test_nodes_that_drain_are_silent_excluded_or_of_another_kind_do_not_help(crowd, make):
    c = crowd(
        make.node("prefill-0", "prefill", model_fingerprint="a"),
        make.node("prefill-1", "prefill", model_fingerprint="b"),
        make.node("prefill-2", "prefill", model_fingerprint="a"),
        make.node("prefill-3", "prefill", model_fingerprint="a"),
        make.node("prefill-4", "prefill", model_fingerprint="a"),
        make.node("prefill-5", "prefill", model_fingerprint="a"),
        make.node("x", "aggregated", model_fingerprint="a"),
        size=8,
        report_timeout_s=5.0,
    )
    for _ in range(7):
        c.after(1.0)
        for name in ("prefill-0", "prefill-1", "prefill-3", "prefill-4", "prefill-5", "decode-0", "decode-1", "x"):
            c.send(NodeReported(name, draining=name == "prefill-3"))
    place = placed(c.send(make.request(prompt=LONG, excluded=("prefill-4",))))
    assert (place.prefill, place.helpers) == ("prefill-0", ("prefill-5",))


def test_a_request_that_ends_with_its_first_token_has_no_group(crowd, make):
    assert placed(crowd().send(make.request(prompt=LONG, new=1))).helpers == ()


def test_who_helps_is_as_busy_as_who_is_helped_and_later_decisions_see_it(crowd, make):
    c = crowd(size=2)
    first = placed(c.send(make.request("a", prompt=LONG)))
    assert {first.prefill, *first.helpers} == {"prefill-0", "prefill-1"}
    second = placed(c.send(make.request("b", prompt=LONG)))
    assert {second.prefill, *second.helpers} == {"prefill-2", "prefill-3"}
    third = placed(c.send(make.request("c", prompt=LONG)))
    assert third.predicted_ttft_s > first.predicted_ttft_s + 0.9


def test_nobody_helps_whose_own_requests_would_wait_for_it(crowd, make):
    c = crowd(size=2)
    others = tuple(f"prefill-{i}" for i in (0, 2, 3))
    c.send(make.request("low", prompt=200, priority=5, excluded=others))  # on prefill-1, behind whatever comes now
    assert placed(c.send(make.request("a", prompt=LONG))).helpers == ("prefill-2",)


def test_nobody_helps_who_is_free_only_when_one_node_would_have_done_it(crowd, make):
    c = crowd(make.node("prefill-0", "prefill"), make.node("prefill-1", "prefill"))
    c.send(make.request("a", prompt=4000, excluded=("prefill-0",)))
    assert placed(c.send(make.request("b", prompt=1500))).helpers == ()


def test_a_helper_is_free_again_once_the_prefill_has_ended(crowd, make):
    c = crowd(size=2)
    placed(c.send(make.request("r", prompt=LONG)))
    c.progress("prefill-0", "prefill_ended")
    again = placed(c.send(make.request("s", prompt=LONG)))
    assert (again.prefill, again.helpers) == ("prefill-0", ("prefill-1",))


def test_a_lost_head_or_helper_leaves_nothing_behind(crowd, make):
    for lost in ("prefill-0", "prefill-1"):
        c = crowd(size=2)
        placed(c.send(make.request("r", prompt=LONG)))
        c.send(NodeLost(lost, 1))
        c.send(NodeLost("prefill-2", 1))
        place = placed(c.send(make.request("s", prompt=LONG, excluded=("prefill-3",))))
        left = ({"prefill-0", "prefill-1"} - {lost}).pop()
        assert (place.prefill, place.helpers) == (left, ())
        assert place.predicted_ttft_s == pytest.approx(3.0 if lost == "prefill-0" else 4.7, rel=0.15)
