"""Choice of the next token on a GPU without float64, sorts or noise over the whole vocabulary.

Scores are computed exactly for a few candidates. For the others, bounds show that they cannot be chosen; for a row in
which they do not, the caller has to compute all scores (`sampling.choose_by_tensors`).

- Without restrictions, candidates are the ids with the largest upper bounds of their scores, which are close: the noise
  is bounded by the highest 32 bits of its uniform number.
- With top-k, top-p or min-p, candidates are the most likely ids, if all that may be chosen are among them. Top-p needs
  the sum of all weights, which are integers.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine import triton_sampling_kernels as kernels

_TOP_P, _MIN_P, _TOP_K = 1, 2, 3  # fields of a draw
_CANDIDATES = 128
_LIKELY = 1024
_PAIRS = 512
_WIDTH = 1024
_WEIGHT_SLACK = 1e-9  # far above the errors of `exact_math.exp`


@dataclass(frozen=True)
class DeviceChoice:
    """Choices of B rows, on their device. The id and the score of a row that is not certain are meaningless."""

    ids: torch.Tensor  # int64 [B]
    scores: torch.Tensor  # float64 [B]
    certain: torch.Tensor  # bool [B]


def choose_on_device(logits: torch.Tensor, draws: npt.NDArray[np.void], unit: float) -> DeviceChoice:
    """Return the choices of logits [B, V], float32 or smaller, by `draws` [B] of dtype `sampling_kernels.DRAW`.

    The host does not wait for the device. A row with NaN has the score NaN; of one with infinity, or with nothing else
    than -inf, the score is not finite. `unit`: see `sampling`.
    """
    logits = logits.float().contiguous()
    placed = _on_device(draws.view(np.int64).reshape(len(draws), -1), logits.device)
    is_drawn = draws["temperature"] > 0
    is_restricted = is_drawn & ((draws["top_k"] > 0) | (draws["top_p"] < 1) | (draws["min_p"] > 0))
    kinds = is_drawn.astype(np.int64) + is_restricted
    chosen = []
    for kind, choose in enumerate((_greedy, _drawn, _restricted)):
        rows = np.flatnonzero(kinds == kind)
        if len(rows) == len(logits):
            return choose(logits, placed, unit)
        if len(rows):
            at = _on_device(rows, logits.device)
            chosen.append(choose(logits[at], placed[at], unit))
    back = _on_device(np.argsort(np.argsort(kinds, kind="stable")), logits.device)
    parts = [torch.cat(part)[back] for part in zip(*((c.ids, c.scores, c.certain) for c in chosen), strict=True)]
    return DeviceChoice(*parts)


def _greedy(logits: torch.Tensor, draws: torch.Tensor, unit: float) -> DeviceChoice:
    best = logits.amax(dim=1)
    vocab_size = logits.shape[1]
    numbers = torch.arange(vocab_size, dtype=torch.int32, device=logits.device)
    ids = torch.where(logits == best[:, None], numbers, vocab_size - 1).amin(dim=1)
    return DeviceChoice(ids.long(), best.double(), torch.ones_like(best, dtype=torch.bool))


def _drawn(logits: torch.Tensor, draws: torch.Tensor, unit: float) -> DeviceChoice:
    """Choose among all ids."""
    rows, vocab_size = logits.shape
    bounds = torch.empty_like(logits)
    kernels.bound_scores[rows, -(-vocab_size // (2 * _PAIRS))](
        logits, draws, bounds, vocab_size, PAIRS=_PAIRS, enable_fp_fusion=False
    )
    bounds, ids = bounds.topk(min(_CANDIDATES, vocab_size), dim=1)
    scores, _ = _scored(logits.gather(1, ids), ids, draws, None)
    best, chosen = _best(scores, ids, vocab_size)
    # A row with NaN is certain: NaN is the largest bound.
    beaten = ~(bounds[:, -1].double() >= best)
    return DeviceChoice(chosen, best, beaten | (bounds.shape[1] == vocab_size))


def _restricted(logits: torch.Tensor, draws: torch.Tensor, unit: float) -> DeviceChoice:
    """Choose among the ids that min-p, top-k and top-p leave, as `sampling` defines them."""
    rows, vocab_size = logits.shape
    top_p, min_p = (draws[:, field].contiguous().view(torch.float64)[:, None] for field in (_TOP_P, _MIN_P))
    top_k = draws[:, _TOP_K, None]
    top_k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    likely, ids = logits.topk(min(_LIKELY, vocab_size), dim=1)
    ids, by_id = ids.sort(dim=1)  # ties in order of id
    likely, order = likely.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    tops = likely[:, 0].contiguous()
    scores, weights = _scored(likely, ids, draws, tops)
    kept = (weights >= min_p) & (torch.arange(likely.shape[1], device=logits.device) < top_k)
    units = torch.where(kept, (weights * unit).to(torch.int64), 0)
    sums = torch.empty(rows, -(-vocab_size // _WIDTH), dtype=torch.int64, device=logits.device)
    kernels.sum_weights[tuple(sums.shape)](
        logits, tops, draws, sums, vocab_size, UNIT=unit, WIDTH=_WIDTH, enable_fp_fusion=False
    )
    total = torch.where(top_k < vocab_size, units.sum(dim=1, keepdim=True), sums.sum(dim=1, keepdim=True))
    before = units.cumsum(dim=1) - units
    kept &= (top_p >= 1) | ~(before.double() >= top_p * total.double())
    kept[:, 0] = True
    best, chosen = _best(scores.masked_fill(~kept, -torch.inf), ids, vocab_size)
    # Which of the ids that are as likely as the last one are here is arbitrary. If none of them is kept, whatever
    # excludes them excludes all that are not likelier, too; of min-p, but for the errors of weights.
    kept_last = (kept & (likely == likely[:, -1:])).any(dim=1)
    last, least = weights[:, -1], min_p[:, 0]
    certain = ~kept_last & ((last >= least) | (last < least * (1 - _WEIGHT_SLACK)))
    return DeviceChoice(chosen, best, certain | (likely.shape[1] == vocab_size))


def _scored(
    logits: torch.Tensor, ids: torch.Tensor, draws: torch.Tensor, tops: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of ids [B, N] with these logits, and with `tops` [B] their weights, float64 [B, N] each."""
    rows, count = ids.shape
    scores = torch.empty(rows, count, dtype=torch.float64, device=ids.device)
    weights = scores if tops is None else torch.empty_like(scores)
    width = min(_CANDIDATES, 1 << (count - 1).bit_length())
    kernels.score_candidates[rows, -(-count // width)](
        logits,
        ids,
        logits if tops is None else tops,
        draws,
        scores,
        weights,
        count,
        WIDTH=width,
        WEIGHS=tops is not None,
        enable_fp_fusion=False,
    )
    return scores, weights


def _best(scores: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest scores [B], and of each the lowest id."""
    best = scores.amax(dim=1)
    return best, torch.where(scores == best[:, None], ids, vocab_size - 1).amin(dim=1)


def _on_device(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    flat = torch.from_numpy(array)
    return flat.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else flat
