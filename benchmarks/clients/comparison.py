"""Comparison of a client's figure with Moonpool's: both values, the allowed difference, and the verdict. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Allowed:
    """Allowed difference: the fraction `share` of our value plus `slack`, in the figure's unit."""

    share: float = 0.0
    slack: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.share:.0%}"] * bool(self.share) + [f"{self.slack:g}"] * bool(self.slack)
        return "±" + " + ".join(parts) if parts else "equal"


EQUAL = Allowed()


@dataclass(frozen=True)
class Comparison:
    """Comparison of `theirs` with `ours`. Missing or non-finite values never agree."""

    client: str
    name: str
    theirs: float | None
    ours: float | None
    source: str
    """Source of our value."""
    unit: str = ""
    allowed: Allowed = EQUAL

    @property
    def agrees(self) -> bool:
        if self.theirs is None or self.ours is None or not math.isfinite(self.theirs) or not math.isfinite(self.ours):
            return False
        return abs(self.theirs - self.ours) <= self.allowed.share * abs(self.ours) + self.allowed.slack

    @property
    def ratio(self) -> float | None:
        """Theirs over ours; None if either is missing or ours is 0."""
        return self.theirs / self.ours if self.theirs is not None and self.ours else None

    @property
    def verdict(self) -> str:
        return "agrees" if self.agrees else "DISAGREES"

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table row."""
        ratio = "–" if self.ratio is None else f"{self.ratio:.3f}"
        unit = f" {self.unit}" if self.unit else ""
        shown = (_shown(self.theirs) + unit, _shown(self.ours) + unit)
        return (self.client, self.name, *shown, self.source, ratio, str(self.allowed), self.verdict)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "allowed": asdict(self.allowed), "ratio": self.ratio, "agrees": self.agrees}


@dataclass(frozen=True)
class ClientCheck:
    """Check that passes or fails."""

    client: str
    name: str
    works: bool
    detail: str = ""

    @property
    def agrees(self) -> bool:
        return self.works

    def cells(self) -> tuple[str, ...]:
        return (self.client, self.name, self.detail or "–", "–", "–", "–", "–", "works" if self.works else "FAILS")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees}


Row = Comparison | ClientCheck
HEADINGS = ("client", "what", "theirs", "ours", "our source", "ratio", "allowed", "verdict")


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def summary(rows: Sequence[Row]) -> str:
    """Return one line with the number of agreeing rows and the names of the others."""
    bad = [f"{row.client}: {row.name}" for row in rows if not row.agrees]
    told = f"{len(rows) - len(bad)} of {len(rows)} agree or work"
    return f"{told}; not: {', '.join(bad)}" if bad else told


def _shown(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "none"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
