"""Handling of nodes' reports, completions and node losses: progress of requests, measurements, and recovered claims.

Measurements are checked first; those that cannot be true are counted and not learned from.
"""

from collections import Counter
from dataclasses import replace
from math import isfinite
from typing import Final

import numpy as np

from conductor.policy.costs import DECODE, LONGEST_S, PREFILL
from conductor.policy.events import (
    NS,
    CostsGiven,
    DecodeSample,
    Held,
    NodeReported,
    NodeView,
    PrefillSample,
    Progress,
    RequestCompleted,
    TransferSample,
    to_ns,
)
from conductor.policy.placement.decode import peak_tokens
from conductor.policy.queue_position import record_prefill_start, restore_queue_key
from conductor.policy.requests import NONE, Claim
from conductor.policy.role_plan import answered, arrived_elsewhere
from conductor.policy.state import ClusterState, StateView

__all__ = [
    "complete",
    "learn",
    "lose_node",
    "mismatches",
    "report",
]

_MOST_TOKENS = 1 << 32
_MOST_BYTES = 1 << 50
_PATHS = frozenset({"push", "pull", "load", "fetch", "store", "copy", "ssd_read", "ssd_write"})


def learn(state: ClusterState, node: NodeView, event: NodeReported) -> NodeReported:
    """Learn from the measurements of a joined node's report; return the report without the rejected ones."""
    transfers = tuple([s for s in event.transfers if not _refused(state, node, _wrong_transfer(s), s)])
    for transfer in transfers:
        state.transfers.add(transfer)
    if node.role == "pool":
        return replace(event, prefills=(), decodes=(), transfers=transfers)
    costs = state.costs_of(node.model)
    slot = state.nodes.slot(node.node_id) if state.config.per_node_costs else NONE
    prefills = tuple([s for s in event.prefills if not _refused(state, node, _wrong_prefill(s, node), s)])
    for prefill in prefills:
        predicted_s = costs.prefill_cost_s(prefill.new_tokens, prefill.reused_tokens, slot)
        state.errors.add("prefill", node.model, node.node_id, predicted_s, prefill.seconds)
        costs.add_prefill(prefill, slot)
    decodes = tuple([s for s in event.decodes if not _refused(state, node, _wrong_step(s), s)])
    for step in decodes:
        predicted_s = costs.step_cost_s(step.batch, step.context_tokens, max(step.batch, 1), slot)
        state.errors.add("step", node.model, node.node_id, predicted_s, step.seconds)
        costs.add_decode(step, slot)
    model = state.nodes.model(node.model)
    assert model is not None
    if prefills:
        costs.recentre(PREFILL, model.all_prefill.slots)
    if decodes:
        costs.recentre(DECODE, model.all_slots)
    return replace(event, prefills=prefills, decodes=decodes, transfers=transfers)


def mismatches(given: CostsGiven, node: NodeView) -> list[str]:
    """Return messages for the differences between a node and the cost profile of its model; [] if it matches."""
    found = []
    if given.model_fingerprint and node.model_fingerprint and given.model_fingerprint != node.model_fingerprint:
        found.append(f"its weights are {node.model_fingerprint[:16]}, not {given.model_fingerprint[:16]}")
    if given.hardware and node.hardware and given.hardware != node.hardware:
        found.append(f"it runs on {node.hardware!r}, not on {given.hardware!r}")
    return found


def _refused(state: ClusterState, node: NodeView, wrong: str, sample: object) -> bool:
    if not wrong:
        return False
    counts = state.refused_samples.setdefault(node.node_id, Counter())
    if not counts:
        state.warnings.append(
            f"node {node.node_id} reports impossible measurements, first {sample}: they are rejected and counted in "
            "moonpool:cost_samples_refused_total; predictions for the node use its other measurements"
        )
    counts[wrong] += 1
    return True


def _wrong_seconds(seconds: float) -> str:
    if not isfinite(seconds):
        return "no_number"
    if seconds <= 0:
        return "no_time"
    return "too_long" if seconds >= LONGEST_S else ""


def _wrong_prefill(sample: PrefillSample, node: NodeView) -> str:
    if sample.new_tokens <= 0 or sample.reused_tokens < 0:
        return "no_work"
    if sample.new_tokens + sample.reused_tokens > (node.max_model_len or _MOST_TOKENS):
        return "too_much_work"
    return _wrong_seconds(sample.seconds)


def _wrong_step(sample: DecodeSample) -> str:
    if sample.batch <= 0 or sample.context_tokens < 0:
        return "no_work"
    if max(sample.batch, sample.context_tokens) > _MOST_TOKENS:
        return "too_much_work"
    return _wrong_seconds(sample.seconds)


