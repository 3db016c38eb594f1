"""The whole pure core under random clusters, requests and faults: nodes come, go, fall silent, drain, restart and lie;
events come late, twice and from earlier lives; clocks jump. A second core is fed the same through JSON."""

import json

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conductor.decision_log.codec import config_from_json, config_to_json, decision_from_json, event_from_json, to_json
from conductor.decision_log.records import Hashes, Records
from conductor.policy import Conductor, PolicyConfig
from conductor.policy.decisions import Copy, Place, Reject, ReleaseOrphan
from conductor.policy.events import (
    NS,
    CopyFinished,
    DecodeAsked,
    DecodeSample,
    Held,
    NodeJoined,
    NodeLost,
    NodeReported,
    NodeView,
    ObjectivesChanged,
    PoolMatch,
    PoolMatches,
    PrefillSample,
    Progress,
    QueueKey,
    RequestArrived,
    RequestCompleted,
    Tick,
    TransferSample,
)

BLOCK = 16
WORKERS = ("prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1", "decode-2", "both-0")
POOLS = ("pool-0", "pool-1", "pool-2")
ROLES = {"prefill": "prefill", "decode": "decode", "both": "aggregated", "pool": "pool"}
HUGE = 2**64 - 1  # what a wire message may hold at most

names = st.sampled_from([f"r{i}" for i in range(8)])
workers, pools = st.sampled_from(WORKERS), st.sampled_from(POOLS)
anyone = st.sampled_from(WORKERS + POOLS)
counts = st.one_of(st.integers(0, 3000), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63 - 1, HUGE, -1, -(2**63)]))
durations = st.one_of(
    st.floats(1e-6, 5), st.sampled_from([0.0, -1.0, 1e-300, 9999.0, 1e18, 1e300, float("inf"), float("nan")])
)
bounds = st.one_of(st.just(0.0), st.floats(1e-3, 100.0), st.sampled_from([-1.0, float("nan"), float("inf"), 1e300]))
phases = st.sampled_from(["prefill_started", "prefill_ended", "decode_joined", "ended"])
attempts = st.integers(0, 3)
turns = st.builds(QueueKey, counts, st.sampled_from(["", "t"]), counts, counts, durations, durations, durations)
records = st.sampled_from(
    [
        {},
        {"cluster": {"ttft": "1s"}},
        {"cluster": {"ttft": "20x", "tbt": "3x"}},
        {"classes": {"fast": {"ttft": "300ms", "priority": -1}}, "tenants": {"t": {"class": "fast"}}},
    ]
)


def view(node_id, incarnation, capacity=2048):
    kind, _, number = node_id.partition("-")
    pool = "" if kind == "pool" else f"pool-{number}"
    return NodeView(node_id, ROLES[kind], incarnation, "h", pool, "m", BLOCK, capacity, 4096, 4, 1000, chunk_tokens=512)


