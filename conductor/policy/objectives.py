"""Service level objectives: the record of a cluster's objectives, its textual form, and the objectives of a request.

An objective bounds a request's TTFT (time to first token) or TBT (time between tokens), either in seconds or as a
multiple of the value in an idle cluster ("P90 at most k x unloaded", the rule of the Mooncake paper). It is written as
"2s", "300ms", "5x" (times the unloaded value) or "off", optionally with a percentile: "5x p95". Converting a record to
text and back is exact.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast, get_args

from conductor.errors import ObjectivesError
from settings.conductor import PolicyConfig

__all__ = [
    "DEFAULT_HEADERS",
    "NOTHING_TO_MEET",
    "NO_OBJECTIVE",
    "EffectiveObjectives",
    "HeaderRule",
    "Objective",
    "ObjectiveBook",
    "ResolvedObjectives",
    "Scope",
    "SloClass",
    "SloRecord",
    "Source",
    "TenantSlo",
    "configured_record",
    "digest",
    "objective_text",
    "parse_record",
    "record_from_text",
    "record_text",
    "record_to_plain",
]

HeaderRule = Literal["any", "tighten", "ignore"]  # how a request's header may change its bound
# Clients must not relax their own admission. The rule of a record that names none; it is not part of the record's text.
DEFAULT_HEADERS: HeaderRule = "tighten"
Source = Literal["header", "tenant", "class", "model", "cluster", "none"]
DEFAULT_PERCENTILE = 90.0
_MAX_RESOLVED = 4096  # cache entries; bounded, since clients can name any number of tenants and classes


@dataclass(frozen=True, slots=True)
class Objective:
    """Bound of at most `seconds`, or of `times` the unloaded value. One of them is 0; if both are, it is off.

    `percentile` is the percentage of requests that should meet it.
    """

    seconds: float = 0.0
    times: float = 0.0
    percentile: float = DEFAULT_PERCENTILE

    @property
    def is_off(self) -> bool:
        """True if it bounds nothing."""
        return not (self.seconds or self.times)

    def bound_s(self, unloaded_s: float) -> float:
        """Return the bound in seconds; 0 if the objective is off."""
        return self.times * unloaded_s if self.times else self.seconds


NO_OBJECTIVE = Objective()


@dataclass(frozen=True, slots=True)
class Scope:
    """Objectives of a model, or of the cluster; None: not specified here, so the next scope applies."""

    ttft: Objective | None = None
    tbt: Objective | None = None


@dataclass(frozen=True, slots=True)
class SloClass:
    """Class of requests. Classes with a lower `priority` go first, regardless of their requests' own priorities."""

    ttft: Objective | None = None
    tbt: Objective | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TenantSlo:
    """Settings of one tenant. `slo_class` applies to requests without a class; `headers` None: the record's rule."""

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
    default_class: str = ""  # class of requests without one whose tenant has none either
    headers: HeaderRule | None = None  # None: DEFAULT_HEADERS


def configured_record(config: PolicyConfig) -> SloRecord:
    """Return the record of the configured objectives, which is in force until an ObjectivesChanged event."""
    models = {
        model: Scope(_configured(own.ttft_s), _configured(own.tbt_s))
        for model, own in config.model_objectives.items()
        if (own.ttft_s, own.tbt_s) != (None, None)
    }
    return SloRecord(Scope(_configured(config.ttft_slo_s or None), _configured(config.tbt_slo_s or None)), models)


def _configured(bound_s: float | None) -> Objective | None:
    """Return the objective of a setting: 0 turns it off; None leaves it to the next scope."""
    return None if bound_s is None else Objective(bound_s)


@dataclass(frozen=True, slots=True)
class EffectiveObjectives:
    """Bounds of one request in seconds (0: none), and the part of the record, or the header, that each comes from."""

    ttft_s: float
    tbt_s: float
    ttft_from: Source
    tbt_from: Source
    ttft_percentile: float = DEFAULT_PERCENTILE
    tbt_percentile: float = DEFAULT_PERCENTILE
    slo_class: str = ""


NOTHING_TO_MEET = EffectiveObjectives(0.0, 0.0, "none", "none")