def _wrong_transfer(sample: TransferSample) -> str:
    if sample.path not in _PATHS:
        return "unknown_path"
    if sample.nbytes < 0:
        return "no_work"
    if sample.nbytes > _MOST_BYTES:
        return "too_much_work"
    # An empty transfer may take no time; it is not learned from.
    return _wrong_seconds(sample.seconds) if sample.nbytes else ""


def report(now_ns: int, state: ClusterState, event: NodeReported) -> None:
    """Apply a report; one of a node that has not joined is ignored."""
    node = state.nodes.get(event.node_id)
    if node is None:
        return
    state.mark_alive(node.node_id, now_ns)
    state.nodes.set_draining(node.node_id, event.draining)
    event = learn(state, node, event)
    if node.role == "pool":
        return
    for progress in event.progress:
        _progress(now_ns, state, node, progress)
    over = {(p.request_id, p.attempt) for p in event.progress if p.phase == "ended"}
    held = [h for h in event.held if (h.request_id, h.attempt) not in over]
    for one in held:
        _note_held(now_ns, state, node, one)
    _release_unheld(now_ns, state, node, {(h.request_id, h.attempt) for h in held})
    if len(state.evaluation):
        state.evaluation.reported(now_ns, event, StateView(state))


def complete(now_ns: int, state: ClusterState, event: RequestCompleted) -> None:
    """Apply the frontend's completion of an attempt: end its claims and learn from its outcome.

    Claims end at once, even if workers still have to release the request.
    """
    row = state.requests.find(event.request_id, event.attempt)
    claim = state.retire(row, now_ns) if row is not None else None
    if claim is None:
        recent = state.recent.get(event.request_id)
        claim = recent.claim if recent is not None and recent.claim.attempt == event.attempt else None
    if claim is not None:
        if claim.is_completed:
            return
        claim.is_completed = True
    state.count(claim.model if claim is not None else "", f"completed_{event.outcome}")
    if claim is not None and claim.charge is not None:
        claim.charge.close(
            state.recent[event.request_id].at_ns,
            generated=event.generated,
            cached_tokens=event.cached_tokens if event.attempt == 0 else None,
            is_lost=event.outcome == "retry",
        )
    if claim is None or claim.is_revived:
        return
    state.history.completed(now_ns, event)
    if event.outcome != "retry":
        state.history.traffic.finished(
            claim.model,
            event.outcome,
            event.ttft_s,
            event.mean_tbt_s,
            prompt=_prompt_tokens(state, event.request_id),
            cached=event.cached_tokens,
            generated=event.generated,
        )
        # A cancelled answer counts as ended, since clients disconnect again. The length of one that failed or reached
        # its limit is only known to be at least what was generated.
        ended = event.outcome == "cancelled" or (event.outcome == "finished" and event.generated < claim.max_tokens)
        state.lengths.learn(now_ns, claim.curve, event.generated, ended=ended)
    if event.outcome == "failed":
        state.attainment.lost(claim.model, claim.tenant, claim.objectives, "failed")
    if event.outcome != "finished":
        return
    answered(now_ns, state, claim.model, event.generated)
    state.evaluation.completed(claim, event)
    state.attainment.finished(claim.model, claim.tenant, claim.objectives, event.ttft_s, event.mean_tbt_s)
    margins, objectives = state.tally_of(claim.model).margins, claim.objectives
    share = state.config.attained_share
    margins.tbt.learn(share, claim.predicted_tbt_s, event.slow_tbt_s or event.mean_tbt_s, objectives.tbt_s)
    if event.attempt == 0 and event.ttft_s > 0:
        margins.ttft.learn(share, claim.predicted_ttft_s, event.ttft_s, objectives.ttft_s)
        state.tally_of(claim.model).ttft_error.add(abs(claim.predicted_ttft_s - event.ttft_s))
        state.errors.add("ttft", claim.model, _if_there(state, claim.prefill), claim.predicted_ttft_s, event.ttft_s)
    if event.mean_tbt_s > 0 and claim.predicted_tbt_s > 0:
        state.tally_of(claim.model).tbt_error.add(abs(claim.predicted_tbt_s - event.mean_tbt_s))
        state.errors.add("tbt", claim.model, _if_there(state, claim.decode), claim.predicted_tbt_s, event.mean_tbt_s)


def _prompt_tokens(state: ClusterState, request_id: str) -> int:
    known = state.history.find(request_id)
    return known.prompt_tokens if known is not None else 0


def _if_there(state: ClusterState, node_id: str) -> str:
    return node_id if node_id in state.nodes else ""


