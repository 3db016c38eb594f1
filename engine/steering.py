"""Changes to logits before sampling: grammar, excluded ids, bias and penalties.

Pure functions with the order and the meaning of vLLM. All operations are float32, one at a time, so that CPU and CUDA
agree. Rows without changes cost nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import SamplingError
from engine.steered_row import Ids, LogitSteering, Penalties


def steer(logits: torch.Tensor, rows: Sequence[LogitSteering | None]) -> torch.Tensor:
    """Return logits float32 [B, V] with the changes of `rows` applied; excluded ids are -inf.

    Returns the given tensor itself if no row has changes. Raises `SamplingError` for ids outside the vocabulary.
    """
    if len(rows) != len(logits):
        raise SamplingError(f"steering must have {len(logits)} rows, one per row of logits, got {len(rows)}")
    steered = [(i, row) for i, row in enumerate(rows) if row is not None]
    if not steered:
        return logits
    out = logits.clone()
    if masks := [(i, row.allowed) for i, row in steered if row.allowed is not None]:
        excluded = _on(out, ~np.stack([mask for _, mask in masks]))
        for (i, _), mask in zip(masks, excluded, strict=True):
            out[i].masked_fill_(mask, -torch.inf)
    _change(out, [(i, row.barred) for i, row in steered if row.barred is not None], lambda values: -torch.inf)
    if biases := [(i, row.bias) for i, row in steered if row.bias is not None]:
        added = _on(out, np.concatenate([bias.values for _, bias in biases]))
        _change(out, [(i, bias.ids) for i, bias in biases], lambda values: values + added)
    if penalties := [(i, row.penalties) for i, row in steered if row.penalties is not None]:
        _penalise(out, penalties)
    return out


def _penalise(out: torch.Tensor, rows: Sequence[tuple[int, Penalties]]) -> None:
    lengths = [len(penalties.ids) for _, penalties in rows]

    def spread(values: list[float]) -> torch.Tensor:
        return _on(out, np.repeat(np.array(values, np.float32), lengths))

    repetition = spread([penalties.repetition for _, penalties in rows])
    frequency = spread([penalties.frequency for _, penalties in rows])
    presence = spread([penalties.presence for _, penalties in rows])
    counts = _on(out, np.concatenate([penalties.counts for _, penalties in rows]))

    def change(values: torch.Tensor) -> torch.Tensor:
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - frequency * counts
        return values - presence * (counts > 0)

    _change(out, [(i, penalties.ids) for i, penalties in rows], change)


def _change(
    out: torch.Tensor, where: Sequence[tuple[int, Ids]], change: Callable[[torch.Tensor], torch.Tensor | float]
) -> None:
    """Compute out[i, ids] = change(out[i, ids]) for all (i, ids) at once."""
    if not where:
        return
    ids = np.concatenate([ids for _, ids in where])
    if len(ids) and not 0 <= ids.min() <= ids.max() < out.shape[1]:
        raise SamplingError(f"steered ids must be in 0..{out.shape[1] - 1}, got {ids.min()}..{ids.max()}")
    rows = np.repeat(np.array([i for i, _ in where], np.int64), [len(ids) for _, ids in where])
    index = (_on(out, rows), _on(out, ids))
    out[index] = change(out[index])


def _on(like: torch.Tensor, values: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)