class Core(RuleBasedStateMachine):
    """State of the test beside the core: nodes that joined or drain, and answers."""

    @initialize(
        admission=st.sampled_from(["off", "shadow", "enforce", "enforce"]),
        mode=st.sampled_from(["none", "load", "early", "predicted-uniform", "predicted"]),
        ttft_s=st.sampled_from([0.0, 0.05, 2.0, 50.0]),
        tbt_s=st.sampled_from([0.0, 0.02, 1.0]),
        overrun=st.sampled_from([0.0, 0.1]),
        colocated=st.sampled_from(["off", "advise", "act", "act"]),
        report_timeout_s=st.sampled_from([0.0, 5.0]),
        explain=st.sampled_from([1, 3]),
        group=st.sampled_from([1, 2, 3]),
    )
    def begin(self, admission, mode, ttft_s, tbt_s, overrun, colocated, report_timeout_s, explain, group):
        self.config = PolicyConfig(
            attained_share=0.0,
            ttft_slo_s=ttft_s,
            tbt_slo_s=tbt_s,
            admission=admission,
            admission_mode=mode,
            overrun_probability=overrun,
            colocated_prefill=colocated,
            report_timeout_s=report_timeout_s,
            orphan_timeout_s=20.0,
            explain=explain,
            prefill_group_size=group,
            prefill_group_min_tokens=64,
        )
        self.core = Conductor(self.config)
        self.twin = Conductor(config_from_json(json.loads(json.dumps(config_to_json(self.config)))))
        self.now_ns, self.latest_ns = 1000 * NS, 0
        self.nodes, self.draining = {}, set()
        self.asked, self.placed = [], {}
        self.copies = []
        self.seen = set()  # requests that anybody has spoken of
        self.log = Records(Hashes(b"secret", 64), 0)
        self.over = []
        for node_id in (*POOLS[:2], "prefill-0", "prefill-1", "decode-0", "decode-1"):
            self.joins(node_id, 1, 2048)

    def send(self, event):
        """Decisions, which are the same when event and decisions have gone through JSON."""
        decisions = self.core.on_event(self.now_ns, event)
        again = event_from_json(json.loads(json.dumps(to_json(event))))
        told = [json.dumps(to_json(decision)) for decision in decisions]
        assert told == [json.dumps(to_json(decision)) for decision in self.twin.on_event(self.now_ns, again)]
        assert [json.dumps(to_json(decision_from_json(json.loads(text)))) for text in told] == told
        self.latest_ns = max(self.latest_ns, self.now_ns)
        changes = self.log.take(self.latest_ns, self.latest_ns // 10**6, event, decisions, self.no_keys)
        self.over += [change.record for change in changes if change.is_over]
        for decision in decisions:
            if isinstance(decision, ReleaseOrphan):
                assert decision.request_id in self.seen
                assert self.placed.pop(decision.request_id, None) is not None or decision.request_id in self.held
            if isinstance(decision, Copy):
                self.copies.append(decision)
        return decisions

    no_keys = np.zeros(0, np.uint64)

    @rule(node_id=anyone, incarnation=st.integers(1, 3), capacity=st.sampled_from([512, 2048, 2**31]))
    def joins(self, node_id, incarnation, capacity):
        self.send(NodeJoined(view(node_id, incarnation, capacity)))
        self.nodes[node_id] = incarnation
        self.draining.discard(node_id)

    @rule(node_id=anyone, incarnation=st.integers(1, 3))
    def is_lost(self, node_id, incarnation):
        self.send(NodeLost(node_id, incarnation))
        if self.nodes.get(node_id) == incarnation:
            del self.nodes[node_id]
            self.draining.discard(node_id)

    @rule(
        node_id=anyone,
        draining=st.sampled_from([False, False, False, True]),
        held=st.lists(
            st.builds(
                Held,
                names,
                attempts,
                counts,
                counts,
                counts,
                counts,
                st.sampled_from(["", "decode-0", "x"]),
                turn=turns,
            ),
            max_size=3,
        ).map(tuple),
        progress=st.lists(st.builds(Progress, names, attempts, phases), max_size=3).map(tuple),
        prefills=st.lists(st.builds(PrefillSample, counts, counts, durations), max_size=2).map(tuple),
        decodes=st.lists(st.builds(DecodeSample, counts, counts, durations), max_size=2).map(tuple),
        transfers=st.lists(
            st.builds(TransferSample, counts, durations, st.sampled_from(["load", "fetch", "ssd_read", "odd"])),
            max_size=2,
        ).map(tuple),
    )
    def reports_what_it_likes(self, node_id, draining, held, progress, prefills, decodes, transfers):
        self.seen |= {one.request_id for one in held}
        self.send(NodeReported(node_id, draining, held, progress, prefills, decodes, transfers))
        if node_id in self.nodes:
            (self.draining.add if draining else self.draining.discard)(node_id)

    @rule(node_id=workers)
    def reports_the_truth(self, node_id):
        held = tuple(
            Held(name, place.attempt, 64 if node_id == (place.decode or place.prefill) else 0)
            for name, place in self.placed.items()
            if node_id in (place.prefill, place.decode)
        )
        self.send(NodeReported(node_id, node_id in self.draining, held))

    @rule(
        name=names,
        attempt=attempts,
        prompt=st.one_of(st.integers(1, 2000), st.sampled_from([1, 4095, 2**32 - 1])),
        new=st.one_of(st.integers(1, 600), st.sampled_from([1, 2**32 - 1])),
        found=st.dictionaries(pools, st.integers(1, 125)),
        own=st.dictionaries(workers, st.integers(1, 125), max_size=2),
        generated=st.sampled_from([0, 0, 0, 5]),
        excluded=st.lists(anyone, max_size=2, unique=True).map(lambda some: tuple(sorted(some))),
        ttft_s=bounds,
        tbt_s=bounds,
        tenant=st.sampled_from(["", "t", "u"]),
        slo_class=st.sampled_from(["", "", "fast"]),
        priority=st.sampled_from([0, 0, 5, -(2**31), 2**31 - 1]),
        model=st.sampled_from(["m", "m", "m", "m", "n"]),
        waited_s=durations,
        endless=st.sampled_from([False, False, False, True]),
    )
    def asks(
        self, name, attempt, prompt, new, found, own, generated, excluded, ttft_s, tbt_s, tenant, slo_class, priority,
        model, waited_s, endless,
    ):  # fmt: skip
        matches = PoolMatches.of(*(PoolMatch(pool, n, n // 3, n % 4) for pool, n in found.items()))
        event = RequestArrived(
            name, attempt, "f", model, prompt, new, matches, len(found), min(generated, prompt - 1), excluded,
            ttft_s, tbt_s, tenant, slo_class, priority, waited_s, endless,
            in_workers=PoolMatches.of(*(PoolMatch(worker, n) for worker, n in own.items())),
        )  # fmt: skip
        self.seen.add(name)
        before = self.core.suspects
        answer, *more = self.send(event)
        self.asked.append((name, attempt))
        assert isinstance(answer, Place | Reject)
        assert (answer.request_id, answer.attempt) == (name, attempt)
        assert all(isinstance(decision, Copy) for decision in more)
        assert len(more) <= 1
        self.placed.pop(name, None)
        if isinstance(answer, Reject):
            self.check_reject(event, answer)
        else:
            self.placed[name] = answer
            self.check_place(event, answer, before)

    def check_place(self, event, place, suspects):
        chosen = {place.prefill, place.decode, *place.helpers} - {""}
        assert len(place.helpers) < self.config.prefill_group_size
        assert len(set(place.helpers) - {place.prefill, place.decode}) == len(place.helpers)
        assert chosen <= set(self.nodes)
        assert not chosen & self.draining
        assert not chosen & self.core.suspects
        assert not chosen & set(event.excluded)
        covered = sum(holder.num_blocks for holder in place.holders)
        assert max(covered, place.local_blocks) == place.reuse_blocks
        assert place.reuse_blocks * BLOCK < event.prompt_tokens
        assert all(holder.pool in self.nodes for holder in place.holders)
        seen = place.considered
        if place.prefill.startswith("decode"):
            self.check_colocated(place)
        else:
            assert seen.prefill[0].node_id == place.prefill
        assert len(seen.prefill) <= self.config.explain
        assert 0 <= place.predicted_ttft_s < float("inf")
        assert 0 <= place.predicted_tbt_s < float("inf")
        if self.is_judged(event):
            assert not seen.ttft_objective_s > 0 or seen.ttft_s <= seen.ttft_objective_s
            if self.config.admission_mode != "load":
                assert not seen.tbt_objective_s > 0 or seen.tbt_s <= seen.tbt_objective_s
            if seen.ttft_objective_s or seen.tbt_objective_s:
                nodes = self.core.snapshot(self.now_ns)["nodes"]
                node = nodes[place.decode or place.prefill]
                if place.decode or not place.prefill.startswith("prefill"):
                    assert node["committed_tokens"] <= node["capacity_tokens"]

    def check_colocated(self, place):
        score = place.considered.colocated
        assert self.config.colocated_prefill == "act"
        assert (place.decode, score.node_id, score.is_better) == ("", place.prefill, True)
        assert place.predicted_ttft_s < score.divided_s
        assert score.step_s <= score.bound_s
        node = self.core.snapshot(self.now_ns)["nodes"][place.prefill]
        assert node["committed_tokens"] <= node["capacity_tokens"]

    def check_reject(self, event, reject):
        assert reject.message
        assert 0 <= reject.retry_after_s < float("inf")
        seen = reject.considered
        if reject.reason in ("ttft", "tbt", "queue", "decode_capacity"):
            assert self.config.admission != "off" or reject.reason == "queue"
            assert event.generated == 0
            assert reject.retry_after_s >= 1
        if reject.reason == "ttft":
            assert seen.ttft_s > seen.ttft_objective_s > 0
        if reject.reason == "tbt":
            assert seen.tbt_objective_s > 0

    def is_judged(self, event):
        return event.generated == 0 and self.config.admission == "enforce" and self.config.admission_mode != "none"

    @rule(name=names, attempt=attempts)
    def asks_to_decode(self, name, attempt):
        decisions = self.send(DecodeAsked(name, attempt))
        assert all(isinstance(decision, Reject) and decision.after_prefill for decision in decisions)
        if decisions:
            self.placed.pop(name, None)

    @rule(
        name=names,
        attempt=attempts,
        outcome=st.sampled_from(["finished", "failed", "cancelled", "retry", "odd"]),
        ttft_s=durations,
        tbt_s=durations,
        generated=counts,
    )
    def completes(self, name, attempt, outcome, ttft_s, tbt_s, generated):
        self.send(RequestCompleted(name, attempt, outcome, ttft_s, tbt_s, generated))
        if name in self.placed and self.placed[name].attempt == attempt:
            del self.placed[name]

    @rule(pool=pools, key=st.integers(0, 3), nbytes=counts, seconds=durations, is_real=st.booleans())
    def copy_ends(self, pool, key, nbytes, seconds, is_real):
        copy = self.copies.pop() if is_real and self.copies else Copy("pool-0", pool, 1, key)
        self.send(CopyFinished(copy.source, copy.target, copy.match_key, nbytes, seconds))

    @rule(record=records, version=st.integers(0, 5))
    def objectives_change(self, record, version):
        self.send(ObjectivesChanged(version, json.dumps(record)))

    @rule()
    def ticks(self):
        self.send(Tick())

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds):
        self.now_ns += round(seconds * NS)

    @rule(seconds=st.sampled_from([-3600.0, -10.0, -0.001, 60.0, 3600.0, 1e6]))
    def the_clock_jumps(self, seconds):
        self.now_ns += round(seconds * NS)
        if self.now_ns < 0:
            self.now_ns = 0

    @property
    def held(self):
        return self.seen

    @invariant()
    def all_fits_together(self):
        if not hasattr(self, "core"):
            return
        assert self.core.validate()[0] == []
        json.dumps(self.core.snapshot(self.now_ns), allow_nan=False)
        nodes = self.core.snapshot(self.now_ns)["nodes"]
        assert set(nodes) == set(self.nodes)
        assert all(
            node["queue_s"] >= 0 and node["committed_tokens"] >= 0 for node in nodes.values() if "queue_s" in node
        )

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for node_id in WORKERS:
            self.send(NodeReported(node_id))
        for name in sorted(self.seen):
            for attempt in range(4):
                self.send(RequestCompleted(name, attempt, "cancelled"))
        for copy in self.copies:
            self.send(CopyFinished(copy.source, copy.target, copy.match_key, 0, 0.1))
        left = self.core.validate()[1]
        assert {name: count for name, count in left.items() if count} == {}
        self.now_ns = self.latest_ns + 10_000 * NS
        self.send(Tick())
        assert len(self.log) == 0
        decided = sum(
            sum("considered" in one["decision"] or "type" in one["decision"] for one in record["attempts"])
            + record.get("attempts_left_out", 0)
            for record in self.over
        )
        assert decided >= len(self.asked)
        assert {record["request_id"] for record in self.over} == {name for name, _ in self.asked}
        assert all(record["outcome"] != "open" for record in self.over)


TestCore = Core.TestCase
TestCore.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
