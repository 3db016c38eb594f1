"""Benchmark of the prediction of answer lengths.

The conversation trace in its order; each answer is predicted on arrival and learned from when it has ended (TTFT
ignored, `STEP_S` per token), so that no prediction knows its own or a later answer. The first twentieth is not counted.
`uniform` expects the mean of all answers; `prompt` is a curve per length of the prompt; `dialogue`, the conductor's
predictor, also knows the previous answer; `linear` is a linear regression of the logarithm on the same and further
features, with the quantiles of its residuals. Pinball loss is the mean over nine quantiles, in tokens. What predictions
are worth under overload is measured by `benchmarks/admission.py`. The last line of output is JSON.

    python benchmarks/lengths.py [--store]
"""

import argparse
import heapq
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.stored import store  # noqa: E402
from conductor.policy.lengths import Lengths, grid  # noqa: E402
from traces import CONVERSATION, Trace, load_trace, previous_turns  # noqa: E402

Floats = NDArray[np.float64]
STEP_S: Final = 0.04
LONGEST: Final = 2000  # max_tokens of the trace's requests
LEVELS: Final = np.array([0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.95])  # shares of answers that are not longer
MEDIAN: Final = 4
_UNCOUNTED: Final = 0.05


@dataclass(frozen=True)
class Features:
    """Features of a request, known when it arrives."""

    at_ns: int
    prompt_tokens: int
    previous_tokens: int  # 0: it is a first turn
    new_tokens: int  # of the prompt, after the previous turn's prompt and answer


class Predictor(Protocol):
    """Predictor of answer lengths; `learn` receives what `predict` was given."""

    def predict(self, features: Features) -> Floats:
        """Return the quantiles at LEVELS, in tokens."""

    def learn(self, now_ns: int, features: Features, tokens: int) -> None: ...


class Uniform:
    """Every answer is as long as the mean of those that have ended."""

    def __init__(self) -> None:
        self._sum, self._count = 0, 0

    def predict(self, features: Features) -> Floats:
        return np.full(len(LEVELS), self._sum / self._count if self._count else LONGEST)

    def learn(self, now_ns: int, features: Features, tokens: int) -> None:
        self._sum, self._count = self._sum + tokens, self._count + 1


class Curves:
    """The conductor's survival curves, with or without the previous answer."""

    def __init__(self, knows_dialogue: bool) -> None:
        self._lengths = Lengths()
        self._knows_dialogue = knows_dialogue

    def predict(self, features: Features) -> Floats:
        row = self._curve(features.at_ns, features)
        curve = self._lengths.curves[row]
        quantiles: Floats = np.interp(LEVELS, 1 - curve, grid())
        return np.minimum(np.where(1 - curve[-1] < LEVELS, LONGEST, quantiles), LONGEST)

    def learn(self, now_ns: int, features: Features, tokens: int) -> None:
        self._lengths.learn(now_ns, self._curve(now_ns, features), tokens, ended=tokens < LONGEST)

    def _curve(self, now_ns: int, features: Features) -> int:
        previous = features.previous_tokens if self._knows_dialogue else 0
        return self._lengths.curve_of(now_ns, "model", "", features.prompt_tokens, previous)


class Linear:
    """Recursive least squares of the logarithm; quantiles of the latest residuals, of first and of later turns."""

    _WINDOW: Final = 500

    def __init__(self) -> None:
        self._weights = np.zeros(6)
        self._inverse = np.eye(6) * 10
        self._residuals: tuple[deque[float], deque[float]] = (deque(maxlen=self._WINDOW), deque(maxlen=self._WINDOW))

    def predict(self, features: Features) -> Floats:
        residuals = self._residuals[features.previous_tokens > 0]
        if not residuals:
            return np.full(len(LEVELS), float(LONGEST))
        spread = np.quantile(np.array(residuals), LEVELS)
        quantiles: Floats = np.exp(self._weights @ self._features(features) + spread)
        return np.minimum(np.maximum(quantiles, 1.0), LONGEST)

    def learn(self, now_ns: int, features: Features, tokens: int) -> None:
        x = self._features(features)
        error = np.log(tokens) - self._weights @ x
        gain = self._inverse @ x / (1 + x @ self._inverse @ x)
        self._weights = self._weights + gain * error
        self._inverse = self._inverse - np.outer(gain, x @ self._inverse)
        self._residuals[features.previous_tokens > 0].append(float(error))

    @staticmethod
    def _features(features: Features) -> Floats:
        later, previous = float(features.previous_tokens > 0), float(np.log(max(1, features.previous_tokens)))
        new = float(np.log(max(1, features.new_tokens)))
        return np.array([1.0, later, previous, previous**2 / 10, np.log(features.prompt_tokens), new * later])


