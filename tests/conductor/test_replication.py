"""Hot prefixes: which are copied, whether it paid, when they are given up again."""

import pytest

from conductor.policy.decisions import Copy, Place, Shrink
from conductor.policy.events import CopyFinished, NodeLost, NodeReported, Tick, TransferSample

MIB = 1 << 20


def copies(decisions):
    return [decision for decision in decisions if isinstance(decision, Copy)]


KEPT = Copy("pool-0", "pool-1", 12, 7, keeps_fetched=True)


def slow_network(c, bytes_per_s=1e6, own_bytes_per_s=1e10):
    """Reads from other hosts cost a second per MB, those from the own one nothing to speak of."""
    fetches = tuple(TransferSample(n, n / bytes_per_s, "fetch") for n in (1 << 14, 1 << 17, 1 << 20)) * 20
    loads = tuple(TransferSample(n, n / own_bytes_per_s, "load") for n in (1 << 14, 1 << 17, 1 << 20)) * 20
    c.send(NodeReported("prefill-0", transfers=fetches + loads))


def kept(c, make):
    """A prefix of 12 blocks at pool-0 that prefill-1 has to fetch and keeps at pool-1."""
    ask = {"matches": (("pool-0", 12),), "match_key": 7, "excluded": ("prefill-0",)}
    assert copies(c.send(make.request("a", **ask))) == [KEPT]
    for phase in ("prefill_started", "prefill_ended", "ended"):
        c.progress("prefill-1", phase, "a")


def copied_ahead(c, make, per_token_s=1e-2):
    """A prefix that keeps its holder so busy that it is copied to pool-1 ahead of need."""
    c.learn("prefill-0", per_token_s=per_token_s)  # 0.64 s for the 64 tokens behind the prefix
    ask = {"prompt": 256, "matches": (("pool-0", 12),), "match_key": 7}
    found = []
    for i in range(20):
        decisions = c.after(0.7).send(make.request(f"r{i}", **ask))
        assert decisions[0].prefill == "prefill-0"
        assert decisions[0].holders[0].pool == "pool-0"
        for phase in ("prefill_started", "prefill_ended", "ended"):
            c.progress("prefill-0", phase, f"r{i}")
        found += copies(decisions)
    assert found == [Copy("pool-0", "pool-1", 12, 7)]


def test_what_is_not_used_again_is_no_longer_kept_when_it_is_fetched_once(cluster, make):
    c = cluster(replica_idle_s=1.0)
    slow_network(c, bytes_per_s=1e7, own_bytes_per_s=1e8)
    c.learn("prefill-0", per_token_s=1e-3)
    made = []
    for i in range(80):
        made.append(
            copies(c.send(make.request(f"r{i}", matches=(("pool-0", 12),), match_key=i, excluded=("prefill-0",))))
        )
        c.after(2.0).send(Tick())
        for phase in ("prefill_started", "prefill_ended", "ended"):
            c.progress("prefill-1", phase, f"r{i}")
    assert made[0]
    assert not made[-1]
    ask = {"matches": (("pool-0", 12),), "match_key": 1000, "excluded": ("prefill-0",)}
    assert [len(copies(c.send(make.request(f"again{i}", **ask)))) for i in range(3)] == [0, 1, 1]


def test_a_moved_conversation_takes_its_prefix_along(cluster, make):
    c = cluster()
    decisions = c.send(make.request(matches=(("pool-0", 12),), match_key=7, excluded=("prefill-0",)))
    assert copies(decisions) == [KEPT]
    assert c.conductor.validate()[1]["copies"] == 0  # nothing is sent for it


def test_a_prefix_that_keeps_its_holder_busy_is_copied_before_anybody_has_to_fetch_it(cluster, make):
    c = cluster(replication_horizon_s=10.0)
    copied_ahead(c, make)


