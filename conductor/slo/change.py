"""What somebody wants the record of objectives to be, and whether it can be. No I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conductor.errors import ObjectivesError
from conductor.policy.objectives import SloRecord, record_from_text
from conductor.slo.front_doors import FrontDoors
from conductor.slo.versions import SloVersion

__all__ = ["Change", "Changed"]

_LONGEST_TEXT = 500


@dataclass(frozen=True, slots=True)
class Change:
    """A content, or that of an earlier version."""

    author: str
    reason: str
    content: str = ""
    rollback_to: int = 0
    expect_version: int | None = None  # the newest one that its author has seen; None: whatever it is
    is_trial: bool = False  # only say what would change
    is_forced: bool = False  # also for tenants that no front door knows
    peer: str = ""

    def check(self) -> None:
        """Raises ObjectivesError for an author or a reason that tells nobody anything."""
        for name, text in (("author", self.author), ("reason", self.reason)):
            if not text.strip() or len(text) > _LONGEST_TEXT or not text.isprintable():
                raise ObjectivesError(
                    f"{name} is {text[:80]!r}: expected one line of 1 to {_LONGEST_TEXT} characters, for the audit"
                )

    def record(self, history: Sequence[SloVersion]) -> SloRecord:
        """What is wanted. Raises ObjectivesError."""
        if not self.rollback_to:
            return record_from_text(self.content)
        for kept in history:
            if kept.version == self.rollback_to:
                return record_from_text(kept.content)
        raise ObjectivesError(
            f"there is no version {self.rollback_to} to go back to: kept are {history[0].version} to "
            f"{history[-1].version}"
        )

    def strangers(
        self, before: SloRecord, after: SloRecord, front_doors: FrontDoors, models: Iterable[str]
    ) -> list[str]:
        """Warnings about names that nobody bears. Raises ObjectivesError for new tenants that can never come."""
        problem = front_doors.problem_with(sorted(after.tenants.keys() - before.tenants.keys()))
        if problem and not (self.is_forced or self.rollback_to):
            raise ObjectivesError(f"{problem}; force it, if a front door that this conductor does not hear of has it")
        strange = sorted(after.models.keys() - set(models))
        return [*([problem] if problem else []), *(f"no node serves the model {name!r} now" for name in strange)]


@dataclass(frozen=True, slots=True)
class Changed:
    """What came of it. `version` is the one in force afterwards: the same as before, if nothing was to change."""

    version: SloVersion
    record: SloRecord  # that was wanted
    differences: list[str]
    warnings: list[str]
