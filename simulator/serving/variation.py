"""Changes of a workload over the time of a run: bursts of arrivals, and answers whose usual length drifts."""

from dataclasses import dataclass, replace
from math import isfinite

from simulator.errors import BadSetting
from simulator.serving.clock import NS
from simulator.serving.requests import Arrival, SimulatedWorkload


@dataclass(frozen=True, slots=True)
class Variation:
    """Bursts: in the first third of every `burst_period_s`, twice the mean rate, then half of it. 0: no bursts.

    Drift: answers are `answers_from` times as long as drawn at the start, `answers_to` times at the end, and change by
    a constant factor per second in between. Raises BadSetting.
    """

    burst_period_s: float = 0.0
    answers_from: float = 1.0
    answers_to: float = 1.0

    def __post_init__(self) -> None:
        if not isfinite(self.burst_period_s) or self.burst_period_s < 0:
            raise BadSetting(f"burst_period_s must be finite and at least 0, got {self.burst_period_s}")
        for name in ("answers_from", "answers_to"):
            if not isfinite(getattr(self, name)) or getattr(self, name) <= 0:
                raise BadSetting(f"{name} must be finite and above 0, got {getattr(self, name)}")

    def of(self, workload: SimulatedWorkload, longest_answer: int) -> SimulatedWorkload:
        """Return the workload with these changes; answers are truncated to `longest_answer` tokens (0: no limit)."""

        def answer_tokens(job: Arrival, tokens: int) -> int:
            part = job.arrival_ns / NS / workload.duration_s
            scaled: int = round(tokens * self.answers_from * (self.answers_to / self.answers_from) ** part)
            return max(1, min(scaled, longest_answer or scaled))

        return replace(
            workload,
            jobs=tuple(
                replace(
                    job,
                    arrival_ns=self._arrival_ns(job.arrival_ns),
                    output_tokens=answer_tokens(job, job.output_tokens),
                    previous_tokens=answer_tokens(job, job.previous_tokens) if job.previous_tokens else 0,
                )
                for job in workload.jobs
            ),
        )

    def _arrival_ns(self, drawn_ns: int) -> int:
        period_ns = round(self.burst_period_s * NS)
        if not period_ns:
            return drawn_ns
        begin_ns, within = drawn_ns // period_ns * period_ns, drawn_ns % period_ns / period_ns
        # Two thirds of a period's arrivals are moved into its first third.
        moved = within / 2 if within < 2 / 3 else 1 / 3 + (within - 2 / 3) * 2
        return begin_ns + round(moved * period_ns)