@dataclass(frozen=True, slots=True)
class ResolvedObjectives:
    """Objectives of a model, tenant and class, before the request's own headers are applied."""

    ttft: Objective
    tbt: Objective
    ttft_from: Source
    tbt_from: Source
    slo_class: str  # "": none
    priority: int  # of the class
    headers: HeaderRule
    _usual: EffectiveObjectives | None = field(init=False)  # result without headers, unless it needs unloaded values

    def __post_init__(self) -> None:
        object.__setattr__(self, "_usual", None)
        if not (self.ttft.times or self.tbt.times):
            object.__setattr__(self, "_usual", self.effective(0.0, 0.0, 0.0, 0.0))

    def effective(
        self, header_ttft_s: float, header_tbt_s: float, unloaded_ttft_s: float, unloaded_tbt_s: float
    ) -> EffectiveObjectives:
        """Apply the request's headers (0: none) and its predicted values in an idle cluster, all in seconds."""
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
    """The record in force, with a cache of its resolution by model, tenant and class.

    `default_headers`: the rule of a record that names none.
    """

    def __init__(self, record: SloRecord, version: int = 0, default_headers: HeaderRule = DEFAULT_HEADERS) -> None:
        self.record = record
        self.version = version
        self._default_headers = default_headers
        self._resolved: dict[tuple[str, str, str], ResolvedObjectives] = {}

    def knows(self, slo_class: str) -> bool:
        """Return True if a request may name the class."""
        return not slo_class or slo_class in self.record.classes

    def weight_of(self, tenant: str) -> float | None:
        """Return the tenant's weight; None if the record does not name the tenant."""
        own = self.record.tenants.get(tenant)
        return None if own is None else own.weight

    def resolve(self, model: str, tenant: str, slo_class: str) -> ResolvedObjectives:
        """Return the objectives that apply: the tenant's before the class's, the model's and the cluster's.

        A class that the record does not contain counts as none.
        """
        key = model, tenant, slo_class
        found = self._resolved.get(key)
        if found is None:
            if len(self._resolved) >= _MAX_RESOLVED:
                self._resolved.clear()
            found = self._resolved[key] = _resolve(self.record, self._default_headers, *key)
        return found


def _resolve(
    record: SloRecord, default_headers: HeaderRule, model: str, tenant: str, slo_class: str
) -> ResolvedObjectives:
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
    headers = own.headers or record.headers or default_headers
    return ResolvedObjectives(ttft, tbt, ttft_from, tbt_from, name, of_class.priority, headers)


def _first(specified: Iterable[tuple[Source, Objective | None]]) -> tuple[Objective, Source]:
    for source, objective in specified:
        if objective is not None:
            return objective, source
    return NO_OBJECTIVE, "none"


T = TypeVar("T")
_LARGEST_S = {"ttft": 86400.0, "tbt": 3600.0}
_LEAST_S = 1e-6
_LARGEST_TIMES = 1000.0
_LARGEST_NUMBER = 1e9
_LARGEST_PRIORITY = 1000
_LEAST_WEIGHT, _LARGEST_WEIGHT = 0.01, 100.0
_MOST = {"classes": 64, "models": 256, "tenants": 1000}
_AT = r"(\s+p(?P<percentile>\d{1,2}(\.\d{1,4})?))?"
_OBJECTIVE = re.compile(r"(?P<number>\d{1,9}(\.\d{1,9})?)\s*(?P<unit>ms|s|x|)" + _AT)
_OFF = re.compile("off" + _AT)
_CLASS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NAME = re.compile(r"[^\s\x00-\x1f]{1,256}")
_RULES = get_args(HeaderRule)


def parse_record(value: Any) -> SloRecord:
    """Return the record that a mapping, such as the content of a YAML file, describes; None is an empty record.

    Raises ObjectivesError, which names the place in the record and the expected value.
    """
    fields = _mapping({} if value is None else value, "the record", ("cluster", "models", "classes", "tenants"), _REST)
    record = SloRecord(
        cluster=_scope(fields.get("cluster"), "cluster"),
        models=_named(fields, "models", _NAME, _scope),
        classes=_named(fields, "classes", _CLASS_NAME, _slo_class),
        tenants=_named(fields, "tenants", _NAME, _tenant),
        default_class=_text(fields.get("default_class", ""), "default_class"),
        headers=_rule(fields["headers"], "headers") if fields.get("headers") is not None else None,
    )
    wanted = {"default_class": record.default_class}
    wanted |= {f"tenants.{name}.class": tenant.slo_class for name, tenant in record.tenants.items()}
    for where, name in wanted.items():
        if name and name not in record.classes:
            known = ", ".join(sorted(record.classes)) or "none"
            raise ObjectivesError(f"{where} is {name!r}, which is not a class of the record; its classes are: {known}")
    return record


