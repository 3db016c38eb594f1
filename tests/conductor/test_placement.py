"""Where requests go: Algorithm 1, the decode choice, holders and hot-spot copies."""

import pytest

from conductor.policy.decisions import Copy, Holder, Place, Reject
from conductor.policy.events import (
    CopyFinished,
    DecodeSample,
    NodeLost,
    NodeReported,
    PrefillSample,
    RequestCompleted,
    TransferSample,
)


def placed(decisions):
    assert isinstance(decisions[0], Place), decisions
    return decisions[0]


def rejected(decisions):
    assert isinstance(decisions[0], Reject), decisions
    return decisions[0]


def test_equal_nodes_are_taken_in_the_order_of_their_ids(cluster, make):
    place = placed(cluster().send(make.request()))
    assert (place.prefill, place.decode) == ("prefill-0", "decode-0")


def test_a_queue_sends_the_next_request_to_the_other_node(cluster, make):
    c = cluster()
    nodes = [placed(c.send(make.request(f"r{i}"))) for i in range(4)]
    assert [p.prefill for p in nodes] == ["prefill-0", "prefill-1", "prefill-0", "prefill-1"]
    assert [p.decode for p in nodes] == ["decode-0", "decode-1", "decode-0", "decode-1"]


def test_predicted_ttft_counts_the_prefills_queued_before(cluster, make):
    c = cluster(make.node("p", "prefill"), make.node("d", "decode"))
    c.learn("p", per_token_s=1e-3)
    times = [placed(c.send(make.request(f"r{i}", prompt=512))).predicted_ttft_s for i in range(3)]
    assert times == pytest.approx([0.512, 1.024, 1.536], rel=0.05)


def test_the_queue_drains_with_time_once_a_prefill_has_started(cluster, make):
    c = cluster(make.node("p", "prefill"), make.node("d", "decode"))
    c.learn("p", per_token_s=1e-3)
    placed(c.send(make.request("r", prompt=1000)))
    c.progress("p", "prefill_started")
    assert placed(c.after(0.4).send(make.request("s", prompt=500))).predicted_ttft_s == pytest.approx(1.1, rel=0.05)


def test_a_prefill_reported_as_ended_leaves_the_queue(cluster, make):
    c = cluster(make.node("p", "prefill"), make.node("d", "decode"))
    c.learn("p")
    placed(c.send(make.request("r", prompt=1000)))
    c.progress("p", "prefill_ended")
    assert placed(c.send(make.request("s", prompt=500))).predicted_ttft_s == pytest.approx(0.5, rel=0.05)


def test_the_node_that_holds_the_prefix_is_preferred_and_reuses_it(cluster, make):
    place = placed(cluster().send(make.request(matches=(("pool-1", 10),))))
    assert place.prefill == "prefill-1"
    assert place.reuse_blocks == 10
    assert place.holders == (Holder("pool-1", 0, 10),)


def test_a_prefix_in_a_nodes_own_memory_draws_the_request_there_and_costs_no_load(cluster, make):
    c = cluster(explain=8)
    c.learn("prefill-0")
    idle = placed(c.send(make.request("first", prompt=1024))).predicted_ttft_s
    c = cluster(explain=8)
    c.learn("prefill-0")
    place = placed(c.send(make.request(prompt=1024, in_workers=(("prefill-1", 32),))))
    assert (place.prefill, place.reuse_blocks, place.local_blocks, place.holders) == ("prefill-1", 32, 32, ())
    assert place.predicted_ttft_s == pytest.approx(idle / 2, rel=0.05)
    best, other = place.considered.prefill
    assert (best.node_id, best.transfer_s, best.local_blocks) == ("prefill-1", 0.0, 32)
    assert (other.node_id, other.local_blocks) == ("prefill-0", 0)


