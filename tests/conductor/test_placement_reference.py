"""The compiled way to a place against a plain one, node by node and request by request, over random clusters."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from conductor.decision_log.codec import event_from_json, to_json
from conductor.policy import Conductor, PolicyConfig
from conductor.policy.costs import fetch_s, read_s
from conductor.policy.decisions import Place
from conductor.policy.events import (
    NS,
    DecodeSample,
    NodeJoined,
    NodeLost,
    NodeReported,
    NodeView,
    PoolMatch,
    PoolMatches,
    PrefillSample,
    Progress,
    RequestArrived,
    RequestCompleted,
    TransferSample,
)
from conductor.policy.placement.decode import peak_tokens, wait_for_room_s
from conductor.policy.requests import NONE

BLOCK = 16


class Plain:
    """Algorithm 1 and the decode choice in loops, on the state as the policy has it before the request."""

    def __init__(self, state, now_ns, request):
        self.state, self.now_ns, self.request = state, now_ns, request
        table = state.requests
        self.rows = [
            SimpleNamespace(**{name: int(table.column(name)[row]) for name in COLUMNS}) for row in range(len(table))
        ]
        self.need = peak_tokens(request.prompt_tokens, request.max_new_tokens, BLOCK)

    def candidates(self, *roles):
        total, prompt = self.request.prompt_tokens + self.request.max_new_tokens, self.request.prompt_tokens
        for node in self.state.nodes:
            pages = peak_tokens(prompt, 0, BLOCK) if node.role == "prefill" else self.need
            fits = node.capacity_tokens >= pages and node.max_model_len >= total
            if node.role in roles and fits and node.node_id not in self.request.excluded:
                yield node

    def slot(self, node_id):
        return self.state.nodes.slot(node_id)

    def committed(self, node):
        return sum(row.committed for row in self.rows if row.decode_node == self.slot(node.node_id))

    def queue_s(self, node):
        total = 0
        for row in self.rows:
            if row.prefill_node == self.slot(node.node_id):
                elapsed = 0 if row.started_ns == NONE else max(0, self.now_ns - row.started_ns)
                total += max(0, row.prefill_ns - elapsed)
        if node.role == "prefill":
            return total / NS
        missing = self.committed(node) + self.need - node.capacity_tokens
        everyone = self.state.nodes.model("m").all_prefill
        at = everyone.ids.index(node.node_id)
        costs = self.state.costs_of("m")
        wait_s = wait_for_room_s(everyone, at, self.state, costs, now_ns=self.now_ns, missing_tokens=missing)
        return max(total / NS, wait_s)

    def sends(self, pool):
        copies = sum(source == pool for source, _ in self.state.copies._under_way.values())
        return copies + sum(row.sender == self.slot(pool) for row in self.rows)

    def held(self):
        limit = (self.request.prompt_tokens - 1) // BLOCK
        for match in self.request.matches:
            if match.pool in self.request.excluded or self.slot(match.pool) == NONE or not min(match.blocks, limit):
                continue
            on_ssd = match.ssd_blocks if match.blocks <= limit else min(match.ssd_blocks, limit)
            yield match.pool, min(match.blocks, limit), on_ssd

    def prefill(self):
        """(TTFT, node, what it reuses, holders, what it has in its own memory) of the best."""
        costs, transfers, found = self.state.costs_of("m"), self.state.transfers, []
        held = {pool: (blocks, on_ssd) for pool, blocks, on_ssd in self.held()}
        best = min(held, key=lambda pool: (-held[pool][0], held[pool][1], self.sends(pool), pool), default="")
        most, most_ssd = held.get(best, (0, 0))
        limit, nbytes = (self.request.prompt_tokens - 1) // BLOCK, 1000.0 * BLOCK
        memory = {match.pool: min(match.blocks, limit) for match in self.request.in_workers}
        for node in self.candidates("prefill", "aggregated"):
            own, own_ssd = held.get(node.pool_node_id, (0, 0))
            local = memory.get(node.node_id, 0)
            have = max(own, local)
            fetches = most > max(local, self.state.config.balancing_threshold * have)

            def took_s(missing, slot, own=own, own_ssd=own_ssd, local=local, have=have):
                took = read_s(*transfers.of("load"), max(0, own - local) * nbytes, 0)
                took += read_s(*transfers.of("ssd_read"), (own_ssd + min(missing, most_ssd)) * nbytes, 0)
                over_network = read_s(*transfers.of("fetch"), missing * nbytes, self.sends(best))
                took += fetch_s(over_network, read_s(*transfers.of("load"), missing * nbytes, 0))
                reused = (have + missing) * BLOCK
                return took, costs.prefill_cost_s(self.request.prompt_tokens - reused, reused, slot)

            if fetches and transfers.is_calibrated("fetch"):
                fetches = sum(took_s(0, NONE)) >= sum(took_s(most - have, NONE))
            missing = most - have if fetches else 0
            transfer_s, prefill_s = took_s(missing, self.slot(node.node_id))
            took = transfer_s + self.queue_s(node) + prefill_s
            holders = [(node.pool_node_id, own, own_ssd)] * (own > 0)
            holders += [(best, most - own, min(most - own, most_ssd))] * fetches
            found.append((took, node.node_id, have + missing, holders, local))
        return min(found)

    def presence(self, row, at_ns, decode_ns, step_ns):
        """(how likely the row decodes at `at_ns`, tokens that it has added by then), as the mode sees it."""
        mode = self.state.config.admission_mode
        at_ns = self.now_ns if mode == "early" else at_ns
        since = max(row.ready_ns, self.now_ns) if row.joined_ns == NONE else row.joined_ns
        if since > at_ns:
            return float(mode == "predicted"), 0  # it is admitted, and comes later
        per_ns = 1.0 / step_ns
        grown = (at_ns - since) * per_ns
        if mode == "early":
            return float(row.joined_ns != NONE or row.prefill_ns == 0), min(grown, row.max_new)
        if mode == "predicted-uniform":
            gone = grown >= row.max_new if decode_ns is None else at_ns - since > decode_ns
            return float(not gone), min(grown, row.max_new)
        before = min(max(0, self.now_ns - since) * per_ns, row.max_new - 1.0)
        after = before + (at_ns - max(since, self.now_ns)) * per_ns
        if after >= row.max_new:
            return 0.0, row.max_new
        lengths = self.state.lengths
        alive, then = (lengths.survival(row.curve, row.generated + tokens) for tokens in (before, after))
        return then / alive, after

    def decode(self, at_ns, nodes):
        """(predicted TBT, node) of the choice."""
        costs, found = self.state.costs_of("m"), []
        decode_ns = None if costs.decode_time.mean_s is None else round(costs.decode_time.mean_s * NS)
        step_ns = max(1, round(costs.typical_step_s * NS))
        for node in nodes:
            batch, context = 0.0, 0.0
            for row in self.rows:
                if row.decode_node == self.slot(node.node_id):
                    share, grown = self.presence(row, at_ns, decode_ns, step_ns)
                    batch, context = batch + share, context + share * (row.prompt + grown)
            free = node.capacity_tokens - self.committed(node)
            batch, context = batch + 1, context + self.request.prompt_tokens
            seconds = costs.step_cost_s(batch, context, node.max_batch, self.slot(node.node_id))
            found.append((free >= self.need, seconds, free, node.node_id))
        roomy = [(seconds, node_id) for has_room, seconds, _, node_id in found if has_room]
        if roomy:
            return min(roomy)
        free = max(free for *_, free, _ in found)
        return next((seconds, node_id) for _, seconds, here, node_id in found if here == free)


COLUMNS = (
    *("prefill_node", "decode_node", "sender", "prefill_ns", "started_ns"),
    *("ready_ns", "joined_ns", "committed", "prompt", "max_new", "curve", "generated"),
)
MODES = ("predicted", "predicted-uniform", "early")


def cluster(rng, mode):
    """A conductor with a random cluster that has served for a while, and its pool nodes' ids."""
    threshold = float(rng.choice([1.0, 1.5, 3.0]))
    conductor = Conductor(
        PolicyConfig(
            attained_share=0.0,
            report_timeout_s=0.0,
            max_queue_s=1e9,
            balancing_threshold=threshold,
            admission_mode=mode,
        )
    )
    pools = [f"pool-{i}" for i in range(int(rng.integers(1, 12)))]
    roles = ["prefill", "decode", *rng.choice(["prefill", "decode", "aggregated"], int(rng.integers(1, 24)))]
    joined = [NodeView(pool, "pool", 1, "h") for pool in pools[: max(1, len(pools) - 2)]]
    for number, role in enumerate(roles):
        capacity, longest = int(rng.choice([2048, 4096, 1 << 16])), int(rng.choice([2500, 4096, 1 << 16]))
        pool = str(rng.choice(pools))
        name = f"n{int(rng.integers(100)):02}-{number}"
        joined.append(NodeView(name, str(role), 1, "h", pool, "m", BLOCK, capacity, longest, 4, 1000))
    for index in rng.permutation(len(joined)).tolist():
        conductor.on_event(0, NodeJoined(joined[index]))
    worker = next(node.node_id for node in joined if node.role != "pool")
    if rng.random() < 0.7:
        seconds = rng.uniform(1e-3, 1.0, 12).tolist()
        prefills = tuple(PrefillSample(100 * i + 9, 64 * i, s) for i, s in enumerate(seconds))
        decodes = tuple(DecodeSample(i + 1, 500 * i, s / 9) for i, s in enumerate(seconds))
        transfers = tuple(
            TransferSample(1 << 12 + i, s, p) for i, (s, p) in enumerate(zip(seconds, PATHS, strict=True))
        )
        conductor.on_event(0, NodeReported(worker, prefills=prefills, decodes=decodes, transfers=transfers * 6))
    return conductor, pools, [node.node_id for node in joined]