def record_to_plain(record: SloRecord) -> dict[str, Any]:
    """Return the record as a plain mapping for YAML or JSON, which `parse_record` converts back."""
    plain: dict[str, Any] = {}
    if cluster := _scope_to_plain(record.cluster):
        plain["cluster"] = cluster
    if record.models:
        plain["models"] = {name: _scope_to_plain(scope) for name, scope in sorted(record.models.items())}
    if record.classes:
        plain["classes"] = {
            name: _scope_to_plain(one) | ({"priority": one.priority} if one.priority else {})
            for name, one in sorted(record.classes.items())
        }
    if record.tenants:
        plain["tenants"] = {
            name: _scope_to_plain(one)
            | ({"class": one.slo_class} if one.slo_class else {})
            | ({"headers": one.headers} if one.headers else {})
            | ({"weight": one.weight} if one.weight != 1 else {})
            for name, one in sorted(record.tenants.items())
        }
    if record.default_class:
        plain["default_class"] = record.default_class
    if record.headers is not None:
        plain["headers"] = record.headers
    return plain


def record_text(record: SloRecord) -> str:
    """Return the canonical JSON text of a record: equal records have equal texts."""
    return json.dumps(record_to_plain(record), sort_keys=True, separators=(",", ":"))


def record_from_text(text: str) -> SloRecord:
    """Parse the text of `record_text`, or any JSON that `parse_record` accepts. Raises ObjectivesError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ObjectivesError(f"the record is not valid JSON: {error}") from error
    return parse_record(value)


def digest(text: str) -> str:
    """Return 16 hex digits that identify a record's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_REST = ("default_class", "headers")


def _mapping(value: Any, where: str, *known: tuple[str, ...]) -> Mapping[str, Any]:
    keys = [key for part in known for key in part]
    if not isinstance(value, Mapping):
        raise ObjectivesError(f"{where} is {_shown(value)}: expected a mapping with any of {', '.join(keys)}")
    unknown = [key for key in value if key not in keys]
    if unknown:
        raise ObjectivesError(f"{where} has the unknown key {_shown(unknown[0])}; it may have {', '.join(keys)}")
    return value


def _named(fields: Mapping[str, Any], key: str, names: re.Pattern[str], parse: Callable[[Any, str], T]) -> dict[str, T]:
    value = fields.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ObjectivesError(f"{key} is {_shown(value)}: expected a mapping with names as keys")
    if len(value) > _MOST[key]:
        raise ObjectivesError(f"{key} has {len(value)} entries: at most {_MOST[key]} are allowed")
    for name in value:
        if not isinstance(name, str) or not names.fullmatch(name):
            quoted = "; YAML takes digits alone for a number: quote it" if isinstance(name, int) else ""
            raise ObjectivesError(f"{key}: {_shown(name)} cannot be a name{quoted}")
    return {name: parse(one, f"{key}.{name}") for name, one in value.items()}


def _scope(value: Any, where: str) -> Scope:
    fields = _mapping({} if value is None else value, where, _KINDS)
    return Scope(**_objectives(fields, where))


def _slo_class(value: Any, where: str) -> SloClass:
    fields = _mapping({} if value is None else value, where, _KINDS, ("priority",))
    priority = fields.get("priority", 0)
    if type(priority) is not int or not abs(priority) <= _LARGEST_PRIORITY:
        raise ObjectivesError(
            f"{where}.priority is {_shown(priority)}: expected an integer from -{_LARGEST_PRIORITY} to "
            f"{_LARGEST_PRIORITY}; the lowest goes first"
        )
    return SloClass(**_objectives(fields, where), priority=priority)