def test_only_the_blocks_beyond_a_nodes_own_memory_are_loaded(cluster, make):
    def transfer_s(*own):
        c = cluster(explain=1)
        c.learn("prefill-0")
        asked = make.request(prompt=1024, matches=(("pool-0", 32),), in_workers=own, excluded=("prefill-1",))
        place = placed(c.send(asked))
        assert (place.reuse_blocks, place.holders) == (32, (Holder("pool-0", 0, 32),))
        return place.considered.prefill[0].transfer_s

    none, few, many = transfer_s(), transfer_s(("prefill-0", 8)), transfer_s(("prefill-0", 24))
    assert none > few > many > 0
    assert (few - many) == pytest.approx(2 * (none - few))  # beside a fixed cost
    assert transfer_s(("prefill-0", 32)) == 0.0


def test_a_prefix_that_is_mostly_in_a_nodes_own_memory_is_not_fetched(cluster, make):
    asked = {"matches": (("pool-1", 32),), "in_workers": (("prefill-0", 30),), "excluded": ("prefill-1",)}
    place = placed(cluster().send(make.request(prompt=1024, **asked)))
    assert (place.prefill, place.reuse_blocks, place.local_blocks, place.holders) == ("prefill-0", 30, 30, ())


def test_what_is_fetched_begins_after_the_nodes_own_blocks(cluster, make):
    c = cluster(explain=1)
    c.learn("prefill-0")
    asked = {"matches": (("pool-1", 60),), "in_workers": (("prefill-0", 4),), "excluded": ("prefill-1",)}
    place = placed(c.send(make.request(prompt=1024, **asked)))
    assert (place.prefill, place.reuse_blocks, place.local_blocks) == ("prefill-0", 60, 4)
    assert place.holders == (Holder("pool-1", 0, 60),)


def test_a_worker_that_left_is_not_matched(cluster, make):
    c = cluster()
    c.send(NodeLost("prefill-1", 1))
    place = placed(c.send(make.request(in_workers=(("prefill-1", 10),))))
    assert (place.prefill, place.reuse_blocks, place.local_blocks) == ("prefill-0", 0, 0)


def test_the_last_prompt_token_is_computed_even_if_the_nodes_memory_holds_the_prompt(cluster, make):
    place = placed(cluster().send(make.request(prompt=10 * make.block, in_workers=(("prefill-0", 10),))))
    assert (place.reuse_blocks, place.local_blocks) == (9, 9)


def test_the_last_prompt_token_is_always_computed(cluster, make):
    place = placed(cluster().send(make.request(prompt=10 * make.block, matches=(("pool-0", 10),))))
    assert place.reuse_blocks == 9
    assert sum(holder.num_blocks for holder in place.holders) == 9


def test_a_busy_holder_leaves_the_request_to_another_node_that_fetches_and_keeps(cluster, make):
    c = cluster()
    c.learn("prefill-0", per_token_s=1e-2)
    for i in range(3):
        c.send(make.request(f"q{i}", prompt=1024, matches=(("pool-0", 10),), excluded=("prefill-1",)))
    decisions = c.send(make.request(matches=(("pool-0", 12), ("pool-1", 2)), match_key=7))
    place = placed(decisions)
    assert place.prefill == "prefill-1"
    assert place.holders == (Holder("pool-1", 0, 2), Holder("pool-0", 2, 10))
    assert decisions[1] == Copy("pool-0", "pool-1", 12, 7, keeps_fetched=True)


def test_a_prefix_within_the_threshold_is_used_as_it_is(cluster, make):
    c = cluster(balancing_threshold=1.5)
    decisions = c.send(make.request(matches=(("pool-0", 12), ("pool-1", 8)), excluded=("prefill-0",)))
    assert placed(decisions).holders == (Holder("pool-1", 0, 8),)
    assert len(decisions) == 1


def test_the_same_prefix_is_copied_once_at_a_time(cluster, make):
    c = cluster(placement="algorithm1")  # which copies what it fetches
    ask = {"matches": (("pool-0", 12),), "match_key": 7, "excluded": ("prefill-0",)}
    assert len(c.send(make.request("a", **ask))) == 2
    assert len(c.send(make.request("b", **ask))) == 1
    c.send(CopyFinished("pool-0", "pool-1", 7, 1000, 0.1))
    assert len(c.send(make.request("c", **ask))) == 2


