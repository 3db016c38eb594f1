"""How often nodes were to change their role, and what came of it: counted, by roles. Nothing is decided here."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from conductor.following import sample
from moonpool_proto.v1 import conductor_pb2

__all__ = ["RoleChange", "RoleSwitches"]

Outcome = Literal["advised", "asked", "done", "kept", "left"]


@dataclass(frozen=True, slots=True)
class RoleChange:
    """Which model's node, from which role to which; names of roles. What is not known is ""."""

    model: str
    from_role: str
    to_role: str


class RoleSwitches:
    """`asked` are those that a node of this conductor was told to make; each comes to be `done`, or the node `kept` its
    role, or it has `left` first. `advised` were only said; refused ones nobody was told of."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[RoleChange, Outcome]] = Counter()
        self._refused: Counter[tuple[RoleChange, str]] = Counter()

    def count(self, change: RoleChange, outcome: Outcome) -> None:
        """One more."""
        self._counts[change, outcome] += 1

    def refused(self, change: RoleChange, reason: str) -> None:
        """It cannot be."""
        self._refused[change, reason] += 1

    def samples(self) -> Iterator[conductor_pb2.Sample]:
        """The counts for export, each with its first event."""
        for name, label, counts in self._by_label():
            for (change, value), count in sorted(counts.items(), key=_key):
                labels = {"model_name": change.model, "from_role": change.from_role, "to_role": change.to_role}
                yield sample(name, count, **labels, **{label: value})

    def state(self) -> dict[str, dict[str, int]]:
        """By "from to", and outcome or `refused_REASON`: of all models together."""
        told: dict[str, Counter[str]] = defaultdict(Counter)
        for (change, outcome), count in sorted(self._counts.items(), key=_key):
            told[f"{change.from_role} {change.to_role}"][outcome] += count
        for (change, reason), count in sorted(self._refused.items(), key=_key):
            told[f"{change.from_role} {change.to_role}"][f"refused_{reason}"] += count
        return {roles: dict(counts) for roles, counts in told.items()}

    def _by_label(self) -> "Iterator[tuple[str, str, Counter[tuple[RoleChange, str]]]]":
        yield "role_switches_total", "outcome", Counter(self._counts)
        yield "role_switches_refused_total", "reason", self._refused


def _key(item: tuple[tuple[RoleChange, str], int]) -> tuple[str, str, str, str]:
    (change, value), _ = item
    return change.model, change.from_role, change.to_role, value
