"""When requests are due: a gamma process of a rate, as vLLM's benchmark draws it. Pure."""

from __future__ import annotations

import math

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray


def arrival_times(count: int, *, rate: float, burstiness: float, rng: Generator) -> NDArray[np.float64]:
    """Seconds after the start, float64 [count], not falling.

    An infinite rate: all at once. Otherwise intervals of a gamma distribution of that shape (1: a Poisson process;
    infinite: all alike), stretched so that the last request is due at count / rate, whatever was drawn.
    """
    if math.isinf(rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / rate
    times = np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), count))
    return times * (count / rate / times[-1]) if times[-1] > 0 else np.arange(1, count + 1) / rate
