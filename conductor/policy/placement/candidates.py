"""The nodes that can serve a request by role, size and exclusions; load is not considered."""

from dataclasses import dataclass

import numpy as np

from conductor.policy.decisions import Reject
from conductor.policy.events import NS, RequestArrived
from conductor.policy.nodes import Candidates, ModelNodes
from conductor.policy.placement.decode import peak_tokens
from conductor.policy.state import ClusterState
from jit.fast_dataclass import fast_dataclass

__all__ = ["FittingNodes", "find_candidates"]

_LONG_AGO_NS = 1 << 62


@fast_dataclass
@dataclass(frozen=True, slots=True)
class FittingNodes:
    """The nodes on which a request fits; candidates for decode only if a prefill candidate hands over."""

    prefill: Candidates
    decode: Candidates
    need_tokens: int  # capacity in pages that it may need on its decode node, in tokens


def find_candidates(now_ns: int, state: ClusterState, request: RequestArrived) -> FittingNodes | Reject:
    """Return the nodes that can serve the request, or the rejection with the reason why none can."""
    if not state.slo.knows(request.slo_class) and not request.generated:
        return _no_class(state, request)
    if request.allowed_classes and not request.generated and (refusal := _denied_class(state, request)) is not None:
        return refusal
    model = state.nodes.model(request.model)
    if model is None:
        return _unserved(now_ns, state, request)
    need = request.most_held(peak_tokens(request.prompt_tokens, request.max_new_tokens, model.block_tokens))
    excluded = request.excluded
    prefill, decode = model.prefill, model.decode
    if excluded:
        prefill, decode = prefill.without(excluded), decode.without(excluded)
    places = _fitting(request, model, need, prefill, decode)
    if places.prefill.ids:
        return places
    total = request.most_held(request.prompt_tokens + request.max_new_tokens)
    everyone = model.all_prefill, model.all_decode
    if len(_staffed(request, *everyone)) and not len(_fitting(request, model, need, *everyone).prefill):
        message = (
            f"the request needs {total} tokens ({request.prompt_tokens} prompt, {request.max_new_tokens} new); "
            f"no node of model {request.model!r} takes that many: {_limits(model)}"
        )
        return Reject(request.request_id, request.attempt, "too_long", message, 0.0)
    roles = f"{len(model.prefill)} prefill or aggregated and {len(model.decode)} decode nodes take new work"
    without = f", {', '.join(excluded)} excluded" if excluded else ""
    silent = [node_id for node_id in (*everyone[0].ids, *everyone[1].ids) if state.nodes.is_suspect(node_id)]
    hanging = f", {', '.join(silent)} silent" if silent else ""
    left_over = (candidates.without(excluded) for candidates in everyone)
    may_return = len(_fitting(request, model, need, *left_over).prefill) > 0 or _may_join(now_ns, state, request)
    return _no_nodes(request, f"no node can serve model {request.model!r} now: {roles}{without}{hanging}", may_return)


def _unserved(now_ns: int, state: ClusterState, request: RequestArrived) -> Reject:
    settling = _age_ns(now_ns, state) < state.config.settle_s * NS
    if settling or request.model in state.costs or not state.nodes.has_workers():
        may_return = _may_join(now_ns, state, request)
        return _no_nodes(request, f"no worker of model {request.model!r} has joined", may_return)
    message = f"model {request.model!r} is not served here"
    return Reject(request.request_id, request.attempt, "unknown_model", message, 0.0)


def _age_ns(now_ns: int, state: ClusterState) -> int:
    return now_ns - (state.started_ns if state.started_ns is not None else now_ns)


def _may_join(now_ns: int, state: ClusterState, request: RequestArrived) -> bool:
    """Return True if a worker of the model is likely to join soon: one left just now, or all have yet to find this
    conductor.
    """
    since_ns = min(_age_ns(now_ns, state), now_ns - state.lost_ns.get(request.model, -_LONG_AGO_NS))
    return not request.excluded and since_ns < state.config.return_s * NS


def _no_class(state: ClusterState, request: RequestArrived) -> Reject:
    known = ", ".join(sorted(state.slo.record.classes))
    there_are = f"there are {known}" if known else "none is defined here"
    message = f"there is no class {request.slo_class!r} of objectives: {there_are}"
    return Reject(request.request_id, request.attempt, "unknown_class", message, 0.0)


def _denied_class(state: ClusterState, request: RequestArrived) -> Reject | None:
    """Return the rejection of a request whose class, possibly by default, its tenant may not use."""
    effective = state.slo.resolve(request.model, request.tenant, request.slo_class).slo_class
    if not effective or effective in request.allowed_classes:
        return None
    how = "" if request.slo_class else " (the request names none, and this is its default)"
    message = (
        f"tenant {request.tenant!r} may not use the class {effective!r} of objectives{how}: name one of "
        f"{', '.join(request.allowed_classes)}"
    )
    return Reject(request.request_id, request.attempt, "denied_class", message, 0.0)


def _no_nodes(request: RequestArrived, message: str, may_return: bool = False) -> Reject:
    return Reject(request.request_id, request.attempt, "no_nodes", message, 1.0, may_return)


def _staffed(request: RequestArrived, prefill: Candidates, decode: Candidates) -> Candidates:
    """Return the prefill candidates that have a decode node to hand over to, or need none."""
    if decode.ids or request.max_new_tokens <= 1:
        return prefill
    return prefill.where(prefill.is_aggregated)


def _fitting(
    request: RequestArrived, model: ModelNodes, need: int, prefill: Candidates, decode: Candidates
) -> FittingNodes:
    total = request.most_held(request.prompt_tokens + request.max_new_tokens)
    if (
        prefill.floor_capacity >= need
        and decode.floor_capacity >= need
        and prefill.floor_len >= total
        and decode.floor_len >= total
    ):
        return FittingNodes(_staffed(request, prefill, decode), decode, need)
    decode = decode.where((decode.capacity_tokens >= need) & (decode.max_model_len >= total))
    prompt_pages = request.most_held(peak_tokens(request.prompt_tokens, 0, model.block_tokens))
    pages = np.where(prefill.is_aggregated, need, prompt_pages)
    prefill = prefill.where((prefill.capacity_tokens >= pages) & (prefill.max_model_len >= total))
    return FittingNodes(_staffed(request, prefill, decode), decode, need)


def _limits(model: ModelNodes) -> str:
    nodes = (
        *zip(model.all_prefill.ids, model.all_prefill.max_model_len, model.all_prefill.capacity_tokens, strict=True),
        *zip(model.all_decode.ids, model.all_decode.max_model_len, model.all_decode.capacity_tokens, strict=True),
    )
    longest = max(nodes, key=lambda node: min(node[1], node[2]))
    return f"{longest[0]} takes the most, with max_model_len {longest[1]} and {longest[2]} tokens of KV"
