"""Sampling of the next token by Gumbel-max over counter-based noise. `engine.steering` changes the logits before.

The noise of a vocabulary id depends only on (seed, choice, index, id), not on the batch, the device or the node, so a
request continues with the same tokens after it moves. Given equal logits, choices are equal on CPU and CUDA: the noise
is computed by `engine.exact_math`, and top-p sums are integers.

Scores are `logit + temperature * gumbel`, whose argmax is a draw from softmax(logit / temperature). They are in units
of logits at every temperature; temperature 0 is the greedy choice. Ties go to the lower id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch

from engine import exact_math
from engine.errors import SamplingError
from engine.exact_math import philox4x32
from engine.sampling_kernels import DRAW, choose_rows

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
# Top-p weights are multiples of 2^-40 of the most likely id's weight: sums over up to 2^22 ids cannot overflow.
_PROBABILITY_UNIT = float(1 << 40)


@dataclass(frozen=True)
class SamplingRow:
    """Sampling parameters of one row of logits: `index` of the generated token, `choice` among parallel answers."""

    temperature: float  # 0 = greedy
    top_p: float  # 1 = off
    top_k: int  # 0 = off
    seed: int  # taken modulo 2^64
    choice: int
    index: int
    min_p: float = 0.0  # 0 = off

    @property
    def is_restricted(self) -> bool:
        """True if some ids may be excluded."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> npt.NDArray[np.int64]:
    """Return one id per row of logits [B, V], int64 [B].

    Raises `SamplingError` for invalid parameters and for NaN or infinite logits.
    """
    ids, scores = queue_choice(logits, rows).read()
    if not bool(scores.isfinite().all()):
        raise damaged_logits()
    chosen: npt.NDArray[np.int64] = ids.numpy()
    return chosen


def damaged_logits() -> SamplingError:
    """Return the error for rows whose score is not finite."""
    return SamplingError("the logits contain NaN or infinity: the model's weights or its KV are damaged")


@dataclass(frozen=True)
class QueuedChoice:
    """Ids that are chosen on the logits' device, where they can be used before the host has read them."""

    ids: torch.Tensor  # int64 [B], on the device; meaningless for rows that are not certain
    scores: torch.Tensor  # float64 [B], on the device
    host: torch.Tensor | None = None  # int64 [3, B]: ids, bits of scores, certainty; None: all rows are certain
    copied: torch.cuda.Event | None = None  # after which `host` is there; None: it is
    logits: torch.Tensor | None = None  # [B, V], of rows that may not be certain, and their parameters
    rows: Sequence[SamplingRow] = ()

    @classmethod
    def of(
        cls,
        ids: torch.Tensor,
        scores: torch.Tensor,
        certain: torch.Tensor,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
    ) -> "QueuedChoice":
        """Queue the copy to the host now, so that reading does not wait for what is queued later."""
        found = torch.stack([ids, scores.view(torch.int64), certain.long()])
        if not found.is_cuda:
            return cls(ids, scores, found, None, logits, rows)
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(found.device))
        return cls(ids, scores, host, copied, logits, rows)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `choose` does, on the CPU. The host waits once, or twice if some rows were not certain."""
        if self.host is None or self.logits is None:
            return self.ids, self.scores
        if self.copied is not None:
            self.copied.synchronize()
        ids, scores = self.host[0].clone(), self.host[1].clone().view(torch.float64)
        if unsure := (self.host[2] == 0).nonzero()[:, 0].tolist():
            chosen, best = choose_by_tensors(self.logits[unsure], [self.rows[i] for i in unsure])
            ids[unsure], scores[unsure] = chosen.cpu(), best.cpu()
        return ids, scores


def choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (one id per row, int64 [B]; its score, float64 [B]) of logits [B, V], without waiting for a device.

    The id of a row whose score is not finite is meaningless. Raises `SamplingError` for invalid parameters.
    """
    _check_shapes(logits, rows)
    if logits.device.type == "cpu":
        return _choose_compiled(logits, rows)
    return choose_by_tensors(logits, rows)


