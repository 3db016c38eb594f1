"""Work and duration of vLLM's steps, for the conductor's cost model. Pure; lives in vLLM's scheduler.

vLLM's own statistics name neither the prompts of a step nor what they shared it with, so the time from a prompt's
scheduling to its first token, which they do contain, includes the other work of its steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

STEPS: Final = "steps"
"""Key of the list of steps, as `StepWork.to_fields`, in the connector's statistics."""


@dataclass(slots=True)
class StepWork:
    """One step of vLLM."""

    began_s: float
    prompts: list[tuple[int, int]] = field(default_factory=list)  # (job, prompt tokens computed)
    batch: int = 0  # sequences that decode
    context_tokens: int = 0  # tokens in the contexts of these
    seconds: float = 0.0

    def to_fields(self) -> list[Any]:
        """Return [seconds, prompts, batch, context tokens]."""
        return [self.seconds, self.prompts, self.batch, self.context_tokens]


class StepClock:
    """The steps that vLLM has scheduled but not finished; they end in the order in which they begin."""

    def __init__(self) -> None:
        self._running: deque[StepWork] = deque()
        self._ended_s = 0.0

    def begin(self, now_s: float) -> StepWork:
        """Add a step that is scheduled now; the caller records its work."""
        work = StepWork(now_s)
        self._running.append(work)
        return work

    def end(self, now_s: float) -> StepWork | None:
        """End the earliest step; None if there is none.

        A step that was scheduled while others ran takes the time since the end of the one before it.
        """
        if not self._running:
            return None
        work = self._running.popleft()
        work.seconds = now_s - max(self._ended_s, work.began_s)
        self._ended_s = now_s
        return work
