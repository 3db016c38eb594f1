"""Conversion between protobuf messages and the policy's plain data. Stateless."""

from collections.abc import Callable, Mapping
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from conductor.directory.directory import Matches
from conductor.policy.decisions import Place, Reject
from conductor.policy.events import (
    NO_MATCHES,
    NO_QUEUE_KEY,
    DecodeSample,
    Held,
    KvSources,
    NodeReported,
    NodeView,
    Phase,
    PoolMatches,
    PrefillSample,
    Progress,
    QueueKey,
    RequestArrived,
    RequestCompleted,
    Role,
    SiblingMatch,
    SiblingPoint,
    TransferSample,
)
from moonpool_proto.v1 import common_pb2, conductor_pb2

__all__ = [
    "ROLES",
    "decision_fields",
    "node_ref",
    "node_view",
    "prefix_key",
    "rejection",
    "report",
    "request_arrived",
    "request_completed",
    "sibling_match",
    "write_placement",
]

_LONGEST_S = 86400.0
ROLES: Mapping[int, Role] = {
    common_pb2.ROLE_PREFILL: "prefill",
    common_pb2.ROLE_DECODE: "decode",
    common_pb2.ROLE_AGGREGATED: "aggregated",
    common_pb2.ROLE_POOL: "pool",
}
_PHASES: Mapping[int, Phase] = {
    conductor_pb2.PHASE_PREFILL_STARTED: "prefill_started",
    conductor_pb2.PHASE_PREFILL_ENDED: "prefill_ended",
    conductor_pb2.PHASE_DECODE_JOINED: "decode_joined",
    conductor_pb2.PHASE_ENDED: "ended",
}


def node_view(node: conductor_pb2.Node) -> NodeView:
    """Convert a node's description; its role must be one of ROLES."""
    return NodeView(
        node_id=node.node_id,
        role=ROLES[node.role],
        incarnation=node.incarnation,
        host_id=node.host_id,
        pool_node_id=node.pool_node_id,
        model=node.model,
        block_tokens=max(1, node.spec.block_tokens),
        capacity_tokens=node.capacity_tokens,
        max_model_len=node.max_model_len,
        max_batch=node.max_batch,
        kv_bytes_per_token=node.kv_bytes_per_token,
        model_fingerprint=node.model_fingerprint,
        hardware=node.hardware,
        chunk_tokens=node.prefill_chunk_tokens,
        window_blocks=node.window_blocks,
        window_bytes_per_token=node.window_bytes_per_token,
        preempts=node.preempts,
    )


def report(node_id: str, message: conductor_pb2.NodeReport) -> NodeReported:
    """Convert the report of a joined node; progress in unknown phases is left out."""
    return NodeReported(
        node_id,
        message.draining,
        tuple(map(_held, message.held)),
        tuple(Progress(p.request_id, p.attempt, _PHASES[p.phase]) for p in message.progress if p.phase in _PHASES),
        tuple(PrefillSample(s.new_tokens, s.reused_tokens, s.seconds) for s in message.prefills),
        tuple(DecodeSample(s.batch, s.context_tokens, s.seconds) for s in message.decodes),
        tuple(TransferSample(s.bytes, s.seconds, s.path) for s in message.transfers),
    )


def _held(held: conductor_pb2.Held) -> Held:
    return Held(
        held.request_id,
        held.attempt,
        held.committed_tokens,
        held.remaining_prefill_tokens,
        held.prompt_tokens,
        held.max_new_tokens,
        held.decode_node,
        _turn(held.turn) if held.HasField("turn") else NO_QUEUE_KEY,
    )


def _turn(turn: conductor_pb2.Turn) -> QueueKey:
    times = (_seconds(value) for value in (turn.waited_s, turn.due_in_s, turn.ages_in_s))
    return QueueKey(turn.level, turn.account, max(0, turn.start_ns), turn.priority, *times)


