"""Schedule of a run: stages, and within each the learning rate, the window length and the kinds of windows. Pure.

A stage keeps the full learning rate, so that the next one can go on from its weights alone, or decays to zero (warm-up,
stable, decay; Hu et al., 2024). The last one of a run decays.
"""

from dataclasses import dataclass

from tools.training.windows import Mixture

WARM_UP = 0.01
DECAY_FROM = 0.4


@dataclass(frozen=True)
class Phase:
    """Windows until ``end``, a share of the stage."""

    end: float
    context: int
    mixture: Mixture


@dataclass(frozen=True)
class Stage:
    """One stage of a run. ``decays``: its rate ends at zero, and its weights can be used."""

    phases: tuple[Phase, ...]
    decays: bool = False

    def phase(self, progress: float) -> Phase:
        """Return the phase at ``progress``, 0 to 1."""
        return next(phase for phase in self.phases if progress <= phase.end)

    def rate(self, progress: float) -> float:
        """Return the relative learning rate: linear warm-up, constant, and linear decay to zero if the stage decays."""
        decay = (1.0 - progress) / (1.0 - DECAY_FROM) if self.decays else 1.0
        return min(progress / WARM_UP, 1.0, decay)


_COPYING = Mixture(reading=0.35, recall=0.2, copy=0.15)
_READING = Mixture(reading=0.55, recall=0.12, copy=0.03)
_ANSWERING = Mixture(reading=0.62, recall=0.16, copy=0.02)
_ASKING = Mixture(reading=0.8, recall=0.06, copy=0.0)
_REACHING = Mixture(reading=0.6, recall=0.3, copy=0.0)
_REPORTING = Mixture(reading=0.1, recall=0.05, copy=0.0, reports=0.8)
_FACTS = Mixture(reading=0.0, recall=0.4, copy=0.1)


def _lengthening(mixture: Mixture, *ends: float, long: Mixture | None = None) -> tuple[Phase, ...]:
    """Return phases of windows of 512, 1,024, 2,048 and 4,096 tokens.

    ``ends`` are those of the first three. ``long`` is the mixture of the last two, if it differs.
    """
    mixtures = (mixture, mixture, long or mixture, long or mixture)
    return tuple(
        Phase(end, context, kinds)
        for end, context, kinds in zip((*ends, 1.0), (512, 1024, 2048, 4096), mixtures, strict=True)
    )


STAGES: dict[str, tuple[Stage, ...]] = {
    "base": (
        Stage((Phase(0.3, 256, _COPYING), Phase(1.0, 512, _READING))),
        Stage((Phase(0.6, 512, _READING), Phase(1.0, 1024, _READING))),
        Stage(_lengthening(_ANSWERING, 0.35, 0.6, 0.85), decays=True),
        Stage(_lengthening(_ASKING, 0.75, 0.85, 0.93), decays=True),
        Stage((Phase(1.0, 512, _ASKING),)),
        Stage(_lengthening(_ASKING, 0.6, 0.7, 0.85, long=_REACHING), decays=True),
    ),
    "small": (
        Stage((Phase(0.5, 512, _ASKING), Phase(1.0, 1024, _ASKING))),
        Stage(_lengthening(_ASKING, 0.3, 0.55, 0.8, long=_REACHING), decays=True),
    ),
    "reports": (Stage(_lengthening(_REPORTING, 0.4, 0.7, 0.9), decays=True),),
    "nano": (Stage((Phase(0.45, 512, _FACTS), Phase(0.78, 1024, _FACTS), Phase(1.0, 2048, _FACTS)), decays=True),),
}
"""Stages by preset."""


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
