"""Record of one request, and the figures computed from it alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class SendOutcome(StrEnum):
    """Outcome of a request. `UNFINISHED`: the replay was interrupted first."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    UNFINISHED = "unfinished"


@dataclass
class RequestRecord:
    """One request's life as the client saw it. Times are seconds on the replay's clock (0 = the first arrival due).

    `token_times`: the arrival of each output token; tokens that came in one event share a time. `event_times`: the
    arrival of each event that has a choice. `token_ids`, `text`: the output, as far as the server gives ids and the
    dialect keeps the text. `prompt_ids`: the prompt's, where the server tells those of a chat. `cached_tokens`,
    `output_tokens`: as the server reports them. `extension`: the server's `moonpool` object. `reason`: why it failed or
    was rejected. `sent_s`: the first sending, `attempts`: how often it was sent. `held_s`: how long a limit of
    concurrent requests kept it back when it was due.
    """

    index: int
    due_s: float
    prompt_tokens: int
    max_tokens: int
    temperature: float
    seed: int
    overlong: bool = False
    sent_s: float = math.nan
    end_s: float = math.nan
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    outcome: SendOutcome = SendOutcome.UNFINISHED
    reason: str = ""
    retry_after_s: float | None = None
    attempts: int = 0
    held_s: float = 0.0
    cached_tokens: int = 0
    output_tokens: int = 0
    event_times: list[float] = field(default_factory=list)
    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    extension: dict[str, Any] = field(default_factory=dict)

    @property
    def lateness_s(self) -> float:
        """Delay of the sender: from the due time to sending, without waiting for a concurrency limit."""
        return self.sent_s - self.due_s - self.held_s

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token; NaN without a token."""
        return self.token_times[0] - self.sent_s if self.token_times else math.nan

    @property
    def intervals_s(self) -> list[float]:
        """Seconds between successive output tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tbt_worst10_s(self) -> float:
        """Mean of the longest tenth (rounded up) of the intervals; NaN with fewer than two tokens."""
        return worst_tenth_mean(self.intervals_s)

    def as_json(self) -> dict[str, Any]:
        """The record as one line of requests.jsonl: times rounded to the microsecond, NaN as null."""

        def seconds(value: float) -> float | None:
            return round(value, 6) if math.isfinite(value) else None

        return {
            "index": self.index,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "attempts": self.attempts,
            "due_s": seconds(self.due_s),
            "sent_s": seconds(self.sent_s),
            "end_s": seconds(self.end_s),
            "ttft_s": seconds(self.ttft_s),
            "tbt_worst10_s": seconds(self.tbt_worst10_s),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "overlong": self.overlong,
            "token_ids": self.token_ids,
            "token_times_s": [round(t, 6) for t in self.token_times],
            "moonpool": self.extension,
        }


def worst_tenth_mean(values: Sequence[float]) -> float:
    """Mean of the longest tenth of the values, at least one of them; NaN of none. (Mooncake's TBT of a request.)"""
    if not values:
        return math.nan
    worst = sorted(values)[-math.ceil(len(values) / 10) :]
    return sum(worst) / len(worst)
