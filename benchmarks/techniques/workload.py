"""Techniques, and the requests that they serve."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from frontend.tokenizer import Tokenizer
from traces import load_conversation
from worker.policy import BatchLimits, BatchPlan, plan_step

Stages = Literal["overlapped", "serial"]
Batching = Literal["merged", "apart", "static"]
Allocation = Literal["predicted", "pages", "reserve-max"]

MAX_TOKENS: Final = 400  # of each request: that of the trace, in the scale of its answers
LIMITS: Final = BatchLimits(max_batch=32, chunk_tokens=256, block_tokens=16)
_PROMPT_SCALE, _ANSWER_SCALE = 128, 5
_FIRST_ROW = 500  # those before it are what the predictor has learned from


@dataclass(frozen=True)
class Technique:
    """How a server works.

    stages: tokenising and detokenising run in another process while the engine computes, or in its thread.
    batching: a step computes decoding sequences together with prompts, or either; `static`: no sequence joins a batch
    before all others have ended.
    allocation: a sequence begins with the pages that answers like it take, or that its prompt takes, and gets more as
    it grows; or with all that it may take.
    """

    stages: Stages = "overlapped"
    batching: Batching = "merged"
    allocation: Allocation = "predicted"


@dataclass(frozen=True)
class TimedRequest:
    """A request: when it is sent (seconds after the start), its prompt and how many tokens it takes of the answer."""

    at_s: float
    text: str
    answer_tokens: int


@dataclass
class AnsweredRequest:
    """Tokens of a served request and their times, in seconds after the start."""

    first_token_s: float = 0.0
    end_s: float = 0.0
    tokens: tuple[int, ...] = ()
    text: str = ""


def arrivals(count: int, tokenizer: Tokenizer, text: str, rate: float | None, seed: int = 7) -> list[TimedRequest]:
    """Return `count` requests with the trace's lengths, scaled down, and prompts out of `text`.

    They are sent at `rate` per second on average (Poisson), or all at once.
    """
    rng, gaps = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    ids = tokenizer.encode(text, add_special_tokens=False)
    at_s = np.cumsum(gaps.exponential(1 / rate, count)) if rate else np.zeros(count)
    found = []
    for row, sent_s in zip(load_conversation().rows[_FIRST_ROW:], at_s.tolist(), strict=False):
        length = max(2, row.input_length // _PROMPT_SCALE)
        begin = int(rng.integers(0, len(ids) - length))
        prompt = tokenizer.decode(ids[begin : begin + length], skip_special_tokens=True)
        found.append(TimedRequest(sent_s, prompt, max(1, min(MAX_TOKENS, row.output_length // _ANSWER_SCALE))))
    return found


def earlier_lengths() -> list[tuple[int, int]]:
    """Return (prompt tokens, answer tokens) of the requests before those that are served."""
    rows = load_conversation().rows[:_FIRST_ROW]
    return [(row.input_length // _PROMPT_SCALE, max(1, row.output_length // _ANSWER_SCALE)) for row in rows]


def pages_of_documentation() -> str:
    """Return the text from which prompts are cut: the project's own pages."""
    folder = Path(__file__).resolve().parents[2] / "docs"
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md")))


def plan_apart(
    decode_remaining: Sequence[int], prefill_progress: Sequence[tuple[int, int]], limits: BatchLimits
) -> BatchPlan:
    """Plan a step of prompts if there are any, otherwise one of decoding sequences."""
    return plan_step([], prefill_progress, limits) if prefill_progress else plan_step(decode_remaining, [], limits)