PATHS = ["load", "fetch", "ssd_read"] * 4


def arrival(rng, number, pools, node_ids):
    some = [pool for pool in pools if rng.random() < 0.7]
    matches = PoolMatches.of(*(PoolMatch(p, b := int(rng.integers(1, 130)), int(rng.integers(0, b + 1))) for p in some))
    own = PoolMatches.of(*(PoolMatch(n, int(rng.integers(1, 130))) for n in node_ids if rng.random() < 0.3))
    excluded = tuple(sorted({str(rng.choice(node_ids))} if rng.random() < 0.2 else ()))
    prompt, new = int(rng.integers(1, 2100)), int(rng.integers(1, 500))
    return RequestArrived(
        f"r{number}", 0, "f", "m", prompt, new, matches, number % 5, excluded=excluded, in_workers=own
    )


@pytest.mark.parametrize("seed", range(27))
def test_every_place_is_the_one_that_plain_loops_find(seed):
    rng = np.random.default_rng(seed)
    conductor, pools, node_ids = cluster(rng, MODES[seed % 3])
    now_ns, places = 0, 0
    for number in range(40):
        now_ns += int(rng.integers(0, 400_000_000))
        request = arrival(rng, number, pools, node_ids)
        if number % 3 == 0:  # as replayed from a log: of the matches, only those that are some
            request = event_from_json(json.loads(json.dumps(to_json(request))))
        conductor._state.lengths.curve_of(now_ns, "m", "", request.prompt_tokens)  # drawn as of now
        plain = Plain(conductor._state, now_ns, request)
        nodes = {node.node_id: node for node in conductor._state.nodes}
        prefills, decodes = list(plain.candidates("prefill", "aggregated")), list(plain.candidates("decode"))
        staffed = any(decodes) or request.max_new_tokens == 1 or any(n.role == "aggregated" for n in prefills)
        want = plain.prefill() if prefills and staffed and any(decodes) else None
        if want is not None:
            at_ns = now_ns + round(want[0] * NS)
            alone = nodes[want[1]].role == "aggregated"
            expected = plain.decode(at_ns, [nodes[want[1]]] if alone else decodes)
        decision = conductor.on_event(now_ns, request)[0]
        if want is None or not isinstance(decision, Place):
            continue
        places += 1
        _, prefill, reuse, holders, local = want
        assert (decision.prefill, decision.reuse_blocks, decision.local_blocks) == (prefill, reuse, local)
        assert [(h.pool, h.num_blocks, h.ssd_blocks) for h in decision.holders] == holders
        if alone or request.max_new_tokens > 1:
            assert (decision.predicted_tbt_s, decision.decode or prefill) == expected
        if decision.predicted_ttft_s != want[0]:  # the decode node has no room yet
            assert decision.predicted_ttft_s > want[0]
        for node_id, phase in ((decision.prefill, "prefill_started"), (decision.decode or prefill, "decode_joined")):
            if rng.random() < 0.4:
                progress = (Progress(request.request_id, 0, phase),)
                conductor.on_event(now_ns, NodeReported(node_id, progress=progress))
        if rng.random() < 0.3:
            generated = int(rng.integers(1, request.max_new_tokens + 1))
            conductor.on_event(now_ns, RequestCompleted(request.request_id, 0, "finished", 0.1, 0.01, generated))
        if number == 25 and len(node_ids) > 6:
            conductor.on_event(now_ns, NodeLost(node_ids[0], 1))
    assert places or len(node_ids) < 8
