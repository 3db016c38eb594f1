"""Changes to one row of logits before it is sampled, as plain data without torch. `engine.steering` applies them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Penalties:
    """Penalties that lower (or, if negative, raise) the logits of ids that occurred before. `ids` are distinct.

    `repetition` divides positive logits of all `ids` and multiplies negative ones; 1 = off. Then `frequency` is
    subtracted once per time that the id was generated, and `presence` once if it was generated at all; 0 = off.
    """

    ids: Ids  # [n]
    counts: Floats  # [n]: times generated; 0 for ids that occur in the prompt only
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


@dataclass(frozen=True)
class Bias:
    """Values added to the logits of `ids`, which are distinct."""

    ids: Ids  # [n]
    values: Floats  # [n]


@dataclass(frozen=True)
class LogitSteering:
    """Changes to one row's logits, applied in the order of the fields."""

    allowed: Bools | None = None  # [V]; all other ids are excluded
    barred: Ids | None = None  # ids to exclude
    bias: Bias | None = None
    penalties: Penalties | None = None
