"""Feasibility of objectives by the predicted costs of an idle cluster: which no node can meet, and the longest prompt
for which one can.

Models without measured costs and without a cost profile are not examined.
"""

from collections.abc import Iterator, Mapping

from conductor.policy.costs import DECODE, PREFILL, ModelCosts, prefill_s, tbt_s
from conductor.policy.nodes import ModelNodes, NodeTable
from conductor.policy.objectives import Objective, SloClass, SloRecord, TenantSlo, objective_text

__all__ = ["longest_prompts", "unmeetable"]


def unmeetable(record: SloRecord, nodes: NodeTable, costs: Mapping[str, ModelCosts]) -> list[str]:
    """Return one message per objective in seconds that is below the minimum of all nodes of a served model."""
    found = []
    for model, at in _served(nodes, costs):
        for place, kind, objective in _absolute(record, model):
            least_s, what = _least(kind, costs[model], at)
            if objective.seconds < least_s:
                found.append(
                    f"{place} is {objective_text(objective)}, and no node of model {model!r} takes less than "
                    f"{least_s * 1e3:.3g} ms for {what}"
                )
    return found


def longest_prompts(record: SloRecord, nodes: NodeTable, costs: Mapping[str, ModelCosts]) -> list[str]:
    """Return one message per TTFT objective in seconds, with the longest prompt for which an idle node meets it."""
    found = []
    for model, at in _served(nodes, costs):
        factor = _least_slowdown(costs[model], PREFILL, at)
        most = int(at.all_prefill.max_model_len.max(initial=0))
        for place, kind, objective in _absolute(record, model):
            if kind == "ttft" and factor:
                longest = _longest_prompt(objective.seconds / factor, costs[model], most)
                found.append(
                    f"{place} is {objective_text(objective)}: an idle node of model {model!r} meets it for up to "
                    f"{longest} prompt tokens without reuse, of at most {most}"
                )
    return found


def _served(nodes: NodeTable, costs: Mapping[str, ModelCosts]) -> Iterator[tuple[str, ModelNodes]]:
    for model in sorted(costs):
        at = nodes.model(model)
        if at is not None:
            yield model, at


def _absolute(record: SloRecord, model: str) -> Iterator[tuple[str, str, Objective]]:
    """Yield (place in the record, kind, objective) of all objectives in seconds that may apply to the model."""
    others: dict[str, SloClass | TenantSlo] = {
        **{f"classes.{name}": one for name, one in sorted(record.classes.items())},
        **{f"tenants.{name}": one for name, one in sorted(record.tenants.items())},
    }
    for kind in ("ttft", "tbt"):
        own = getattr(record.models.get(model), kind, None)
        first = {f"models.{model}": own} if own is not None else {"cluster": getattr(record.cluster, kind)}
        for place, objective in (first | {place: getattr(one, kind) for place, one in others.items()}).items():
            if objective is not None and objective.seconds:
                yield f"{place}.{kind}", kind, objective


def _least(kind: str, costs: ModelCosts, at: ModelNodes) -> tuple[float, str]:
    """Return the minimum in seconds, and the work that it is for; 0 s while nothing was measured."""
    if kind == "ttft":
        return prefill_s(*costs.prefill, 1, 0) * _least_slowdown(costs, PREFILL, at), "even a prompt of one new token"
    return tbt_s(*costs.decode, 1, 1, 1) * _least_slowdown(costs, DECODE, at), "even a batch of one"


def _least_slowdown(costs: ModelCosts, kind: int, at: ModelNodes) -> float:
    """Return the smallest slowdown factor of the model's nodes; 0 while nothing was measured."""
    most, candidates = (costs.prefill_most, at.all_prefill) if kind == PREFILL else (costs.decode_most, at.all_decode)
    if not most[0]:
        return 0.0
    slots = candidates.slots if len(candidates) else at.all_prefill.slots
    return float(costs.slowdowns.factors[kind, slots].min(initial=1.0))


def _longest_prompt(seconds: float, costs: ModelCosts, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if prefill_s(*costs.prefill, middle, 0) <= seconds else (low, middle - 1)
    return low