def _tenant(value: Any, where: str) -> TenantSlo:
    fields = _mapping({} if value is None else value, where, _KINDS, ("class", "headers", "weight"))
    return TenantSlo(
        **_objectives(fields, where),
        slo_class=_text(fields.get("class", ""), f"{where}.class"),
        headers=_rule(fields["headers"], f"{where}.headers") if fields.get("headers") is not None else None,
        weight=_weight(fields.get("weight", 1), f"{where}.weight"),
    )


_KINDS = ("ttft", "tbt")


def _objectives(fields: Mapping[str, Any], where: str) -> dict[str, Objective | None]:
    return {kind: _objective(fields.get(kind), kind, f"{where}.{kind}") for kind in _KINDS}


def _objective(value: Any, kind: str, where: str) -> Objective | None:
    if value is None:
        return None
    if value is False:  # YAML reads `off` as false
        return Objective()
    text = _number_text(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str):
        raise _no_objective(value, where)
    if off := _OFF.fullmatch(text.strip()):
        return Objective(percentile=_percentile(off["percentile"], where))
    found = _OBJECTIVE.fullmatch(text.strip())
    if found is None:
        raise _no_objective(value, where)
    percentile = _percentile(found["percentile"], where)
    number = float(found["number"])
    if found["unit"] == "x":
        if not 1 <= number <= _LARGEST_TIMES:
            raise ObjectivesError(
                f"{where} is {_shown(value)}: expected 1x to {_LARGEST_TIMES:g}x; no request is faster than unloaded"
            )
        return Objective(times=number, percentile=percentile)
    seconds = round(number / 1000 if found["unit"] == "ms" else number, 9)
    if seconds == 0:
        return Objective(percentile=percentile)
    if not _LEAST_S <= seconds <= _LARGEST_S[kind]:
        raise ObjectivesError(
            f"{where} is {_shown(value)}: expected {_LEAST_S * 1e6:g} microsecond to {_LARGEST_S[kind]:g} s"
        )
    return Objective(seconds=seconds, percentile=percentile)


def _number_text(value: float) -> str:
    """Return the text of a bare number, which means seconds, as on the command line."""
    return f"{value:.9f}" if 0 <= value < _LARGEST_NUMBER else str(value)


def _no_objective(value: Any, where: str) -> ObjectivesError:
    return ObjectivesError(
        f"{where} is {_shown(value)}: expected a time such as 2s or 300ms, a multiple of the unloaded value such as "
        '5x, or off; a percentile may follow, as in "5x p95"'
    )


def _percentile(text: str | None, where: str) -> float:
    value = DEFAULT_PERCENTILE if text is None else float(text)
    if not 1 <= value < 100:
        raise ObjectivesError(f"{where} has the percentile p{text}: expected p1 to p99.99")
    return value


def _rule(value: Any, where: str) -> HeaderRule:
    if value not in _RULES:
        raise ObjectivesError(f"{where} is {_shown(value)}: expected one of {', '.join(_RULES)}")
    return cast("HeaderRule", value)


def _weight(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST_WEIGHT <= value <= _LARGEST_WEIGHT:
        raise ObjectivesError(
            f"{where} is {_shown(value)}: expected a number from {_LEAST_WEIGHT:g} to {_LARGEST_WEIGHT:g}; tenants "
            "without a weight have 1"
        )
    return float(value)


def _text(value: Any, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ObjectivesError(f"{where} is {_shown(value)}: expected a string")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _scope_to_plain(scope: Scope | SloClass | TenantSlo) -> dict[str, Any]:
    objectives = {"ttft": scope.ttft, "tbt": scope.tbt}
    return {kind: objective_text(objective) for kind, objective in objectives.items() if objective is not None}


def objective_text(objective: Objective) -> str:
    """Return an objective as `parse_record` reads it: "2s", "5x p95", "off"."""
    if objective.is_off:
        text = "off"
    elif objective.times:
        text = f"{_decimal(objective.times)}x"
    else:
        text = f"{_decimal(objective.seconds)}s"
    return text if objective.percentile == DEFAULT_PERCENTILE else f"{text} p{_decimal(objective.percentile)}"


def _decimal(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".")
