"""What work costs: prefill(new, reused), decode step(batch, context), transfer(bytes). Fitted per model, online.

The priors describe a small model on a CPU or a large one on a GPU about equally badly; one sample sets their scale.
"""

from typing import Any

from conductor.policy.events import DecodeSample, PrefillSample, TransferSample
from conductor.policy.regression import LONGEST_S, CostFit
from worker.policy.cost_formulas import fetch_s, prefill_s, read_s, tbt_s

__all__ = ["MeanDuration", "ModelCosts", "TransferCosts", "fetch_s", "prefill_s", "read_s", "tbt_s"]

_PREFILL_PRIOR = (5e-3, 2e-4, 1e-8)  # per request, per new token, per (new token, token attended to)
_DECODE_PRIOR = (5e-3, 5e-4, 1e-7)  # per step, per sequence, per token of context
_TRANSFER_PRIOR = (5e-4, 1e-9)  # per batch, per byte
_LOAD_PRIOR = (1e-4, 2e-10)  # likewise, within a host
_SSD_PRIOR = (1e-3, 2e-9)
_FETCHES = ("fetch", "pull", "copy")  # the paths that read from a pool node, most of them over the network
_MEMORY = 0.95


class MeanDuration:
    """A running mean; None before the first value."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.mean_s: float | None = None

    def add(self, seconds: float) -> None:
        """Learn from one measurement that can be true."""
        if not 0 <= seconds < LONGEST_S:
            return
        self.num_samples += 1
        memory = min(_MEMORY, 1 - 1 / self.num_samples)
        self.mean_s = seconds if self.mean_s is None else memory * self.mean_s + (1 - memory) * seconds


class ModelCosts:
    """One model's compute costs, over all its nodes."""

    def __init__(self) -> None:
        self._prefill = CostFit(_PREFILL_PRIOR)
        self._decode = CostFit(_DECODE_PRIOR)
        self._step = MeanDuration()
        self.decode_time = MeanDuration()  # t_d: how long a request decodes

    def add_prefill(self, sample: PrefillSample) -> None:
        self._prefill.add(_prefill_features(sample.new_tokens, sample.reused_tokens), sample.seconds)

    def add_decode(self, sample: DecodeSample) -> None:
        if sample.batch > 0:
            self._decode.add((1.0, sample.batch, sample.context_tokens), sample.seconds)
            self._step.add(sample.seconds)

    @property
    def prefill(self) -> tuple[float, float, float]:
        """What `prefill_s` starts with."""
        fixed, per_token, per_pair = self._prefill.coefficients
        return fixed, per_token, per_pair

    @property
    def decode(self) -> tuple[float, float, float]:
        """What `tbt_s` starts with."""
        fixed, per_sequence, per_token = self._decode.coefficients
        return fixed, per_sequence, per_token

    def prefill_cost_s(self, new_tokens: int) -> float:
        """Seconds to prefill `new_tokens` with nothing reused."""
        return self._prefill.predict(_prefill_features(new_tokens, 0))

    @property
    def typical_step_s(self) -> float:
        """Seconds between a request's tokens as lately seen."""
        return self._step.mean_s if self._step.mean_s is not None else self._decode.predict((1.0, 1.0, 0.0))

    def summary(self) -> dict[str, Any]:
        """For export."""
        return {
            "prefill": self._prefill.summary(),
            "decode": self._decode.summary(),
            "decode_time_s": self.decode_time.mean_s,
        }


class TransferCosts:
    """Cost of moving KV bytes, per path. Nothing costs nothing: 0 seconds for 0 bytes."""

    def __init__(self) -> None:
        self._fits = {
            "fetch": CostFit(_TRANSFER_PRIOR),
            "load": CostFit(_LOAD_PRIOR),
            "ssd_read": CostFit(_SSD_PRIOR),
        }

    def add(self, sample: TransferSample) -> None:
        path = "fetch" if sample.path in _FETCHES else sample.path
        fit = self._fits.setdefault(path, CostFit(_TRANSFER_PRIOR))
        if sample.nbytes > 0:
            fit.add((1.0, sample.nbytes), sample.seconds)

    def of(self, path: str) -> tuple[float, float]:
        """What `read_s` starts with for a path."""
        fixed, per_byte = self._fits[path].coefficients
        return fixed, per_byte

    def fetch_s(self, nbytes: float, num_concurrent: int) -> float:
        """Seconds to read `nbytes` from another host's pool node that sends to `num_concurrent` others."""
        return fetch_s(read_s(*self.of("fetch"), nbytes, num_concurrent), self.load_s(nbytes))

    def load_s(self, nbytes: float) -> float:
        """Seconds to read `nbytes` from the memory of the host's own pool node."""
        return read_s(*self.of("load"), nbytes, 0)

    def ssd_read_s(self, nbytes: float) -> float:
        """Seconds for a pool node to bring `nbytes` from SSD to memory."""
        return read_s(*self.of("ssd_read"), nbytes, 0)

    def summary(self) -> dict[str, Any]:
        """For export."""
        return {path: fit.summary() for path, fit in sorted(self._fits.items())}


def _prefill_features(new_tokens: int, reused_tokens: int) -> tuple[float, float, float]:
    # Each new token attends to all reused ones and to half of the new ones.
    return 1.0, float(new_tokens), new_tokens * (reused_tokens + new_tokens / 2)
