"""Placements that simulations compare with the conductor's own, and what distinguishes it from Algorithm 1."""

from collections import Counter

import pytest

from conductor.config import ConductorConfig
from conductor.decision_log.codec import config_from_json, config_to_json
from conductor.errors import ConductorConfigError
from conductor.policy.decisions import Copy
from conductor.policy.events import NodeReported, TransferSample
from settings.conductor import PolicyConfig
from settings.keys import InvalidSetting
from settings.node import ListenSettings

HELD = {"prompt": 1024, "matches": (("pool-0", 40),), "match_key": 7}


def fetches(c, bytes_per_s):
    """Report measured reads between hosts, enough of them that the policy relies on their cost."""
    samples = tuple(TransferSample(n, n / bytes_per_s, "fetch") for n in (1 << 14, 1 << 17, 1 << 20)) * 20
    c.send(NodeReported("prefill-0", transfers=samples))


def flood(c, make, node, count, **ask):
    """Queue `count` prompts at one of the two prefill nodes."""
    other = "prefill-1" if node == "prefill-0" else "prefill-0"
    for i in range(count):
        place = c.send(make.request(f"{node}-{i}", prompt=1024, excluded=(other,), **ask))[0]
        assert place.prefill == node


def test_random_takes_every_node_about_as_often_whatever_it_holds(cluster, make):
    c = cluster(placement="random")
    taken = Counter(c.send(make.request(f"r{i}", new=1, **HELD))[0].prefill for i in range(200))
    assert taken.keys() == {"prefill-0", "prefill-1"}
    assert min(taken.values()) > 70


def test_random_takes_the_same_nodes_again_for_the_same_requests(cluster, make):
    def taken():
        c = cluster(placement="random")
        return [c.send(make.request(f"r{i}", new=1))[0].prefill for i in range(30)]

    assert taken() == taken()


def test_load_balance_takes_the_shortest_queue_whatever_another_node_holds(cluster, make):
    c = cluster(placement="load-balance")
    c.learn("prefill-0")
    flood(c, make, "prefill-0", 1)
    place = c.send(make.request(**HELD))[0]
    assert (place.prefill, place.reuse_blocks, place.holders) == ("prefill-1", 0, ())


def test_load_balance_takes_any_of_equal_queues(cluster, make):
    first = {cluster(placement="load-balance").send(make.request(f"r{i}"))[0].prefill for i in range(20)}
    assert first == {"prefill-0", "prefill-1"}


def test_cache_aware_goes_to_its_prefix_until_the_queue_there_costs_more(cluster, make):
    c = cluster(placement="cache-aware")
    c.learn("prefill-0")
    place = c.send(make.request(**HELD))[0]
    assert (place.prefill, place.reuse_blocks) == ("prefill-0", 40)
    flood(c, make, "prefill-0", 2)
    decisions = c.send(make.request("next", **HELD))
    assert (decisions[0].prefill, decisions[0].reuse_blocks, decisions[0].holders) == ("prefill-1", 0, ())


@pytest.mark.parametrize("placement", ["random", "load-balance", "cache-aware"])
def test_baselines_without_a_shared_pool_neither_fetch_nor_copy(cluster, make, placement):
    c = cluster(placement=placement, replication_horizon_s=10.0, max_queue_s=1e6)
    c.learn("prefill-0", per_token_s=1e-2)
    fetches(c, 1e12)
    for i in range(40):
        decisions = c.after(0.5).send(make.request(f"r{i}", new=1, **HELD))
        assert len(decisions) == 1
        assert {holder.pool for holder in decisions[0].holders} <= {"pool-" + decisions[0].prefill[-1]}


def test_a_fetched_prefix_is_copied_by_algorithm_1_and_kept_by_moonpool(cluster, make):
    def copies(placement):
        c = cluster(placement=placement)
        c.learn("prefill-0", per_token_s=2e-3)  # the prefix takes 1.28 s
        fetches(c, 1e6)  # 0.66 s
        ask = {**HELD, "prompt": 41 * make.block, "excluded": ("prefill-0",)}
        place, *made = c.send(make.request(**ask))
        assert place.reuse_blocks == 40
        return made

    assert copies("algorithm1") == [Copy("pool-0", "pool-1", 40, 7)]
    assert copies("moonpool") == [Copy("pool-0", "pool-1", 40, 7, keeps_fetched=True)]


def test_a_prefix_is_computed_where_that_takes_less_time_than_to_fetch_it_but_not_by_algorithm_1(cluster, make):
    def reused(placement, bytes_per_s):
        c = cluster(placement=placement)
        c.learn("prefill-0", per_token_s=1e-3)
        fetches(c, bytes_per_s)
        return c.send(make.request(excluded=("prefill-0",), **HELD))[0].reuse_blocks

    # A block takes 16 ms to compute; its 16 KiB take 0.16 ms at 1e8 bytes/s, 160 ms at 1e5.
    assert [reused("moonpool", speed) for speed in (1e8, 1e5)] == [40, 0]
    assert [reused("algorithm1", speed) for speed in (1e8, 1e5)] == [40, 40]


def test_a_prefix_is_fetched_as_long_as_the_cost_of_fetching_is_only_guessed(cluster, make):
    c = cluster()
    c.learn("prefill-0", per_token_s=1e-9)
    assert c.send(make.request(excluded=("prefill-0",), **HELD))[0].reuse_blocks == 40


@pytest.mark.parametrize("placement", ["algorithm1", "cache-aware", "load-balance", "random"])
def test_a_live_conductor_rejects_the_baselines_by_name(placement):
    with pytest.raises(ConductorConfigError, match=f"placement must be moonpool, got {placement}"):
        ConductorConfig(ListenSettings("127.0.0.1:0"), policy=PolicyConfig(placement=placement))


def test_an_unknown_placement_is_rejected_with_the_known_ones():
    with pytest.raises(InvalidSetting, match=r"placement must be one of moonpool, algorithm1, .*, got 'best'"):
        PolicyConfig(placement="best")  # type: ignore[arg-type]


def test_the_placement_is_part_of_a_logged_configuration_and_logs_without_it_have_the_conductors_own():
    logged = config_to_json(PolicyConfig(placement="random"))
    assert config_from_json(logged).placement == "random"
    del logged["placement"]
    assert config_from_json(logged).placement == "moonpool"
