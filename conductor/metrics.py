"""The policy's counters as metric samples: costs, prediction errors, admission (docs/admission.md), tenants' usage.

Frontends fetch the samples and export them; the help texts are in `telemetry.conductor`.
"""

from collections.abc import Iterator
from itertools import accumulate

from conductor.directory.feeds import sample
from conductor.policy import Conductor
from conductor.policy.events import CostsGiven, PathCosts
from conductor.policy.history import ERROR_BOUNDS
from moonpool_proto.v1 import conductor_pb2
from worker.policy.cost_profile import CostProfile

_BOUNDS = (*(str(bound) for bound in ERROR_BOUNDS), "+Inf")


def costs_given(model: str, profile: CostProfile) -> CostsGiven:
    """Convert a cost profile to the policy's event; transfer paths that the policy does not use are left out."""
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


def cost_samples(policy: Conductor) -> Iterator[conductor_pb2.Sample]:
    """Yield prediction errors (cumulative buckets), node slowdowns, rejected cost samples and extrapolations."""
    for errors in policy.errors:
        labels = {"what": errors.what, "model_name": errors.model, "node": errors.node_id}
        for bound, count in zip(_BOUNDS, accumulate(errors.counts), strict=True):
            yield sample("prediction_relative_error", count, **labels, le=bound)
    for node, prefill, decode in policy.slowdowns():
        labels = {"node": node.node_id, "model_name": node.model}
        if node.role != "decode":
            yield sample("node_slowdown", prefill, **labels, what="prefill")
        if node.role != "prefill":
            yield sample("node_slowdown", decode, **labels, what="step")
    for node_id, refused in sorted(policy.refused_samples.items()):
        for reason, count in sorted(refused.items()):
            yield sample("cost_samples_refused_total", count, node=node_id, reason=reason)
    for model, what, count in policy.extrapolations():
        yield sample("predictions_extrapolated_total", count, model_name=model, what=what)


def admission_samples(policy: Conductor) -> Iterator[conductor_pb2.Sample]:
    """Yield admission counters, desired nodes and loads per model.

    A counter is present from its first event on, a load if the model has an objective.
    """
    for model, reason, rejected, unwanted in policy.rejections():
        labels = {"model_name": model, "reason": reason}
        yield sample("admission_rejected_total", rejected, **labels)
        yield sample("admission_unwanted_total", unwanted, **labels)
    evaluation = policy.evaluation
    for (model, why, verdict), count in sorted(evaluation.rejections.items()):
        yield sample("admission_hindsight_total", count, model_name=model, reason=why, verdict=verdict)
    for (model, outcome), count in sorted(evaluation.admissions.items()):
        yield sample("admission_admitted_total", count, model_name=model, outcome=outcome)
    for model, decision, count in policy.colocated_outcomes():
        yield sample("undivided_total", count, model_name=model, outcome=decision)
    for model, role, count in policy.desired_nodes():
        yield sample("desired_nodes", count, model_name=model, role=role)
    for phase, swings in (("prefill", policy.loads.prefill), ("decode", policy.loads.decode)):
        for model, swing in sorted(swings.items()):
            yield sample("load", swing.last, model_name=model, phase=phase)
            yield sample("load_swing", swing.deviation, model_name=model, phase=phase)


def tenant_samples(policy: Conductor) -> Iterator[conductor_pb2.Sample]:
    """Yield usage per account. Tenants beyond the limit share one account, which bounds the number of labels."""
    for model, account, live in policy.tenants():
        labels, used = {"model_name": model, "tenant": account.name}, account.used
        yield sample("tenant_uncached_tokens_total", used.uncached_tokens, **labels)
        yield sample("tenant_cached_tokens_total", used.cached_tokens, **labels)
        yield sample("tenant_generated_tokens_total", used.generated_tokens, **labels)
        yield sample("tenant_kv_block_seconds_total", used.kv_block_s, **labels)
        yield sample("tenant_requests", live, **labels)