def requests(trace: Trace) -> Iterator[tuple[Features, int]]:
    """Yield (what is known on arrival, length of the answer) in order of arrival."""
    previous = previous_turns(trace)
    for row in trace:
        turn = previous.get(row.index)
        known = 0 if turn is None else max(1, turn.output_length)
        new_tokens = row.input_length if turn is None else row.input_length - turn.input_length - known
        yield Features(row.timestamp_ms * 1_000_000, row.input_length, known, new_tokens), max(1, row.output_length)


def measure_prediction(trace: Trace, predictor: Predictor) -> dict[str, float]:
    """Predict each answer, then learn from it once it has ended; return the quality of the predictions."""
    running: list[tuple[int, int, Features, int]] = []
    predicted, actual, later = [], [], []
    for number, (features, tokens) in enumerate(requests(trace)):
        while running and running[0][0] <= features.at_ns:
            now_ns, _, before, ended = heapq.heappop(running)
            predictor.learn(now_ns, before, ended)
        predicted.append(predictor.predict(features))
        actual.append(tokens)
        later.append(features.previous_tokens > 0)
        heapq.heappush(running, (features.at_ns + round(tokens * STEP_S * 1e9), number, features, tokens))
    first = round(_UNCOUNTED * len(actual))
    quantiles, lengths, in_dialogue = np.array(predicted)[first:], np.array(actual)[first:], np.array(later)[first:]
    return quality(quantiles, lengths) | {
        f"later_turns_{name}": value for name, value in quality(quantiles[in_dialogue], lengths[in_dialogue]).items()
    }


def quality(quantiles: Floats, lengths: NDArray[np.int64]) -> dict[str, float]:
    """Return Kendall's tau of the median, coverage of the 90 % interval and pinball loss; `quantiles` [n, LEVELS]."""
    error = lengths[:, None] - quantiles
    inside = (quantiles[:, 0] <= lengths) & (lengths <= quantiles[:, -1])
    return {
        "kendall_tau": round(kendall_tau(quantiles[:, MEDIAN], lengths.astype(float)), 3),
        "coverage_90": round(float(inside.mean()), 3),
        "pinball_tokens": round(float(np.maximum(LEVELS * error, (LEVELS - 1) * error).mean()), 2),
    }


def kendall_tau(first: Floats, second: Floats) -> float:
    """Return Kendall's tau-b of two series [n]; 0 if one is constant."""
    concordant = first_pairs = second_pairs = 0.0
    for at in range(0, len(first), 512):
        signs = np.sign(first[at : at + 512, None] - first)
        others = np.sign(second[at : at + 512, None] - second)
        concordant += float((signs * others).sum())
        first_pairs += float(np.count_nonzero(signs))
        second_pairs += float(np.count_nonzero(others))
    return concordant / (first_pairs * second_pairs) ** 0.5 if first_pairs and second_pairs else 0.0


PREDICTORS: Final[dict[str, Callable[[], Predictor]]] = {
    "uniform": Uniform,
    "prompt": lambda: Curves(knows_dialogue=False),
    "dialogue": lambda: Curves(knows_dialogue=True),
    "linear": Linear,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--store", action="store_true", help="store the figures in benchmarks/results")
    args = parser.parse_args()
    trace = load_trace(CONVERSATION)
    found: dict[str, Any] = {}
    for name, make in PREDICTORS.items():
        found[name] = measure_prediction(trace, make())
        print(f"{name}: {found[name]}")
    if args.store:
        store("lengths", {"prediction": found})
    print(json.dumps({"prediction": found}))


if __name__ == "__main__":
    main()
