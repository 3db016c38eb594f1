"""What the policy knows of costs and of its predictions' errors, as numbers for the front doors' /metrics."""

from collections.abc import Iterator
from itertools import accumulate

from conductor.policy import Conductor
from conductor.policy.events import CostsGiven, PathCosts
from conductor.policy.history import ERROR_BOUNDS
from moonpool_proto.v1.conductor_pb2 import Sample
from worker.policy.cost_profile import CostProfile

__all__ = ["cost_samples", "costs_given"]

_BOUNDS = (*(str(bound) for bound in ERROR_BOUNDS), "+Inf")


def costs_given(model: str, profile: CostProfile) -> CostsGiven:
    """What the policy needs of a profile; paths that it does not plan with are left out."""
    prefill, decode = profile.prefill, profile.decode
    return CostsGiven(
        model=model,
        name=profile.name,
        model_fingerprint=profile.model_fingerprint,
        hardware=profile.hardware,
        prefill=(prefill.fixed_s, prefill.per_token_s, prefill.per_pair_s),
        decode=(decode.fixed_s, decode.per_sequence_s, decode.per_token_s),
        new_tokens=prefill.new_tokens.most,
        prompt_tokens=prefill.prompt_tokens.most,
        batch=decode.batch.most,
        context_tokens=decode.context_tokens.most,
        paths=tuple(
            PathCosts(path, cost.fixed_s, cost.per_byte_s, cost.nbytes.most)
            for path, cost in sorted(profile.transfers.items())
            if path in ("fetch", "load", "ssd_read")
        ),
    )


def cost_samples(policy: Conductor) -> Iterator[Sample]:
    """Errors as cumulative buckets per model, node and what was predicted; slow nodes; what was refused or guessed."""
    for errors in policy.errors:
        labels = {"what": errors.what, "model_name": errors.model, "node": errors.node_id}
        for bound, count in zip(_BOUNDS, accumulate(errors.counts), strict=True):
            yield Sample(name="prediction_relative_error", labels={**labels, "le": bound}, value=count)
    for node, prefill, decode in policy.slowdowns():
        labels = {"node": node.node_id, "model_name": node.model}
        if node.role != "decode":
            yield Sample(name="node_slowdown", labels={**labels, "what": "prefill"}, value=prefill)
        if node.role != "prefill":
            yield Sample(name="node_slowdown", labels={**labels, "what": "step"}, value=decode)
    for node_id, refused in sorted(policy.refused_samples.items()):
        for reason, count in sorted(refused.items()):
            yield Sample(name="cost_samples_refused_total", labels={"node": node_id, "reason": reason}, value=count)
    for model, what, count in policy.extrapolations():
        labels = {"model_name": model, "what": what}
        yield Sample(name="predictions_extrapolated_total", labels=labels, value=count)