def test_copies_are_bounded(cluster, make):
    c = cluster(placement="algorithm1", max_copies=2, max_copies_per_pool=2)
    ask = {"matches": (("pool-0", 12),), "excluded": ("prefill-0",)}
    assert [len(c.send(make.request(f"r{i}", match_key=i, **ask))) for i in range(4)] == [2, 2, 1, 1]


def test_a_pool_node_that_sends_already_makes_fetching_slower_until_it_has_sent(cluster, make):
    c = cluster(explain=8, max_copies=0)
    ask = {"prompt": 4000, "matches": (("pool-0", 240),), "excluded": ("prefill-0",)}
    alone, beside = (placed(c.send(make.request(name, **ask))).considered.prefill[0].transfer_s for name in "ab")
    c.progress("prefill-1", "prefill_started", "a")
    c.progress("prefill-1", "prefill_started", "b")
    again = placed(c.send(make.request("c", **ask))).considered.prefill[0].transfer_s
    assert alone == again
    assert 1.5 < beside / alone <= 2


def test_with_equal_matches_the_pool_that_sends_least_is_read(cluster, make):
    c = cluster(
        *(make.node(f"pool-{i}", "pool") for i in range(3)), make.node("p-2", "prefill"), make.node("d-2", "decode")
    )
    ask = {"matches": (("pool-0", 5), ("pool-1", 5))}
    sources = [placed(c.send(make.request(f"r{i}", match_key=i, **ask))).holders[0].pool for i in range(2)]
    assert sources == ["pool-0", "pool-1"]


def test_blocks_of_a_lost_pool_node_are_not_reused(cluster, make):
    c = cluster()
    c.send(NodeLost("pool-1", 1))
    assert placed(c.send(make.request(matches=(("pool-1", 10),)))).reuse_blocks == 0


def test_an_excluded_pool_node_is_not_read(cluster, make):
    assert placed(cluster().send(make.request(matches=(("pool-1", 10),), excluded=("pool-1",)))).reuse_blocks == 0


def test_a_draining_node_gets_no_new_work(cluster, make):
    c = cluster()
    c.send(NodeReported("prefill-0", draining=True))
    c.send(NodeReported("decode-0", draining=True))
    place = placed(c.send(make.request()))
    assert (place.prefill, place.decode) == ("prefill-1", "decode-1")


def test_an_aggregated_node_keeps_the_request(cluster, make):
    c = cluster(make.node("a", "aggregated"))
    assert placed(c.send(make.request())).decode == ""
    assert c.counts["committed_tokens"] == 320


def test_one_new_token_needs_no_decode_node(cluster, make):
    c = cluster(make.node("p", "prefill"))
    assert placed(c.send(make.request(new=1))).decode == ""
    assert c.counts["committed_tokens"] == 0


def test_a_prefill_node_alone_cannot_serve_two_tokens(cluster, make):
    assert rejected(cluster(make.node("p", "prefill")).send(make.request(new=2))).reason == "no_nodes"


def test_the_decode_node_with_the_smallest_step_is_chosen(cluster, make):
    c = cluster()
    c.learn("prefill-0")
    for i in range(3):
        placed(c.send(make.request(f"r{i}", prompt=64, excluded=("decode-1",))))
        c.progress("decode-0", "decode_joined", f"r{i}")
    assert placed(c.send(make.request("s"))).decode == "decode-1"


def test_requests_that_decode_longer_than_usual_are_expected_to_be_gone(cluster, make):
    c = cluster(make.node("p", "prefill"), make.node("d", "decode"), admission_mode="predicted-uniform")
    c.learn("p", step_s=0.01)
    c.send(make.request("a", prompt=64))
    c.progress("d", "decode_joined", "a")
    c.after(1.0).progress("d", "ended", "a")  # decoded for one second
    c.send(make.request("b", prompt=64))
    c.progress("d", "decode_joined", "b")
    beside = placed(c.after(0.1).send(make.request("c", prompt=64))).predicted_tbt_s
    c.send(RequestCompleted("c", 0, "cancelled"))
    alone = placed(c.after(2.0).send(make.request("e", prompt=64))).predicted_tbt_s
    assert beside == pytest.approx(0.02, rel=0.1)
    assert alone == pytest.approx(0.01, rel=0.1)