def test_a_prefix_that_keeps_its_holders_link_busy_is_copied_too(cluster, make):
    """Each of its requests sends it to a decode node, which takes 0.65 s, and computes for a moment."""
    c = cluster(replication_horizon_s=10.0)
    slow_network(c, bytes_per_s=3e5)
    copied_ahead(c, make, per_token_s=1e-4)


@pytest.mark.parametrize("kind", ["no pool node", "a silent pool node"])
def test_a_worker_without_a_pool_node_to_copy_to_does_not_keep_others_from_the_copy(cluster, make, kind):
    c = cluster(
        *(make.node(f"pool-{i}", "pool") for i in (0, 1, 2)),
        make.node("prefill-0", "prefill"),
        make.node("prefill-1", "prefill", **({"pool_node_id": ""} if kind == "no pool node" else {})),
        make.node("prefill-2", "prefill"),
        make.node("decode-0", "decode"),
        replication_horizon_s=10.0,
        report_timeout_s=4.0,
    )
    c.learn("prefill-0", per_token_s=1e-2)
    talking = ["pool-0", "pool-2", "prefill-0", "prefill-1", "prefill-2", "decode-0"]
    found = []
    for i in range(20):
        for name in talking if kind == "a silent pool node" else [*talking, "pool-1"]:
            c.send(NodeReported(name))
        found += copies(c.after(0.7).send(make.request(f"r{i}", matches=(("pool-0", 12),), match_key=7)))
        for phase in ("prefill_started", "prefill_ended", "ended"):
            c.progress("prefill-0", phase, f"r{i}")
    assert found == [Copy("pool-0", "pool-2", 12, 7)]


def test_a_prefix_that_is_used_now_and_then_stays_where_it_is(cluster, make):
    c = cluster(replication_horizon_s=10.0)
    c.learn("prefill-0", per_token_s=1e-2)
    for i in range(20):
        ask = make.request(f"r{i}", prompt=256, matches=(("pool-0", 12),), match_key=7)
        assert copies(c.after(5.0).send(ask)) == []
        for phase in ("prefill_started", "prefill_ended", "ended"):
            c.progress("prefill-0", phase, f"r{i}")


def test_a_copy_that_costs_more_than_it_can_save_is_not_made(cluster, make):
    c = cluster()
    slow_network(c, bytes_per_s=1e3)
    c.learn("prefill-0", per_token_s=1e-6)
    decisions = c.send(make.request(matches=(("pool-0", 12), ("pool-1", 8)), match_key=7, excluded=("prefill-0",)))
    assert copies(decisions) == []


def test_what_a_copy_cost_and_what_it_saved_are_both_counted(cluster, make):
    c = cluster()
    slow_network(c)
    c.learn("prefill-0", per_token_s=1e-2)  # or nothing would be fetched
    kept(c, make)
    account = c.conductor.replication
    assert (account.spent_s, account.saved_s, len(account)) == (0.0, 0.0, 1)
    ask = {"match_key": 7, "excluded": ("prefill-0",)}
    with_it = c.send(make.request("b", matches=(("pool-0", 12), ("pool-1", 12, 0, 7)), **ask))[0]
    saved_s = account.saved_s
    d = cluster()
    slow_network(d)
    d.learn("prefill-0", per_token_s=1e-2)  # or nothing would be fetched
    kept(d, make)
    without = d.send(make.request("b", matches=(("pool-0", 12),), **ask))[0]
    assert isinstance(with_it, Place)
    assert saved_s == pytest.approx(without.predicted_ttft_s - with_it.predicted_ttft_s)
    assert saved_s > 0.1


def test_what_was_stored_behind_a_copied_prefix_is_not_what_the_copy_saved(cluster, make):
    """Without the copy the conversation would have gone on at the source."""
    c = cluster()
    slow_network(c)
    c.learn("prefill-0", per_token_s=1e-2)  # or nothing would be fetched
    kept(c, make)
    ask = {"match_key": 7, "excluded": ("prefill-0",)}
    with_it = c.send(make.request("b", matches=(("pool-0", 12), ("pool-1", 15, 0, 7)), **ask))[0]
    d = cluster()
    slow_network(d)
    d.learn("prefill-0", per_token_s=1e-2)  # or nothing would be fetched
    kept(d, make)
    without = d.send(make.request("b", matches=(("pool-0", 15),), **ask))[0]
    saved_s = without.predicted_ttft_s - with_it.predicted_ttft_s
    assert c.conductor.replication.saved_s == pytest.approx(saved_s)


