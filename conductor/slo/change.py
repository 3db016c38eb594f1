"""Changes of the record of objectives: the requested change, its validation, and a readable diff. No I/O.

`KnownTenants` collects the tenants that frontends report, so that objectives for unknown tenants are rejected.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conductor.errors import ObjectivesError
from conductor.policy.objectives import SloRecord, record_from_text, record_to_plain
from conductor.slo.versions import SloVersion

_MOST = 1000  # frontends
_MEMORY_S = 60.0  # a frontend is forgotten after this long without a report
_SHOWN = 5


class KnownTenants:
    """Tenants reported by frontends.

    A tenant is the digest of an API key; without API keys all requests belong to tenant "".
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported: dict[
            str, tuple[float, frozenset[str]]
        ] = {}  # time and tenants by frontend, in order of last report

    def hear(self, frontend_id: str, tenants: Iterable[str]) -> None:
        """Record a frontend's tenants; an empty `frontend_id` means that it does not report them."""
        if not frontend_id:
            return
        self._reported.pop(frontend_id, None)
        self._reported[frontend_id] = self._clock(), frozenset(tenants)
        if len(self._reported) > _MOST:
            del self._reported[next(iter(self._reported))]

    def problem_with(self, tenants: Sequence[str]) -> str:
        """Describe why some of the tenants cannot occur; "" if all can, or if no frontend has reported its tenants."""
        since_s = self._clock() - _MEMORY_S
        current = {name: known for name, (at_s, known) in self._reported.items() if at_s >= since_s}
        known = frozenset().union(*current.values())
        strange = [tenant for tenant in tenants if tenant not in known]
        if not current or not strange:
            return ""
        who = f"{', '.join(sorted(current)[:_SHOWN])}{' and others' if len(current) > _SHOWN else ''}"
        if not known - {""}:
            return f"tenant {strange[0]!r} cannot occur: {who} require no API key, so there is only one tenant"
        some = ", ".join(sorted(known)[:_SHOWN])
        more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
        return f"tenant {strange[0]!r} belongs to no API key of {who}; known tenants: {some}{more}"


def differences(before: SloRecord, after: SloRecord) -> list[str]:
    """Return the differences by field, such as "classes.chat.ttft: 5x -> 3x"; [] if the records are equal."""
    old, new = dict(_lines(record_to_plain(before), "")), dict(_lines(record_to_plain(after), ""))
    return [
        f"{place}: {old.get(place, 'not there')} -> {new.get(place, 'not there')}"
        for place in sorted(old.keys() | new.keys())
        if old.get(place) != new.get(place)
    ]


def _lines(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and (value or not place):
        for key, item in value.items():
            yield from _lines(item, f"{place}.{key}" if place else str(key))
    else:
        yield place, "(empty)" if isinstance(value, Mapping) else str(value)


_LONGEST_TEXT = 500


@dataclass(frozen=True, slots=True)
class ObjectivesChange:
    """Requested change: new content, or the content of an earlier version."""

    author: str
    reason: str
    content: str = ""
    rollback_to: int = 0
    expect_version: int | None = None  # newest version that the author has seen; None: any
    is_trial: bool = False  # only report what would change
    is_forced: bool = False  # accept tenants that no frontend knows
    peer: str = ""

    def check(self) -> None:
        """Raise ObjectivesError if author or reason is missing or invalid."""
        for name, text in (("author", self.author), ("reason", self.reason)):
            if not text.strip() or len(text) > _LONGEST_TEXT or not text.isprintable():
                raise ObjectivesError(f"{name} must be one line of 1 to {_LONGEST_TEXT} characters, got {text[:80]!r}")

    def record(self, history: Sequence[SloVersion]) -> SloRecord:
        """Return the requested record. Raises ObjectivesError."""
        if not self.rollback_to:
            return record_from_text(self.content)
        for kept in history:
            if kept.version == self.rollback_to:
                return record_from_text(kept.content)
        raise ObjectivesError(
            f"cannot roll back to version {self.rollback_to}: versions {history[0].version} to "
            f"{history[-1].version} are stored"
        )

    def strangers(
        self, before: SloRecord, after: SloRecord, known_tenants: KnownTenants, models: Iterable[str]
    ) -> list[str]:
        """Return warnings about unknown names. Raises ObjectivesError for new tenants that cannot occur."""
        problem = known_tenants.problem_with(sorted(after.tenants.keys() - before.tenants.keys()))
        if problem and not (self.is_forced or self.rollback_to):
            raise ObjectivesError(f"{problem}; force the change if a frontend that does not report here has the tenant")
        strange = sorted(after.models.keys() - set(models))
        return [*([problem] if problem else []), *(f"no node currently serves the model {name!r}" for name in strange)]


@dataclass(frozen=True, slots=True)
class ObjectivesChangeResult:
    """Result of a change.

    `version`: in force afterwards (the former one if nothing changed); `record`: as requested.
    """

    version: SloVersion
    record: SloRecord
    differences: list[str]
    warnings: list[str]
