"""Latency predictors that learn online from load metrics, as llm-d's predicted-latency routing does, for comparison.

llm-d (llm-d.ai/docs/architecture/advanced/latency-predictor) trains regressions on finished requests: the share of KV
in use, waiting and running requests, prompt length, the share of the prompt that is cached, and tokens in flight. Here
they are boosted regression trees on the logarithm of the latency, as with XGBoost, and linear regression with relative
errors. Both are fitted again after every `REFIT` finished requests to the latest `WINDOW` of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

REFIT: Final = 100
WINDOW: Final = 2000
LEAST: Final = 50  # samples before the first prediction
_BINS: Final = 32
_ROUNDS: Final = 60
_DEPTH: Final = 4
_RATE: Final = 0.15  # share of each tree's correction that is applied
_LEAF: Final = 5.0  # added to a leaf's number of samples, so that small leaves correct less
_RIDGE: Final = 1e-3


class LinearModel:
    """Linear regression that minimises relative errors, with a small ridge penalty on standardised features."""

    def __init__(self, features: Floats, values: Floats) -> None:
        self._mean, self._scale = features.mean(axis=0), features.std(axis=0) + 1e-12
        rows = self._rows(features) / values[:, None]
        gram = rows.T @ rows + _RIDGE * len(values) * np.eye(rows.shape[1]) / float(np.median(values)) ** 2
        self._weights = np.linalg.solve(gram, rows.sum(axis=0))
        self._least = float(values.min())

    def predict(self, features: Floats) -> Floats:
        """Return predictions, at least the smallest value that was learned."""
        found: Floats = np.maximum(self._rows(features) @ self._weights, self._least)
        return found

    def _rows(self, features: Floats) -> Floats:
        scaled = (features - self._mean) / self._scale
        return np.concatenate([np.ones((len(scaled), 1)), scaled], axis=1)


class BoostedTrees:
    """Gradient-boosted regression trees on the logarithm of the values, with splits at quantiles of each feature."""

    def __init__(self, features: Floats, values: Floats) -> None:
        logs = np.log(values)
        self._base = float(logs.mean())
        self._edges = [np.unique(np.quantile(column, np.linspace(0, 1, _BINS + 1)[1:-1])) for column in features.T]
        binned = self._binned(features)
        self._trees: list[tuple[list[tuple[NDArray[np.int64], NDArray[np.int64]]], Floats]] = []
        rest = logs - self._base
        for _ in range(_ROUNDS):
            splits, leaves, of_sample = _grow(binned, rest)
            self._trees.append((splits, leaves))
            rest = rest - leaves[of_sample]

    def predict(self, features: Floats) -> Floats:
        """Return predictions [samples]."""
        binned, logs = self._binned(features), np.full(len(features), self._base)
        for splits, leaves in self._trees:
            leaf = np.zeros(len(features), np.int64)
            for column, threshold in splits:
                leaf = 2 * leaf + (binned[np.arange(len(leaf)), column[leaf]] > threshold[leaf])
            logs += leaves[leaf]
        found: Floats = np.exp(logs)
        return found

    def _binned(self, features: Floats) -> NDArray[np.int64]:
        columns = [np.searchsorted(edges, column) for edges, column in zip(self._edges, features.T, strict=True)]
        return np.stack(columns, axis=1).astype(np.int64)


def _grow(
    binned: NDArray[np.int64], rest: Floats
) -> tuple[list[tuple[NDArray[np.int64], NDArray[np.int64]]], Floats, NDArray[np.int64]]:
    """Fit one tree to `rest` [samples]; return its splits by level (feature and bin of each node), leaves, and leaf
    of each sample."""
    of_sample = np.zeros(len(rest), np.int64)
    splits = []
    for level in range(_DEPTH):
        nodes = 1 << level
        gains = np.full((binned.shape[1], nodes, _BINS), -1.0)
        for feature in range(binned.shape[1]):
            at = of_sample * _BINS + binned[:, feature]
            sums = np.bincount(at, rest, nodes * _BINS).reshape(nodes, _BINS).cumsum(axis=1)
            counts = np.bincount(at, minlength=nodes * _BINS).reshape(nodes, _BINS).cumsum(axis=1)
            right, num_right = sums[:, -1:] - sums, counts[:, -1:] - counts
            gains[feature] = sums**2 / (counts + _LEAF) + right**2 / (num_right + _LEAF)
        best = gains.transpose(1, 0, 2).reshape(nodes, -1).argmax(axis=1)
        column, threshold = best // _BINS, best % _BINS
        splits.append((column, threshold))
        of_sample = 2 * of_sample + (binned[np.arange(len(rest)), column[of_sample]] > threshold[of_sample])
    count = np.bincount(of_sample, minlength=1 << _DEPTH)
    leaves = _RATE * np.bincount(of_sample, rest, 1 << _DEPTH) / (count + _LEAF)
    return splits, leaves, of_sample


@dataclass(frozen=True, slots=True)
class Observation:
    """A request's features at its placement, and its latency, which is known from `known_ns` on."""

    placed_ns: int
    known_ns: int
    features: tuple[float, ...]
    value: float  # seconds, above 0


def predict_online(observations: Sequence[Observation], kind: type[LinearModel] | type[BoostedTrees]) -> list[float]:
    """Return the prediction for each observation from those known at its placement; 0 while they are too few.

    `observations`: in order of `placed_ns`.
    """
    by_known = sorted(range(len(observations)), key=lambda i: observations[i].known_ns)
    features = np.array([observations[i].features for i in by_known], np.float64)
    values = np.array([observations[i].value for i in by_known], np.float64)
    fitted_at: list[tuple[int, int]] = []  # (index of the first observation that a fit predicts, samples known then)
    num_known = 0
    for index, one in enumerate(observations):
        while num_known < len(by_known) and observations[by_known[num_known]].known_ns <= one.placed_ns:
            num_known += 1
        if num_known >= LEAST and num_known - (fitted_at[-1][1] if fitted_at else 0) >= REFIT:
            fitted_at.append((index, num_known))
    predictions = [0.0] * len(observations)
    for (first, known), (end, _) in pairwise([*fitted_at, (len(observations), 0)]):
        latest = slice(max(0, known - WINDOW), known)
        wanted = np.array([observations[i].features for i in range(first, end)], np.float64)
        predictions[first:end] = kind(features[latest], values[latest]).predict(wanted).tolist()
    return predictions
