"""How far predictions were off, as histograms per model, node and what was predicted. Counting only."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["ERROR_BOUNDS", "ErrorHistogram", "Predicted", "PredictionErrors"]

Predicted = Literal["prefill", "step", "ttft", "tbt"]

# Of (predicted - measured) / measured: -0.5 was predicted half as long as it took, 1 twice as long.
ERROR_BOUNDS: Final = (-0.75, -0.5, -0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0)
_MAX_NODES: Final = 32  # of a model, by name; those beyond share one
_OTHERS: Final = "other"


@dataclass(frozen=True, slots=True)
class ErrorHistogram:
    """`counts[i]`: errors of at most ERROR_BOUNDS[i] and above the bound before; the last one: above all bounds."""

    what: Predicted
    model: str
    node_id: str
    counts: tuple[int, ...]


class PredictionErrors:
    """Of the nodes that are there, the first so many of each model by name."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, Predicted], list[int]] = {}
        self._nodes: dict[str, set[str]] = {}

    def add(self, what: Predicted, model: str, node_id: str, predicted_s: float, measured_s: float) -> None:
        """One prediction and what came of it; both above 0 (an error relative to nothing is none).

        `node_id` "": of a node that has left."""
        if not (measured_s > 0 and predicted_s > 0):
            return
        nodes = self._nodes.setdefault(model, set())
        if node_id not in nodes:
            if node_id and len(nodes) < _MAX_NODES:
                nodes.add(node_id)
            else:
                node_id = _OTHERS
        key = model, node_id, what
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0] * (len(ERROR_BOUNDS) + 1)
        counts[bisect_left(ERROR_BOUNDS, (predicted_s - measured_s) / measured_s)] += 1

    def forget(self, model: str, node_id: str) -> None:
        """The node has left."""
        self._nodes.get(model, set()).discard(node_id)
        for key in [key for key in self._counts if key[:2] == (model, node_id)]:
            del self._counts[key]

    def __iter__(self) -> Iterator[ErrorHistogram]:
        for (model, node_id, what), counts in sorted(self._counts.items()):
            yield ErrorHistogram(what, model, node_id, tuple(counts))
