"""Log-probabilities and ranks of given token ids, and of the most likely ids.

The distribution is the softmax of the model's logits, before any processing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import SamplingError

_SLICE_VALUES = 1 << 22  # logits processed at once: bounds the memory needed besides the logits


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one id in each of B rows. Ties in `ranks` and `top_ids` are ordered by id."""

    logprobs: npt.NDArray[np.float32]  # [B]
    ranks: npt.NDArray[np.int64]  # [B]: 1 = the likeliest
    top_ids: npt.NDArray[np.int32]  # [B, num_top], likeliest first
    top_logprobs: npt.NDArray[np.float32]  # [B, num_top]


def log_probs(logits: torch.Tensor, ids: npt.NDArray[np.integer], num_top: int) -> TokenLogprobs:
    """Return the log-probabilities of `ids` [B] under logits [B, V], with those of the `num_top` (0 to V) most likely
    ids.

    Raises `SamplingError`.
    """
    count, vocab_size = logits.shape
    if len(ids) != count or not 0 <= num_top <= vocab_size:
        raise SamplingError(
            f"ids must have one entry per row and num_top be in 0..V of logits {list(logits.shape)}, "
            f"got {len(ids)} ids and num_top {num_top}"
        )
    step = max(1, _SLICE_VALUES // vocab_size)
    parts = [_slice(logits[at : at + step], ids[at : at + step], num_top) for at in range(0, count, step)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        parts = [_slice(logits, ids, num_top)]
    return TokenLogprobs(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )


def _slice(logits: torch.Tensor, ids: npt.NDArray[np.integer], num_top: int) -> TokenLogprobs:
    values = torch.log_softmax(logits.float(), dim=1)
    own = torch.from_numpy(np.asarray(ids, np.int64)).to(values.device)[:, None]
    chosen = values.gather(1, own)
    earlier = (values == chosen) & (torch.arange(values.shape[1], device=values.device) < own)
    top_ids, top = _likeliest(values, num_top)
    return TokenLogprobs(
        logprobs=chosen[:, 0].cpu().numpy(),
        ranks=((values > chosen) | earlier).sum(dim=1).add_(1).cpu().numpy(),
        top_ids=top_ids,
        top_logprobs=top,
    )


def _likeliest(values: torch.Tensor, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the most likely ids and their values in the order of a stable sort.

    torch.topk does not order equal values, so ties are resolved here without sorting the whole row.
    """
    if not count or not len(values):
        empty = (len(values), count)
        return np.empty(empty, np.int32), np.empty(empty, np.float32)
    least = values.topk(count, dim=1).values[:, -1:]
    at = (values >= least).nonzero()
    found = values[at[:, 0], at[:, 1]].cpu().numpy()
    rows, ids = at.cpu().numpy().T
    order = np.lexsort((ids, -found, rows))
    begins = np.searchsorted(rows, np.arange(len(values)))
    taken = order[begins[:, None] + np.arange(count)]
    return ids[taken].astype(np.int32), found[taken]