def queue_choice(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> QueuedChoice:
    """Choose as `choose` does, on a GPU by bounds where Triton is installed; the host waits when it reads the choice.

    Raises `SamplingError` for invalid parameters.
    """
    if logits.device.type == "cpu":
        return QueuedChoice(*choose(logits, rows))
    if logits.dtype == torch.float64 or find_spec("triton") is None:
        ids, scores = choose(logits, rows)
        return QueuedChoice.of(ids, scores, torch.ones_like(ids, dtype=torch.bool), logits, rows)
    return queue_by_bounds(logits, rows)


def queue_by_bounds(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> QueuedChoice:
    """Return the choice of logits in float32 or less, on a GPU or in Triton's interpreter.

    Rows of which the bounds decide nothing are known only when the choice is read: then all of their scores are
    computed.
    """
    from engine.device_sampling import choose_on_device  # only GPUs have Triton

    _check_shapes(logits, rows)
    # Triton launches kernels on the current device.
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        choice = choose_on_device(logits, _draws(rows), _PROBABILITY_UNIT)
    return QueuedChoice.of(choice.ids, choice.scores, choice.certain, logits, rows)


def choose_by_tensors(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `choose`, bit for bit, on any device: the reference, which computes the scores of all ids."""
    scores = _scores(logits, rows, 0.0)
    best, ids = scores.max(dim=1)
    vocabulary = torch.arange(scores.shape[1], device=scores.device)
    ids = torch.where(scores == best[:, None], vocabulary, scores.shape[1]).amin(dim=1)
    return ids.clamp(max=scores.shape[1] - 1), best


def _choose_compiled(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    draws = _draws(rows)
    ids, scores = np.empty(len(rows), np.int64), np.empty(len(rows))
    values = logits if logits.dtype == torch.float64 else logits.float()
    choose_rows(values.contiguous().numpy(), draws, _PROBABILITY_UNIT, ids, scores)
    return torch.from_numpy(ids), torch.from_numpy(scores)


def _draws(rows: Sequence[SamplingRow]) -> npt.NDArray[np.void]:
    """Return the rows as an array of dtype DRAW. Raises `SamplingError`."""
    for row in rows:
        _check(row)
    return np.array(
        [(r.temperature, r.top_p, r.min_p, r.top_k, r.seed & _MASK64, r.choice, r.index) for r in rows], DRAW
    )


def noisy_scores(
    logits: torch.Tensor | npt.NDArray[np.float32], row: SamplingRow, *, slack: float = 0.0
) -> npt.NDArray[np.float64]:
    """Return the scores whose argmax is `sample`'s choice, float64 [V].

    Ids excluded by min-p, top-k or top-p are -inf. `slack` is an error of logits' differences, and of top-p's sums: a
    positive one includes all ids that such an error could include, a negative one excludes all that it could exclude,
    perhaps every id. With 0 the most likely id always stays.
    """
    tensor = logits if isinstance(logits, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(logits))
    scores: npt.NDArray[np.float64] = _scores(tensor[None], [row], slack)[0].cpu().numpy()
    return scores


def _scores(logits: torch.Tensor, rows: Sequence[SamplingRow], slack: float) -> torch.Tensor:
    for row in rows:
        _check(row)
    scores = logits.to(torch.float64, copy=True)
    drawn = [i for i, row in enumerate(rows) if row.temperature > 0]
    if drawn:
        _draw(scores, rows, drawn, slack)
    return scores


def _draw(scores: torch.Tensor, rows: Sequence[SamplingRow], drawn: Sequence[int], slack: float) -> None:
    """Add noise to the rows `drawn` of scores [B, V] and exclude ids, in place."""
    chosen = [rows[i] for i in drawn]
    device = scores.device
    temperature = torch.tensor([row.temperature for row in chosen], dtype=torch.float64, device=device)[:, None]
    logits = scores[drawn]
    noisy = logits + temperature * gumbel_noise(chosen, scores.shape[1], device)
    if any(row.is_restricted for row in chosen):
        noisy.masked_fill_(~_candidates(logits, chosen, temperature, slack), -torch.inf)
    scores[drawn] = noisy


def gumbel_noise(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return standard Gumbel noise, float64 [B, V].

    Counter (id // 2, index, choice, 0) under key `seed` yields four words, two each for an even id and the odd one
    after it. 52 of their bits, centred, are a uniform number strictly between 0 and 1.
    """

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)[:, None]

    pairs = torch.arange((vocab_size + 1) // 2, device=device)[None, :]
    counter = (
        pairs,
        column([row.index for row in rows]),
        column([row.choice for row in rows]),
        torch.zeros_like(pairs),
    )
    key = (column([row.seed & _MASK32 for row in rows]), column([(row.seed >> 32) & _MASK32 for row in rows]))
    w0, w1, w2, w3 = philox4x32(counter, key)
    high, low = torch.stack([w1, w3], dim=-1), torch.stack([w0, w2], dim=-1)
    bits = (high << 20) | (low >> 12)
    uniform = (bits.flatten(1)[:, :vocab_size].to(torch.float64) + 0.5) * 2.0**-52
    return -exact_math.log(-exact_math.log(uniform))


def _candidates(
    logits: torch.Tensor, rows: Sequence[SamplingRow], temperature: torch.Tensor, slack: float
) -> torch.Tensor:
    """Return bool [B, V]: the ids left by min-p, then top-k, then top-p of the remaining distribution (vLLM's order).

    Min-p keeps ids whose probability is at least `min_p` times that of the most likely id. Top-p keeps the shortest run
    of most likely ids whose probability reaches p; ties are in order of id.
    """
    vocab_size = logits.shape[1]
    device = logits.device
    ordered, order = torch.sort(logits, dim=1, descending=True, stable=True)
    top_k = torch.tensor([row.top_k or vocab_size for row in rows], device=device).clamp(max=vocab_size)[:, None]
    top_p = torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=device)[:, None]
    min_p = torch.tensor([row.min_p for row in rows], dtype=torch.float64, device=device)[:, None]
    rank = torch.arange(vocab_size, device=device)[None, :]
    kept = ordered >= ordered.gather(1, top_k - 1) - slack if slack else rank < top_k
    below = ordered - ordered[:, :1]
    weight = exact_math.exp(below / temperature)
    kept &= (exact_math.exp((below + slack).clamp(max=0.0) / temperature) if slack else weight) >= min_p
    units = torch.where(kept, (weight * _PROBABILITY_UNIT).to(torch.int64), 0)
    before = units.cumsum(dim=1) - units
    if slack:
        before = _before_with_errors(units, ordered, slack)
    total = units.sum(dim=1, keepdim=True)
    # A p of 1 must keep ids of zero weight too; below 1, integers become floats only after the exact summation.
    reached = before.to(torch.float64) >= (top_p + slack).clamp(min=0.0) * total.to(torch.float64)
    kept &= (top_p >= 1) | ~reached
    if slack >= 0:
        kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _before_with_errors(units: torch.Tensor, ordered: torch.Tensor, slack: float) -> torch.Tensor:
    """Return the least (slack > 0) or greatest sum, int64 [B, V], of the weights before each id.

    Errors of logits' differences of up to |slack| can lead to it: they may exchange ids.

    `units` [B, V] are the weights in the descending order of the logits `ordered`.
    """
    falling, sums = -ordered, torch.nn.functional.pad(units.cumsum(dim=1), (1, 0))
    if slack > 0:
        return sums.gather(1, torch.searchsorted(falling, falling - slack))
    return sums.gather(1, torch.searchsorted(falling, falling - slack, right=True)) - units


def _check_shapes(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    if logits.dim() != 2 or len(rows) != len(logits):
        raise SamplingError(
            f"logits must be [B, V] with B rows of parameters, got {list(logits.shape)} and {len(rows)} rows"
        )


def _check(row: SamplingRow) -> None:
    if not 0 <= row.temperature < float("inf"):
        raise SamplingError(f"temperature must be finite and not negative, got {row.temperature}")
    if not 0 < row.top_p <= 1:
        raise SamplingError(f"top_p must be above 0 and at most 1, got {row.top_p}")
    if not 0 <= row.min_p <= 1:
        raise SamplingError(f"min_p must be from 0 (off) to 1, got {row.min_p}")
    if row.top_k < 0:
        raise SamplingError(f"top_k must be 0 (off) or positive, got {row.top_k}")
    if not 0 <= row.choice <= _MASK32 or not 0 <= row.index <= _MASK32:
        raise SamplingError(f"choice and index must be in 0..2^32-1, got {row.choice} and {row.index}")
