"""What admission did and how right it was, as samples for the metrics (docs/admission.md). Nothing else lives here."""

from collections.abc import Iterator

from conductor.following import sample
from conductor.policy import Conductor
from moonpool_proto.v1 import conductor_pb2

__all__ = ["admission_samples"]


def admission_samples(policy: Conductor) -> Iterator[conductor_pb2.Sample]:
    """Of models that were served; a count appears with its first event, a load where there is an objective."""
    for model, reason, rejected, unwanted in policy.rejections():
        labels = {"model_name": model, "reason": reason}
        yield sample("admission_rejected_total", rejected, **labels)
        yield sample("admission_unwanted_total", unwanted, **labels)
    hindsight = policy.hindsight
    for (model, why, verdict), count in sorted(hindsight.rejections.items()):
        yield sample("admission_hindsight_total", count, model_name=model, reason=why, verdict=verdict)
    for (model, outcome), count in sorted(hindsight.admissions.items()):
        yield sample("admission_admitted_total", count, model_name=model, outcome=outcome)
    for model, came_of_it, count in policy.undivided():
        yield sample("undivided_total", count, model_name=model, outcome=came_of_it)
    for model, role, count in policy.desired_nodes():
        yield sample("desired_nodes", count, model_name=model, role=role)
    for phase, swings in (("prefill", policy.loads.prefill), ("decode", policy.loads.decode)):
        for model, swing in sorted(swings.items()):
            yield sample("load", swing.last, model_name=model, phase=phase)
            yield sample("load_swing", swing.deviation, model_name=model, phase=phase)