def lose_node(now_ns: int, state: ClusterState, node: NodeView) -> None:
    """Remove a lost node and all claims on it.

    Its requests' claims on other nodes remain until those end. But if a prefill node is lost before the decode node has
    reported a request, the request will hardly get there; if it does, it returns with the report.
    """
    if node.model:
        state.lost_ns[node.model] = now_ns
    slot = state.nodes.slot(node.node_id)
    at_prefill, at_decode = (state.requests.column(name) for name in ("prefill_node", "decode_node"))
    for row in state.requests.rows_at(slot):
        prefilled_here = at_prefill[row] == slot
        if prefilled_here:
            at_prefill[row] = NONE
        if at_decode[row] == slot or (prefilled_here and not state.requests.claims[row].seen_decode):
            at_decode[row] = NONE
        if not _has_claim(state, row):
            # A worker that lost only its stream rejoins and still holds the request.
            state.retire(row, now_ns, may_return=True)
    state.requests.drop_sender(slot)
    state.copies.drop_pool(node.node_id)
    state.evaluation.drop_node(node.node_id)
    state.replication.drop_pool(node.node_id)
    state.forget_node(node.node_id)


_LAST: Final = 1 << 62  # begin of a prefill after all others


def _progress(now_ns: int, state: ClusterState, node: NodeView, progress: Progress) -> None:
    row = state.requests.find(progress.request_id, progress.attempt)
    slot = state.nodes.slot(node.node_id)
    if row is None:
        return
    requests = state.requests
    state.history.reached(now_ns, progress.request_id, progress.phase, node.node_id)
    prefills_here = requests.column("prefill_node")[row] == slot
    decodes_here = requests.column("decode_node")[row] == slot
    match progress.phase:
        case "prefill_started" if prefills_here:
            requests.column("started_ns")[row] = _LAST
            record_prefill_start(now_ns, state, row)
            _order_prefills(now_ns, state, slot, is_free=False)
            requests.column("sender")[row] = NONE
        case "prefill_ended" if prefills_here:
            requests.column("prefill_ns")[row] = 0
            requests.column("sender")[row] = NONE
            if decodes_here:
                # An aggregated node may report this only with its last token; then the prediction is more accurate.
                joined_ns = min(now_ns, int(requests.column("ready_ns")[row]))
                requests.column("ready_ns")[row] = requests.column("joined_ns")[row] = joined_ns
            else:
                requests.column("ready_ns")[row] = now_ns
            _order_prefills(now_ns, state, slot, is_free=True)
        case "decode_joined" if decodes_here:
            requests.column("joined_ns")[row] = now_ns
        case "ended":
            joined_ns = int(requests.column("joined_ns")[row])
            if decodes_here and joined_ns != NONE:
                state.costs_of(node.model).decode_time.add((now_ns - joined_ns) / NS)
            _release(now_ns, state, row, prefill=bool(prefills_here), decode=bool(decodes_here))


def _order_prefills(now_ns: int, state: ClusterState, slot: int, *, is_free: bool) -> None:
    """Update when the prefills that a node has started begin and end: it computes one after the other.

    A node reports a prefill as started when it is handed to the engine, where it may wait for others. `is_free`: the
    one that was being computed is over, so that the next one begins now.
    """
    requests = state.requests
    at, left_ns, begins_ns = (requests.column(name) for name in ("prefill_node", "prefill_ns", "started_ns"))
    rows = np.flatnonzero((at == slot) & (left_ns > 0) & (begins_ns != NONE))
    free_ns = now_ns
    for number, row in enumerate(rows[np.argsort(begins_ns[rows], kind="stable")].tolist()):
        if number or is_free or begins_ns[row] > now_ns:
            begins_ns[row] = free_ns
        ready_ns = int(begins_ns[row] + left_ns[row])
        requests.column("ready_ns")[row] = ready_ns
        free_ns = max(free_ns, ready_ns)


def _release(now_ns: int, state: ClusterState, row: int, *, prefill: bool, decode: bool) -> None:
    if prefill:
        slot, begins_ns = (state.requests.get(row, name) for name in ("prefill_node", "started_ns"))
        is_under_way = begins_ns != NONE and state.requests.get(row, "prefill_ns") > 0
        state.requests.column("prefill_node")[row] = NONE
        state.requests.column("sender")[row] = NONE
        if is_under_way:
            _order_prefills(now_ns, state, slot, is_free=begins_ns <= now_ns)
    claim = state.requests.claims[row]
    if decode or (prefill and claim.is_revived and not claim.seen_decode):
        state.requests.column("decode_node")[row] = NONE
    if _has_claim(state, row):
        return
    if claim.is_revived:
        # Not retired: another node's report of the same request may be under way.
        state.requests.remove(row)
    else:
        state.retire(row, now_ns)


def _has_claim(state: ClusterState, row: int) -> bool:
    requests = state.requests
    return bool(requests.column("prefill_node")[row] != NONE or requests.column("decode_node")[row] != NONE)


