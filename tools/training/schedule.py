"""Schedule of a run: learning rate, context length and share of copy windows over time. Pure."""

from dataclasses import dataclass

WARM_UP = 0.01
DECAY_FROM = 0.75
STAGES = ((0.45, 512), (0.78, 1024), (1.0, 2048))
COPY_STAGES = ((0.1, 0.25), (0.3, 0.1), (1.0, 0.03))


@dataclass(frozen=True)
class Clock:
    """Progress by wall clock (from ``started_s`` to ``deadline_s``, Unix seconds), or by steps if ``steps`` is set."""

    started_s: float
    deadline_s: float
    steps: int = 0

    def progress(self, now_s: float, step: int) -> float:
        """Return the progress from 0 to 1."""
        done = step / self.steps if self.steps else (now_s - self.started_s) / (self.deadline_s - self.started_s)
        return min(max(done, 0.0), 1.0)


def rate(progress: float) -> float:
    """Return the relative learning rate: linear warm-up, constant, linear decay to zero over the last quarter."""
    return min(progress / WARM_UP, 1.0, (1.0 - progress) / (1.0 - DECAY_FROM))


def context(progress: float) -> int:
    """Return the window length at ``progress``."""
    return next(length for end, length in STAGES if progress <= end)


def copy_share(progress: float) -> float:
    """Return the share of copy windows, which is larger at the beginning, while the lookup heads form."""
    return next(share for end, share in COPY_STAGES if progress <= end)
