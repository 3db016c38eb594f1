"""How often requests met their objectives, by model and class, and by tenant. Pure counting; no decision goes by it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from conductor.policy.objectives import EffectiveObjectives

__all__ = ["Attainment", "Result"]

Result = Literal["met", "missed", "rejected", "failed"]
_MAX_TENANTS = 32  # told apart beside those of the record; clients may be any number
_OTHERS = "other"


class Attainment:
    """Requests that had an objective, by what became of it. `all`: of all that a request had, at once."""

    def __init__(
        self, is_named: Callable[[str], bool], tell: Callable[[str, str, Mapping[str, Result]], None] | None = None
    ) -> None:
        """`is_named(tenant)`: the record names it, so that its numbers are wanted however many tenants there are.
        `tell(model, class, results)` hears of each request, too."""
        self._is_named = is_named
        self._tell = tell
        self._tenants: set[str] = set()
        self._by_class: Counter[tuple[str, str, str, Result]] = Counter()
        self._by_tenant: Counter[tuple[str, str, Result]] = Counter()

    def finished(
        self, model: str, tenant: str, objectives: EffectiveObjectives, ttft_s: float, mean_tbt_s: float
    ) -> None:
        """A request ended well; a mean of 0 is that of an answer of one token, which has no time between tokens."""
        results: dict[str, Result] = {}
        if objectives.ttft_s and ttft_s > 0:
            results["ttft"] = "met" if ttft_s <= objectives.ttft_s else "missed"
        if objectives.tbt_s and mean_tbt_s > 0:
            results["tbt"] = "met" if mean_tbt_s <= objectives.tbt_s else "missed"
        if results:
            self._count(model, tenant, objectives.slo_class, results, _all(results.values()))

    def lost(self, model: str, tenant: str, objectives: EffectiveObjectives, how: Result) -> None:
        """A request was rejected or failed, and met nothing."""
        results = {kind: how for kind, bound_s in (("ttft", objectives.ttft_s), ("tbt", objectives.tbt_s)) if bound_s}
        if results:
            self._count(model, tenant, objectives.slo_class, results, how)

    def by_class(self) -> Iterator[tuple[dict[str, str], int]]:
        """Labels and requests."""
        for (model, slo_class, objective, result), count in sorted(self._by_class.items()):
            yield {"model_name": model, "slo_class": slo_class, "objective": objective, "result": result}, count

    def by_tenant(self) -> Iterator[tuple[dict[str, str], int]]:
        """Labels and requests; tenants beyond the first few that the record does not name are one, `other`."""
        for (tenant, objective, result), count in sorted(self._by_tenant.items()):
            yield {"tenant": tenant, "objective": objective, "result": result}, count

    def _count(self, model: str, tenant: str, slo_class: str, results: dict[str, Result], whole: Result) -> None:
        label = self._label(tenant)
        results["all"] = whole
        if self._tell is not None:
            self._tell(model, slo_class, results)
        for objective, result in results.items():
            self._by_class[model, slo_class, objective, result] += 1
            self._by_tenant[label, objective, result] += 1

    def _label(self, tenant: str) -> str:
        if not tenant or self._is_named(tenant) or tenant in self._tenants:
            return tenant
        if len(self._tenants) >= _MAX_TENANTS:
            return _OTHERS
        self._tenants.add(tenant)
        return tenant


def _all(results: Iterable[Result]) -> Result:
    return "met" if all(result == "met" for result in results) else "missed"
