"""Service level objectives and what meeting them means. Pure.

The default rule follows Mooncake: TTFT at most 10 times, TBT at most 5 times that of the unloaded request, for 90 % of
the requests. What is compared, exactly:

- TTFT of a request (from sending to its first token) with 10 x the TTFT that a lone request of the same prompt length
  without any reuse takes (loadtest/unloaded.py: the fit over lengths);
- TBT of a request, that is the mean of its longest tenth of intervals between tokens, with 5 x the median of the same
  figure over the lone requests. A request of one token has no interval and meets it.

The rule holds when at least 90 % of the requests that were sent and ended (rejected and failed ones count as misses)
meet each. `slo_attainment` is the share that meets both, `goodput_rps` their number per second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.record import Outcome, RequestRecord
from loadtest.unloaded import Unloaded

TTFT_FACTOR = 10.0
TBT_FACTOR = 5.0
RULE_SHARE = 0.9


@dataclass(frozen=True)
class Objectives:
    """`ttft_s`, `tbt_s`: fixed objectives in seconds, 0 = the rule relative to `unloaded`."""

    ttft_s: float
    tbt_s: float
    unloaded: Unloaded | None

    def ttft_of(self, prompt_tokens: int) -> float:
        """The TTFT objective for that prompt length; infinite where there is nothing to compare with."""
        if self.ttft_s > 0:
            return self.ttft_s
        relative = TTFT_FACTOR * self.unloaded.ttft_of(prompt_tokens) if self.unloaded else math.nan
        return relative if math.isfinite(relative) else math.inf

    @property
    def tbt_objective_s(self) -> float:
        """The TBT objective; infinite where there is nothing to compare with."""
        if self.tbt_s > 0:
            return self.tbt_s
        relative = TBT_FACTOR * self.unloaded.tbt_worst10_s if self.unloaded else math.nan
        return relative if math.isfinite(relative) else math.inf

    @property
    def known(self) -> bool:
        """Whether both objectives are given or were measured."""
        return (self.ttft_s > 0 or self.unloaded is not None) and math.isfinite(self.tbt_objective_s)

    def meets_ttft(self, record: RequestRecord) -> bool:
        """Whether a completed request met its TTFT objective."""
        return record.outcome is Outcome.COMPLETED and record.ttft_s <= self.ttft_of(record.prompt_tokens)

    def meets_tbt(self, record: RequestRecord) -> bool:
        """Whether a completed request met the TBT objective."""
        worst = record.tbt_worst10_s
        return record.outcome is Outcome.COMPLETED and (math.isnan(worst) or worst <= self.tbt_objective_s)

    def describe(self) -> str:
        """One sentence for the report."""
        if not self.known:
            return "not judged: no lone requests were measured, and --slo-ttft and --slo-tbt are not both given"
        ttft = f"{self.ttft_s:g} s" if self.ttft_s > 0 else f"{TTFT_FACTOR:g}× a lone request of its length"
        tbt = f"{self.tbt_s:g} s" if self.tbt_s > 0 else f"{TBT_FACTOR:g}× a lone request's"
        bound = f" ({self.tbt_objective_s * 1000:.1f} ms)" if math.isfinite(self.tbt_objective_s) else ""
        return f"TTFT ≤ {ttft}; mean of the longest tenth of intervals between tokens ≤ {tbt}{bound}"


def attainment(objectives: Objectives, records: Sequence[RequestRecord], seconds: float) -> dict[str, Any]:
    """The objective keys of the report, over requests that ended; null where the objectives are unknown."""
    ended = [r for r in records if r.outcome is not Outcome.UNFINISHED]
    if not objectives.known or not ended:
        keys = ("slo_attainment", "slo_ttft_attainment", "slo_tbt_attainment", "slo_rule_met", "goodput_rps")
        return dict.fromkeys(keys) | {"slo_rule": objectives.describe()}
    ttft = sum(objectives.meets_ttft(r) for r in ended)
    tbt = sum(objectives.meets_tbt(r) for r in ended)
    both = sum(objectives.meets_ttft(r) and objectives.meets_tbt(r) for r in ended)
    return {
        "slo_attainment": both / len(ended),
        "slo_ttft_attainment": ttft / len(ended),
        "slo_tbt_attainment": tbt / len(ended),
        "slo_rule_met": min(ttft, tbt) >= RULE_SHARE * len(ended),
        "goodput_rps": both / seconds if seconds > 0 else 0.0,
        "slo_rule": objectives.describe(),
    }
