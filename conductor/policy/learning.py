"""What is learned from measurements that nodes report, and which of these are refused."""

from collections import Counter
from dataclasses import replace
from math import isfinite

from conductor.policy.costs import DECODE, PREFILL
from conductor.policy.events import CostsGiven, DecodeSample, NodeReported, NodeView, PrefillSample, TransferSample
from conductor.policy.fitting import LONGEST_S
from conductor.policy.state import ClusterState

__all__ = ["learn", "mismatches"]

_MOST_TOKENS = 1 << 32
_MOST_BYTES = 1 << 50
_PATHS = frozenset({"push", "pull", "load", "fetch", "store", "copy", "ssd_read", "ssd_write"})


def learn(state: ClusterState, node: NodeView, event: NodeReported) -> NodeReported:
    """Take in the measurements of a joined node's report; returns it with those alone that can be true."""
    transfers = tuple([s for s in event.transfers if not _refused(state, node, _wrong_transfer(s), s)])
    for transfer in transfers:
        state.transfers.add(transfer)
    if node.role == "pool":
        return replace(event, prefills=(), decodes=(), transfers=transfers)
    costs, slot = state.costs_of(node.model), state.nodes.slot(node.node_id)
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
    """In words, how a node is not what the profile of its model was measured with."""
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
            f"node {node.node_id} reports measurements that cannot be true, first {sample}: they are refused and "
            "counted as moonpool:cost_samples_refused_total, and its work is predicted from what else is known"
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
    # Nothing moved may well have taken no time: it is not learned from.
    return _wrong_seconds(sample.seconds) if sample.nbytes else ""