def test_a_copy_that_the_pool_node_has_evicted_is_not_used(cluster, make):
    c = cluster(replica_idle_s=10.0, orphan_timeout_s=1e6)
    slow_network(c)
    c.learn("prefill-0", per_token_s=1e-2)  # or nothing would be fetched
    ask = {"match_key": 7, "excluded": ("prefill-0",)}
    assert copies(c.send(make.request("a", matches=(("pool-0", 12), ("pool-1", 4)), **ask))) == [KEPT]
    c.after(6.0).send(make.request("b", matches=(("pool-0", 12), ("pool-1", 4, 0, 7)), **ask))
    assert c.after(6.0).send(Tick()) == [Shrink("pool-1", 7, 4)]
    assert c.conductor.replication.saved_s == 0


@pytest.mark.parametrize("nbytes", [0, 12 << 14])
def test_what_a_copy_ahead_of_need_cost_is_counted_and_one_that_failed_is_no_replica(cluster, make, nbytes):
    c = cluster(replication_horizon_s=10.0)
    copied_ahead(c, make)
    assert len(c.conductor.replication) == 0
    c.send(CopyFinished("pool-0", "pool-1", 7, nbytes, 3.0))
    assert (c.conductor.replication.spent_s, len(c.conductor.replication)) == (3.0, int(nbytes > 0))


def test_a_replica_is_given_up_when_the_heat_is_gone_and_not_before(cluster, make):
    c = cluster(replica_idle_s=100.0, orphan_timeout_s=1e6)
    kept(c, make)
    ask = {"matches": (("pool-0", 12), ("pool-1", 12, 0, 7)), "match_key": 7, "excluded": ("prefill-0",)}
    c.after(90.0).send(make.request("b", **ask))
    assert c.after(90.0).send(Tick()) == []
    assert c.after(20.0).send(Tick()) == [Shrink("pool-1", 7)]
    assert c.send(Tick()) == []


@pytest.mark.parametrize("lost", ["pool-0", "pool-1"])
def test_when_one_of_the_two_holders_is_lost_nothing_is_given_up(cluster, make, lost):
    c = cluster(replica_idle_s=10.0, orphan_timeout_s=1e6)
    kept(c, make)
    c.send(NodeLost(lost, 1))
    assert c.after(100.0).send(Tick()) == []


def test_blocks_on_ssd_are_waited_for_in_the_prediction(cluster, make):
    c = cluster(explain=8)
    samples = tuple(TransferSample(n, n / 1e6, "ssd_read") for n in (1 << 14, 1 << 17, 1 << 20)) * 20
    c.send(NodeReported("pool-0", transfers=samples))
    in_memory = c.send(make.request("a", matches=(("pool-0", 12),)))[0].considered.prefill[0].transfer_s
    on_ssd = c.send(make.request("b", matches=(("pool-0", 12, 6),)))[0].considered.prefill[0].transfer_s
    assert on_ssd - in_memory == pytest.approx(6 * 16 * 1024 / 1e6, rel=0.1)


def test_of_equal_holders_the_one_with_the_prefix_in_memory_is_read(cluster, make):
    c = cluster(
        *(make.node(f"pool-{i}", "pool") for i in range(3)), make.node("p-2", "prefill"), make.node("d-2", "decode")
    )
    place = c.send(make.request(matches=(("pool-0", 12, 4), ("pool-1", 12, 0))))[0]
    assert [(holder.pool, holder.ssd_blocks) for holder in place.holders] == [("pool-1", 0)]
