"""Least squares for durations: coefficients that are not negative, errors that are relative. Pure."""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["fit_durations"]


def fit_durations(terms: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The coefficients x ≥ 0 [k] that make `terms` [n, k] · x come closest to `seconds` [n], n ≥ 1, all above 0.

    Exact for a few terms: the best of the least-squares solutions over each subset of terms that has no negative
    coefficient; of subsets no larger than the number of different rows. The first term is taken as constant, and its
    coefficient is the median where nothing fits.
    """
    num_terms = terms.shape[1]
    weighted = terms / seconds[:, None]
    num_rows = len(np.unique(terms, axis=0))
    best, best_error = np.zeros(num_terms), math.inf
    best[0] = float(np.median(seconds))
    for size in range(1, min(num_terms, num_rows) + 1):
        for chosen in itertools.combinations(range(num_terms), size):
            part, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(seconds)), rcond=None)
            error = float(np.sum((weighted[:, chosen] @ part - 1) ** 2))
            if (part >= 0).all() and error < best_error - 1e-12:
                best, best_error = np.zeros(num_terms), error
                best[list(chosen)] = part
    return best