def _seconds(value: float) -> float:
    """Clamp a reported time to one day in the past or future, since a clock jump may cause any value."""
    return max(-_LONGEST_S, min(value, _LONGEST_S)) if isfinite(value) else 0.0


def prefix_key(kv_namespace: bytes, last_key: int) -> int:
    """Return the key of a prefix: its last block's key, combined with the namespace."""
    return last_key ^ int.from_bytes(kv_namespace[:8], "little")


def request_arrived(
    request: conductor_pb2.ScheduleRequest,
    kv_namespace: bytes,
    matches: Matches | None,
    keys: NDArray[np.uint64],
    replicas: Mapping[str, int],
    own: Matches | None = None,
    siblings: tuple[SiblingMatch, ...] = (),
) -> RequestArrived:
    """Convert a request to the policy's event.

    `matches`: leading blocks that pool nodes hold in `kv_namespace`; `keys`: uint64, one per full block; `replicas`:
    match_key by pool node that received blocks by a Copy; `own`: leading blocks in workers' own memory; `siblings`:
    those of other models that the model may reuse.
    """
    found, match_key, waited_s, hints = NO_MATCHES, 0, request.waited_s, request.hints
    if matches is not None and (longest := matches.longest):
        held = matches.held
        found = PoolMatches(matches.roster, held[0], held[1], replicas)
        match_key = prefix_key(kv_namespace, keys.item(longest - 1))
    in_workers = NO_MATCHES if own is None else PoolMatches(own.roster, own.held[0], own.held[1])
    return RequestArrived(
        request.request_id,
        request.attempt,
        request.frontend_id,
        request.model,
        request.prompt_tokens,
        request.max_new_tokens,
        found,
        match_key,
        request.generated,
        tuple(sorted(set(excluded))) if (excluded := request.exclude_nodes) else (),
        ttft_objective_s=request.ttft_objective_s,
        tbt_objective_s=request.tpot_objective_s,
        tenant=request.tenant,
        slo_class=request.slo_class,
        priority=request.priority,
        waited_s=waited_s if 0 <= waited_s <= _LONGEST_S else max(0.0, _seconds(waited_s)),
        endless=request.endless,
        prompt_key=prefix_key(kv_namespace, keys.item(-1)) if len(keys) else 0,
        allowed_classes=tuple(allowed) if (allowed := request.allowed_classes) else (),
        in_workers=in_workers,
        previous_tokens=request.previous_tokens,
        expected_tokens=hints.expected_output_tokens,
        session=request.session.id,
        parent_session=request.session.parent_id,
        pause_s=hints.pause_s,
        lifetime_s=hints.lifetime_s,
        window_tokens=request.window_tokens,
        siblings=siblings,
    )


def sibling_match(sibling: conductor_pb2.Sibling, match: Callable[[bytes], Matches]) -> SiblingMatch | None:
    """Return which leading blocks of a prompt another model's KV covers; None if no pool node has any.

    `match` returns the leading blocks that pool nodes hold in a namespace.
    """
    pool, blocks = _best(match(sibling.kv_namespace))
    if not blocks:
        return None
    points, holders = [], {b"": ("", 0)}  # points that begin with the same layer share their hidden states
    for point in sibling.points:
        if (namespace := point.input_namespace) not in holders:
            holders[namespace] = _best(match(namespace))
        if isfinite(point.cost) and isfinite(point.quality_loss):
            layers, cost = (point.first_layer, point.last_layer), min(max(0.0, point.cost), 1.0)
            points.append(
                SiblingPoint(*layers, cost, point.quality_loss, *holders[namespace], point.input_bytes_per_token)
            )
    return SiblingMatch(sibling.model_fingerprint, pool, blocks, tuple(points))


def _best(matches: Matches) -> tuple[str, int]:
    """Return the first of the pool nodes that hold the most blocks, and how many."""
    if not matches.longest:
        return "", 0
    index = int(matches.held[0].argmax())
    return matches.roster[index], int(matches.held[0][index])