def _note_held(now_ns: int, state: ClusterState, node: NodeView, held: Held) -> None:
    row = state.requests.find(held.request_id)
    if row is None or state.requests.claims[row].is_revived or state.requests.claims[row].attempt < held.attempt:
        row = _revive(now_ns, state, node, held, row)
    if row is None or state.requests.claims[row].attempt != held.attempt:
        return
    claim, slot = state.requests.claims[row], state.nodes.slot(node.node_id)
    state.requests.column("seen_ns")[row] = now_ns
    claim.seen_prefill |= bool(state.requests.column("prefill_node")[row] == slot)
    decodes_here = bool(state.requests.column("decode_node")[row] == slot)
    claim.seen_decode |= decodes_here
    if decodes_here:
        # If less was reserved than the answer may need, follow what it actually uses.
        committed = state.requests.column("committed")
        committed[row] = max(committed[row], held.committed_tokens)


def _revive(now_ns: int, state: ClusterState, node: NodeView, held: Held, row: int | None) -> int | None:
    """Rebuild a claim, or a part of it, from a worker's report; return its row, None if the request is over.

    This conductor lacks the claim if another conductor placed the request, if it was restarted, or if it dropped the
    claim when the worker's stream broke.
    """
    recent = state.recent.get(held.request_id)
    lost = recent.claim if recent is not None and recent.may_return and not recent.claim.is_completed else None
    if lost is not None and lost.attempt != held.attempt:
        lost = None
    if recent is not None and recent.claim.attempt >= held.attempt and lost is None:
        return None  # over: the worker is releasing it
    requests, slot = state.requests, state.nodes.slot(node.node_id)
    if row is not None and requests.claims[row].attempt < held.attempt:
        state.retire(row, now_ns)
        row = None
    if row is None:
        claim = Claim(held.request_id, held.attempt, node.model, "", is_revived=True)
        if lost is not None:
            claim.charge = lost.charge
            del state.recent[held.request_id]
        prompt, max_new = held.prompt_tokens, held.max_new_tokens
        row = requests.add(
            claim, prefill_ns=0, ready_ns=now_ns, committed=0, prompt=prompt, max_new=max_new, seen_ns=now_ns
        )
        requests.column("placed_ns")[row] = now_ns
        requests.column("curve")[row] = state.lengths.curve_of(now_ns, node.model, "", prompt)
        requests.column("generated")[row] = 0
        state.counts["revived"] += 1
    elif requests.claims[row].attempt != held.attempt:
        return row
    # A decode node also prefills requests that are not handed over to it.
    prefills = node.role != "decode" or held.remaining_prefill_tokens > 0
    if prefills and requests.column("prefill_node")[row] == NONE:
        remaining, seen = held.remaining_prefill_tokens, held.prompt_tokens
        cost_s = state.costs_of(node.model).prefill_cost_s(remaining, max(0, seen - remaining), most_seen=seen)
        if remaining and not held.attempt and lost is None:
            state.seen_share.placed_elsewhere(now_ns)
            reserved = peak_tokens(held.prompt_tokens, held.max_new_tokens, node.block_tokens)
            arrived_elsewhere(now_ns, state, node.model, cost_s, held.prompt_tokens, reserved)
        requests.column("prefill_node")[row] = slot
        requests.column("prefill_ns")[row] = to_ns(cost_s)
        restore_queue_key(now_ns, state, row, held.turn)
        requests.column("ready_ns")[row] = now_ns + to_ns(cost_s)
        next_slot = state.nodes.slot(held.decode_node)
        if next_slot != NONE and requests.column("decode_node")[row] == NONE:
            # A provisional value, until the decode node's own report.
            requests.column("decode_node")[row] = next_slot
            requests.column("committed")[row] = peak_tokens(held.prompt_tokens, held.max_new_tokens, node.block_tokens)
    if node.role != "prefill" and (requests.column("decode_node")[row] == NONE or not requests.claims[row].seen_decode):
        requests.column("decode_node")[row] = slot
        requests.column("committed")[row] = held.committed_tokens
        requests.column("prompt")[row] = held.prompt_tokens or held.committed_tokens
    return row


def _release_unheld(now_ns: int, state: ClusterState, node: NodeView, held: set[tuple[str, int]]) -> None:
    """End the claims that the node no longer holds, even if the report of their end was lost."""
    slot = state.nodes.slot(node.node_id)
    for row in state.requests.rows_at(slot):
        claim = state.requests.claims[row]
        if (claim.request_id, claim.attempt) not in held:
            prefill = claim.seen_prefill and state.requests.column("prefill_node")[row] == slot
            decode = claim.seen_decode and state.requests.column("decode_node")[row] == slot
            if prefill or decode:
                _release(now_ns, state, row, prefill=bool(prefill), decode=bool(decode))