def test_an_explained_decision_shows_the_best_candidates_terms_best_first(cluster, make):
    nodes = [make.node(f"prefill-{i}", "prefill") for i in range(6)] + [make.node("decode-0", "decode")]
    c = cluster(*nodes, *(make.node(f"pool-{i}", "pool") for i in range(6)), explain=4, max_copies=0)
    place = placed(c.send(make.request(matches=(("pool-4", 8), ("pool-2", 4)))))
    seen = place.considered
    assert [score.node_id for score in seen.prefill] == ["prefill-4", "prefill-0", "prefill-1", "prefill-3"]
    totals = [score.transfer_s + score.queue_s + score.prefill_s for score in seen.prefill]
    assert totals == sorted(totals)
    assert totals[0] == seen.ttft_s == place.predicted_ttft_s
    assert (seen.num_prefill, seen.num_decode, seen.decode[0].node_id) == (6, 1, "decode-0")


def test_an_explained_decision_shows_the_decode_nodes_that_lost(cluster, make):
    sizes = {"decode-0": 1024, "decode-1": 2048, "decode-2": 4096, "decode-3": 512, "decode-4": 600}
    nodes = [make.node(name, "decode", capacity_tokens=size) for name, size in sizes.items()]
    c = cluster(*nodes, make.node("prefill-0", "prefill"), explain=8)
    first = placed(c.send(make.request("a", prompt=256, new=64)))
    second = placed(c.send(make.request("b", prompt=256, new=64)))
    assert first.decode == "decode-0"
    seen = second.considered
    free = [(score.node_id, score.free_tokens) for score in seen.decode]
    roomy = [("decode-1", 2048), ("decode-2", 4096), ("decode-3", 512), ("decode-4", 600), ("decode-0", 704)]
    assert (second.decode, seen.num_decode, seen.need_tokens, free) == ("decode-1", 5, 320, roomy)
    assert seen.decode[0].tbt_s == seen.tbt_s == second.predicted_tbt_s
    assert seen.decode[-1].tbt_s > seen.decode[0].tbt_s


def test_decode_nodes_without_room_lose_to_those_with_room(cluster, make):
    nodes = [make.node(name, "decode", capacity_tokens=1024) for name in ("decode-0", "decode-1")]
    c = cluster(*nodes, make.node("prefill-0", "prefill"), explain=8, max_queue_s=1e6)
    seen = [c.send(make.request(name, prompt=600, new=40))[0].considered.decode for name in "abc"]
    assert [[(score.node_id, score.free_tokens) for score in scores] for scores in seen] == [
        [("decode-0", 1024), ("decode-1", 1024)],
        [("decode-1", 1024), ("decode-0", 384)],
        [("decode-0", 384), ("decode-1", 384)],
    ]


def test_a_rejection_says_what_was_predicted_and_what_had_to_be_met(cluster, make):
    c = cluster(explain=1, tbt_slo_s=3.0)
    reject = c.send(make.request(ttft_objective_s=1e-9))[0]
    seen = reject.considered
    assert reject.reason == "ttft"
    assert (seen.ttft_objective_s, seen.ttft_from) == (1e-9, "header")
    assert (seen.tbt_objective_s, seen.tbt_from) == (3.0, "cluster")
    assert seen.ttft_s > 1e-9
    assert [score.node_id for score in seen.prefill] == ["prefill-0"]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_worker_that_measures_nonsense_keeps_nobody_from_being_placed(cluster, make, seconds):
    many = cluster()
    samples = {"prefills": (PrefillSample(100, 0, seconds),), "decodes": (DecodeSample(1, 100, seconds),)}
    many.send(NodeReported("decode-0", **samples, transfers=(TransferSample(1 << 20, seconds, "fetch"),)))
    place = placed(many.send(make.request()))
    assert 0 < place.predicted_ttft_s < 10
    assert 0 < place.predicted_tbt_s < 10
