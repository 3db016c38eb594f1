"""From answers to the groups worth choosing from. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig
from engine.layer_reuse import LayerSpan
from worker.policy.reuse_profile import ReusePoint

RESAMPLES = 1000
LEAST_LEAD = 0.05
"""Lead of the receiver's accuracy over the sender's below which a loss of quality cannot be told from noise."""


@dataclass(frozen=True)
class Answers:
    """Which questions were answered exactly, bool [questions], and the context of each, int [questions]."""

    contexts: npt.NDArray[np.int32]
    sender: npt.NDArray[np.bool_]
    receiver: npt.NDArray[np.bool_]
    all_reused: npt.NDArray[np.bool_]
    groups: Mapping[LayerSpan, npt.NDArray[np.bool_]]


def cost_of(span: LayerSpan, config: ModelConfig, context_tokens: float) -> float:
    """Return the work of computing `span` of a context as a share of the work of all layers.

    It is counted in multiplications per token; of the span's last layer, only the KV is computed.
    """
    d, q, kv = config.hidden_size, config.q_size, config.kv_size
    each = [
        d * (q + 2 * kv) + q * d + 3 * d * size + q * (min(context_tokens, w) if w else context_tokens)
        for w, size in zip(config.layer_windows, config.mlp_sizes, strict=True)
    ]
    return (sum(each[span.first : span.last]) + 2 * d * kv) / sum(each)


def points_of(answers: Answers, config: ModelConfig, context_tokens: float) -> list[ReusePoint]:
    """Return a point for each group, in the order of cost; intervals are from resampled contexts."""
    rng = np.random.default_rng(0)
    names, places = np.unique(answers.contexts, return_inverse=True)
    drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), RESAMPLES)  # [resamples, contexts]

    def sums(right: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        return np.bincount(places, right, len(names)).astype(np.float64)

    sender, receiver = sums(answers.sender), sums(answers.receiver)
    lead = receiver - sender
    points = []
    for span, right in answers.groups.items():
        missing = receiver - sums(right)
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = (drawn @ missing) / (drawn @ lead)
        low, high = np.quantile(np.where(np.isfinite(losses), losses, 1.0), [0.025, 0.975])
        points.append(
            ReusePoint(
                first=span.first,
                last=span.last,
                cost=cost_of(span, config, context_tokens),
                accuracy=float(right.mean()),
                quality_loss=float(missing.sum() / lead.sum()),
                loss_interval=(float(low), float(high)),
            )
        )
    return sorted(points, key=lambda point: (point.cost, point.quality_loss))


def frontier_of(points: list[ReusePoint], max_quality_loss: float, max_cost: float) -> list[ReusePoint]:
    """Return the points within both bounds of which none is both cheaper and as good, from cheap to good."""
    kept = list[ReusePoint]()
    for point in sorted(points, key=lambda point: (point.cost, point.quality_loss)):
        is_better = not kept or point.quality_loss < kept[-1].quality_loss
        if is_better and point.quality_loss <= max_quality_loss and point.cost <= max_cost:
            kept.append(point)
    return kept
