"""The record of objectives as plain data, and which of them a request has. How a record is written: `record_form`.

An objective is a bound on a request's TTFT (time to first token) or TBT (time between tokens): seconds, or a multiple
of what the request would take in an idle cluster ("P90 at most k x unloaded", the rule of the Mooncake paper).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "NOTHING_TO_MEET",
    "NO_OBJECTIVE",
    "EffectiveObjectives",
    "HeaderRule",
    "Objective",
    "ObjectiveBook",
    "Resolved",
    "Scope",
    "SloClass",
    "SloRecord",
    "Source",
    "TenantSlo",
    "record_of_seconds",
]

HeaderRule = Literal["any", "tighten", "ignore"]  # what a request's own header may do to its bound
Source = Literal["header", "tenant", "class", "model", "cluster", "none"]
DEFAULT_PERCENTILE = 90.0
_MAX_RESOLVED = 4096  # tenants and classes are named by clients


@dataclass(frozen=True, slots=True)
class Objective:
    """At most `seconds`, or `times` the unloaded value; one of them is 0, and both are where it is off.

    `percentile`: of the requests that it holds for, so many in a hundred are to meet it.
    """

    seconds: float = 0.0
    times: float = 0.0
    percentile: float = DEFAULT_PERCENTILE

    @property
    def is_off(self) -> bool:
        """Whether it bounds nothing."""
        return not (self.seconds or self.times)

    def bound_s(self, unloaded_s: float) -> float:
        """The bound in seconds; 0 = none."""
        return self.times * unloaded_s if self.times else self.seconds


NO_OBJECTIVE = Objective()


@dataclass(frozen=True, slots=True)
class Scope:
    """The objectives of a model, or of the cluster; None: nothing is said here, and the next scope decides."""

    ttft: Objective | None = None
    tbt: Objective | None = None


@dataclass(frozen=True, slots=True)
class SloClass:
    """A class of requests. Those of the lowest `priority` go first, whatever their own priorities are."""

    ttft: Objective | None = None
    tbt: Objective | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TenantSlo:
    """What one tenant has of its own. `slo_class`: of requests that name none; `headers` None: the record's rule.

    `weight`: its share of the cluster beside other tenants' (`fairness`), that of one of whom nothing is said being 1.
    """

    ttft: Objective | None = None
    tbt: Objective | None = None
    slo_class: str = ""
    headers: HeaderRule | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SloRecord:
    """All objectives of a cluster."""

    cluster: Scope = Scope()
    models: Mapping[str, Scope] = field(default_factory=dict)
    classes: Mapping[str, SloClass] = field(default_factory=dict)
    tenants: Mapping[str, TenantSlo] = field(default_factory=dict)
    default_class: str = ""  # of requests that name none and whose tenant has none
    headers: HeaderRule = "any"


def record_of_seconds(
    cluster: tuple[float | None, float | None], models: Mapping[str, tuple[float | None, float | None]]
) -> SloRecord:
    """A record of (TTFT, TBT) in seconds; 0 = off, so that for a model the cluster's does not hold either."""
    return SloRecord(_scope_of_seconds(*cluster), {model: _scope_of_seconds(*own) for model, own in models.items() if own != (None, None)})


def _scope_of_seconds(*bounds_s: float | None) -> Scope:
    return Scope(*(None if bound_s is None else Objective(bound_s) for bound_s in bounds_s))


@dataclass(frozen=True, slots=True)
class EffectiveObjectives:
    """A request's bounds in seconds, 0 = none, and which part of the record (or the header) each comes from."""

    ttft_s: float
    tbt_s: float
    ttft_from: Source
    tbt_from: Source
    ttft_percentile: float = DEFAULT_PERCENTILE
    tbt_percentile: float = DEFAULT_PERCENTILE
    slo_class: str = ""


NOTHING_TO_MEET = EffectiveObjectives(0.0, 0.0, "none", "none")


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a model, a tenant and a class come to, before the request's own headers."""

    ttft: Objective
    tbt: Objective
    ttft_from: Source
    tbt_from: Source
    slo_class: str  # "" = of no class
    priority: int  # its class's
    headers: HeaderRule
    _usual: EffectiveObjectives | None = field(init=False)  # without headers, if no unloaded value plays a part

    def __post_init__(self) -> None:
        object.__setattr__(self, "_usual", None)
        if not (self.ttft.times or self.tbt.times):
            object.__setattr__(self, "_usual", self.effective(0.0, 0.0, 0.0, 0.0))

    def effective(
        self, header_ttft_s: float, header_tbt_s: float, unloaded_ttft_s: float, unloaded_tbt_s: float
    ) -> EffectiveObjectives:
        """With the request's headers (0 = none) and its predicted values in an idle cluster, all in seconds."""
        if self._usual is not None and not header_ttft_s and not header_tbt_s:
            return self._usual
        ttft_s, ttft_from = self._with_header(header_ttft_s, self.ttft.bound_s(unloaded_ttft_s), self.ttft_from)
        tbt_s, tbt_from = self._with_header(header_tbt_s, self.tbt.bound_s(unloaded_tbt_s), self.tbt_from)
        percentiles = self.ttft.percentile, self.tbt.percentile
        return EffectiveObjectives(ttft_s, tbt_s, ttft_from, tbt_from, *percentiles, self.slo_class)

    def _with_header(self, header_s: float, bound_s: float, source: Source) -> tuple[float, Source]:
        if not header_s or self.headers == "ignore":
            return bound_s, source
        if self.headers == "tighten" and 0 < bound_s <= header_s:
            return bound_s, source
        return header_s, "header"


class ObjectiveBook:
    """The record in force, and what it comes to for each model, tenant and class that was asked about."""

    def __init__(self, record: SloRecord, version: int = 0) -> None:
        self.record = record
        self.version = version
        self._resolved: dict[tuple[str, str, str], Resolved] = {}

    def knows(self, slo_class: str) -> bool:
        """Whether a request may name the class."""
        return not slo_class or slo_class in self.record.classes

    def weight_of(self, tenant: str) -> float | None:
        """The tenant's weight; None where the record does not name it."""
        own = self.record.tenants.get(tenant)
        return None if own is None else own.weight

    def resolve(self, model: str, tenant: str, slo_class: str) -> Resolved:
        """Tenant before class before model before cluster. A class that is gone counts as none being named."""
        key = model, tenant, slo_class
        found = self._resolved.get(key)
        if found is None:
            if len(self._resolved) >= _MAX_RESOLVED:
                self._resolved.clear()
            found = self._resolved[key] = _resolve(self.record, *key)
        return found


def _resolve(record: SloRecord, model: str, tenant: str, slo_class: str) -> Resolved:
    own = record.tenants.get(tenant, TenantSlo())
    name = slo_class if slo_class in record.classes else own.slo_class or record.default_class
    of_class = record.classes.get(name, SloClass())
    of_model = record.models.get(model, Scope())
    scopes: tuple[tuple[Source, TenantSlo | SloClass | Scope], ...] = (
        ("tenant", own),
        ("class", of_class),
        ("model", of_model),
        ("cluster", record.cluster),
    )
    ttft, ttft_from = _first((source, scope.ttft) for source, scope in scopes)
    tbt, tbt_from = _first((source, scope.tbt) for source, scope in scopes)
    return Resolved(ttft, tbt, ttft_from, tbt_from, name, of_class.priority, own.headers or record.headers)


def _first(said: Iterable[tuple[Source, Objective | None]]) -> tuple[Objective, Source]:
    for source, objective in said:
        if objective is not None:
            return objective, source
    return NO_OBJECTIVE, "none"
