"""What the report's pictures are drawn from, and what one of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.cluster_metrics import ClusterHistory
from loadtest.objectives import Objectives
from loadtest.plan import PlannedRequest
from loadtest.record import Outcome, RequestRecord

__all__ = ["Evidence", "Panel"]


@dataclass(frozen=True)
class Panel:
    """A picture with its heading and a sentence on what it shows."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Evidence:
    """What the pictures are drawn from."""

    records: Sequence[RequestRecord]
    requests: Mapping[int, PlannedRequest]
    history: ClusterHistory
    objectives: Objectives
    tokens_per_block: int
    reuse_by_tier: Mapping[str, Mapping[str, Any]] | None  # as in report.json

    @property
    def completed(self) -> list[RequestRecord]:
        """Completed requests in order of arrival."""
        done = [r for r in self.records if r.outcome is Outcome.COMPLETED]
        return sorted(done, key=lambda r: (r.due_s, r.index))
