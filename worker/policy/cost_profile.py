"""Cost profiles: coefficients of the durations of work, with measured ranges and errors, for one model and machine.

Predictions are pure arithmetic (`cost_formulas`); beyond the measured range they are lengthened by
`cost_formulas.margin`. The file is JSON, parsed strictly.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from worker.errors import ProfileError
from worker.policy.cost_formulas import fetch_s, margin, prefill_s, read_nbytes, read_s, tbt_s
from worker.policy.profile_file import STRICT, ProfileFile

__all__ = [
    "BUNDLED_PROFILES",
    "MOONCAKE",
    "CostProfile",
    "DecodeCost",
    "FitError",
    "PrefillCost",
    "Range",
    "TransferCost",
    "load_profile",
    "save_profile",
]

BUNDLED_PROFILES: Final = Path(__file__).resolve().parent.parent / "profiles"
MOONCAKE: Final = BUNDLED_PROFILES / "mooncake-70b-8xa800.json"  # analytic: derived in `analytic_costs`

Seconds = Annotated[float, Field(ge=0, le=1e4)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, config=STRICT)
class Range:
    """Measured range from `least` to `most`."""

    least: Annotated[float, Field(ge=0)]
    most: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _ordered(self) -> "Range":
        if self.least > self.most:
            raise ValueError(f"least must not exceed most ({self.most:g}), got {self.least:g}")
        return self

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most


@dataclass(frozen=True, slots=True, config=STRICT)
class FitError:
    """Relative error of the fitted formula, |predicted - measured| / measured, over `points` points."""

    points: Annotated[int, Field(ge=1)]
    median: Annotated[float, Field(ge=0)]
    p90: Annotated[float, Field(ge=0)]
    worst: Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True, config=STRICT)
class PrefillCost:
    """Cost of one prompt; `per_pair_s` counts once per (new token, token that it attends to).

    Without `error` the cost was not measured.
    """

    fixed_s: Seconds
    per_token_s: Seconds
    per_pair_s: Seconds
    new_tokens: Range
    prompt_tokens: Range  # new and reused ones
    error: FitError | None = None


@dataclass(frozen=True, slots=True, config=STRICT)
class DecodeCost:
    """Cost of one step that generates one token for each sequence of a batch."""

    fixed_s: Seconds
    per_sequence_s: Seconds
    per_token_s: Seconds  # of context, over all sequences
    batch: Range
    context_tokens: Range  # over all sequences
    error: FitError | None = None


@dataclass(frozen=True, slots=True, config=STRICT)
class TransferCost:
    """Cost of one batch of bytes over one path."""

    fixed_s: Seconds
    per_byte_s: Seconds
    nbytes: Range
    error: FitError | None = None


@dataclass(frozen=True, slots=True, config=STRICT)
class CostProfile:
    """Costs used by placements, simulated nodes and the paced engine. All times are in seconds.

    `transfers` by path: "fetch" (from another host's pool), "load" (from the own host's), "ssd_read" (within a pool
    node), "push" (prefill to decode), and "messenger_TRANSPORT" if measured separately.

    `kv_bytes_per_token` counts KV groups without a window. Groups with windows have `window_bytes_per_token`, of the
    last `window_tokens` of a prefix only.
    """

    name: str
    kind: Literal["measured", "analytic"]
    made: str  # date, ISO 8601
    model: str
    model_fingerprint: str  # as nodes report it; "" = of no weights in particular
    hardware: str  # as nodes report it, or a description
    kv_bytes_per_token: Count
    engine: Mapping[str, str | int | float | bool]  # settings that the figures apply to: max_batch, threads, dtype, ...
    prefill: PrefillCost
    decode: DecodeCost
    transfers: Mapping[str, TransferCost]
    notes: tuple[str, ...] = ()
    window_tokens: Count = 0
    window_bytes_per_token: Count = 0

    def read_nbytes(self, tokens: int) -> int:
        """Return the bytes of the last `tokens` tokens of a prefix whose next token is to be computed."""
        return read_nbytes(tokens, self.kv_bytes_per_token, self.window_tokens, self.window_bytes_per_token)

    def pushed_nbytes(self, start: int, end: int, prompt_tokens: int) -> int:
        """Return the bytes of a prompt's tokens [start, end) that its decode node needs."""
        seen = max(0, end - max(start, prompt_tokens - self.window_tokens))
        return (end - start) * self.kv_bytes_per_token + seen * self.window_bytes_per_token

    def prefill_s(self, new_tokens: int, reused_tokens: int = 0, *, most_seen: int = 0) -> float:
        """Return the seconds to compute `new_tokens` that follow `reused_tokens`; increases with both.

        With a rolling window, each token sees at most `most_seen` tokens; 0: there is none. Raises ValueError for
        negative numbers.
        """
        _not_negative(new_tokens=new_tokens, reused_tokens=reused_tokens, most_seen=most_seen)
        before = min(reused_tokens, most_seen) if most_seen else reused_tokens
        cost, prompt = self.prefill, before + new_tokens
        seen = min(prompt, most_seen) if most_seen else prompt
        seconds = prefill_s(cost.fixed_s, cost.per_token_s, cost.per_pair_s, prompt, before, most_seen)
        return seconds * margin(seen - before, cost.new_tokens.most, seen, cost.prompt_tokens.most)

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """Return the seconds of one step of `batch` sequences with `context_tokens` in total.

        Raises ValueError for negative numbers.
        """
        return self.tbt_s(batch, context_tokens, max(1, batch))

    def tbt_s(self, batch: int, context_tokens: int, max_batch: int) -> float:
        """Return the seconds between tokens on a node that decodes at most `max_batch` sequences at once.

        More sequences alternate.
        """
        _not_negative(batch=batch, context_tokens=context_tokens, max_batch=max_batch - 1)
        cost, turns = self.decode, max(1.0, batch / max_batch)
        seconds = tbt_s(cost.fixed_s, cost.per_sequence_s, cost.per_token_s, batch, context_tokens, max_batch)
        return seconds * margin(batch / turns, cost.batch.most, context_tokens / turns, cost.context_tokens.most)

    def transfer_s(self, path: str, nbytes: int, num_concurrent: int = 0) -> float:
        """Return the seconds to move `nbytes` over a path whose sender serves `num_concurrent` others; 0 for 0 bytes.

        The time per byte is a bandwidth and has no margin beyond the measured range. Raises ProfileError for a path
        that the profile lacks, ValueError for negative numbers.
        """
        _not_negative(nbytes=nbytes, num_concurrent=num_concurrent)
        cost = self._path(path)
        return read_s(cost.fixed_s, cost.per_byte_s, nbytes, num_concurrent)

    def fetch_s(self, nbytes: int, num_concurrent: int = 0) -> float:
        """Return the seconds to read from another host's pool node that serves `num_concurrent` others.

        The result is never shorter than `load_s`.
        """
        return fetch_s(self.transfer_s("fetch", nbytes, num_concurrent), self.load_s(nbytes))

    def load_s(self, nbytes: int) -> float:
        """Return the seconds to read from the memory of this host's pool node."""
        return self.transfer_s("load", nbytes)

    def ssd_read_s(self, nbytes: int) -> float:
        """Return the seconds for a pool node to read from its SSD to its memory."""
        return self.transfer_s("ssd_read", nbytes)

    def _path(self, path: str) -> TransferCost:
        if path not in self.transfers:
            raise ProfileError(f"cost profile {self.name!r} has no path {path!r}: it has {', '.join(self.transfers)}")
        return self.transfers[path]


_FILE: Final = ProfileFile("cost profile", "moonpool-cost-profile", 1, CostProfile, "moonpool bench profile")


def load_profile(path: Path) -> CostProfile:
    """Read a profile. Raises ProfileError, which names the file, the field, the value and the expected value."""
    return _FILE.load(path)


def save_profile(profile: CostProfile, path: Path) -> None:
    """Write a profile; `load_profile` reads back an equal one. Raises ProfileError."""
    _FILE.save(profile, path)


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least {1 if name == 'max_batch' else 0}, got {value}")
