"""Record of one request and the figures derived from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class SendOutcome(StrEnum):
    """Outcome of a request. `UNFINISHED`: the run was interrupted before the request ended."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    UNFINISHED = "unfinished"


@dataclass
class RequestRecord:
    """Record of one request, measured at the client. Times are seconds on the run's clock (0: the first due time).

    `due_s`: planned send time. `sent_s`: first attempt; `attempts`: number of attempts. `held_s`: delay by the
    concurrency limit. `token_times`: arrival of each output token; tokens of the same event share a time.
    `event_times`: arrival of each event with a choice. `token_ids`, `text`: the output, if the server returns ids and
    the dialect keeps the text. `prompt_ids`: the prompt's ids, if the server returns them. `cached_tokens`,
    `output_tokens`: as reported by the server. `extension`: the server's `moonpool` object. `reason`: why the request
    failed or was rejected.
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
        """Delay of the sender in seconds: from the due time to sending, excluding the concurrency limit."""
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
        """Return the record as one line of requests.jsonl, with times rounded to microseconds and NaN as None."""

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
    """Return the mean of the longest tenth (rounded up) of the values; NaN if empty. Mooncake's TBT of a request."""
    if not values:
        return math.nan
    worst = sorted(values)[-math.ceil(len(values) / 10) :]
    return sum(worst) / len(worst)