def request_completed(request: conductor_pb2.CompleteRequest) -> RequestCompleted:
    """Convert the frontend's completion report."""
    return RequestCompleted(
        request.request_id,
        request.attempt,
        request.outcome,
        request.ttft_s,
        request.mean_tbt_s,
        request.generated,
        request.cached_tokens,
        request.slow_tbt_s,
        _kv_sources(request.kv) if request.HasField("kv") else None,
    )


def _kv_sources(message: conductor_pb2.KvSources) -> KvSources:
    return KvSources(
        message.cached_tokens,
        message.cached_dram_tokens,
        message.cached_ssd_tokens,
        message.cached_remote_tokens,
        message.recomputed_blocks,
        message.sibling_tokens,
    )


def write_placement(
    message: conductor_pb2.Placement,
    place: Place,
    nodes: Mapping[str, conductor_pb2.Node],
    refs: Mapping[str, conductor_pb2.NodeRef],
) -> None:
    """Fill an empty message. `nodes`: all joined nodes by id; `refs`: their public references by id."""
    # Fields are set in place, because assigning nested messages would copy them.
    prefill = place.prefill
    message.prefill.CopyFrom(refs[prefill])
    if (pool := refs.get(nodes[prefill].pool_node_id)) is not None:
        message.pool.CopyFrom(pool)
    if place.decode:
        message.decode.CopyFrom(refs[place.decode])
    message.reuse_blocks = place.reuse_blocks
    message.predicted_ttft_s = place.predicted_ttft_s
    message.predicted_tbt_s = place.predicted_tbt_s
    message.reserve_tokens = place.reserve_tokens
    for helper in place.helpers:
        message.helpers.append(refs[helper])
    for held in place.holders:
        holder = message.holders.add()
        holder.pool.CopyFrom(refs[held.pool])
        holder.first_block = held.first_block
        holder.num_blocks = held.num_blocks
        holder.ssd_blocks = held.ssd_blocks
    if (sibling := place.sibling) is not None:
        message.sibling.sender_fingerprint = sibling.sender
        message.sibling.first_layer, message.sibling.last_layer = sibling.first_layer, sibling.last_layer
        message.sibling.num_blocks = sibling.num_blocks
        message.sibling.kv.add(num_blocks=sibling.num_blocks).pool.CopyFrom(refs[sibling.pool])
        if sibling.input_pool:
            message.sibling.inputs.add(num_blocks=sibling.num_blocks).pool.CopyFrom(refs[sibling.input_pool])
    queue_key, turn = message.turn, place.turn
    queue_key.SetInParent()
    queue_key.level = turn.level
    queue_key.account = turn.account
    queue_key.start_ns = turn.start_ns
    queue_key.priority = turn.priority
    queue_key.waited_s = turn.waited_s
    queue_key.due_in_s = turn.due_in_s
    queue_key.ages_in_s = turn.ages_in_s


def rejection(reject: Reject) -> conductor_pb2.Rejection:
    """Convert a rejection."""
    return conductor_pb2.Rejection(
        reason=reject.reason,
        message=reject.message,
        retry_after_s=reject.retry_after_s,
        may_return=reject.may_return,
    )


def node_ref(node: conductor_pb2.Node) -> conductor_pb2.NodeRef:
    """Return the node's public reference: id, incarnation and target."""
    return conductor_pb2.NodeRef(node_id=node.node_id, incarnation=node.incarnation, target=node.target)


def decision_fields(reply: conductor_pb2.ScheduleReply) -> dict[str, str | int | float | bool]:
    """Return the fields of a decision for spans and logs."""
    if reply.WhichOneof("result") == "rejection":
        return {"rejected": reply.rejection.reason, "retry_after_s": reply.rejection.retry_after_s}
    placement = reply.placement
    return {
        "prefill_node": placement.prefill.node_id,
        "decode_node": placement.decode.node_id or placement.prefill.node_id,
        "reuse_blocks": placement.reuse_blocks,
        "predicted_ttft_s": placement.predicted_ttft_s,
        "predicted_tbt_s": placement.predicted_tbt_s,
    }
