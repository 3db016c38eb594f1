"""Reports on requests: metrics, log line and span attributes at a request's end, and recent requests for the
console.
"""

import logging
import time
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Final, Literal

from frontend.output import FinishReason
from frontend.request import GenerationRequest, RequestStats
from telemetry import RequestMetrics, logs

_log = logging.getLogger(__name__)


RequestOutcome = Literal["finished", "failed", "cancelled"]


def report_end(
    request: GenerationRequest,
    stats: RequestStats,
    metrics: RequestMetrics,
    outcome: RequestOutcome,
    finish_reason: FinishReason | None,
) -> None:
    """Report one ended answer to the metrics, the request's span and the log. `finish_reason` is set if it finished."""
    if stats.attempts:
        _count(request, stats, metrics, outcome, finish_reason)
    if request.span.is_on and not request.sampling.choice:
        _trace(request, stats, outcome)
    with logs.request(request.request_id, stats.attempts - 1 if stats.attempts else None):
        _log.info("request %s", outcome, extra=_log_fields(request, stats))


def _count(
    request: GenerationRequest,
    stats: RequestStats,
    metrics: RequestMetrics,
    outcome: RequestOutcome,
    finish_reason: FinishReason | None,
) -> None:
    if outcome == "cancelled":
        metrics.finished("abort")
    elif finish_reason is None:
        metrics.finished("error")
    else:
        metrics.finished(finish_reason)
        assert stats.first_token_s is not None  # a finished request has had a token
        assert stats.last_token_s is not None
        metrics.e2e.observe(stats.last_token_s - request.arrival_s)
        metrics.decode.observe(stats.last_token_s - stats.first_token_s)
        metrics.request_prompt_tokens.observe(len(request.prompt_ids))
        metrics.request_generation_tokens.observe(len(stats.token_ids))


def _trace(request: GenerationRequest, stats: RequestStats, outcome: RequestOutcome) -> None:
    """Set the span's attributes from the prompt's first choice."""
    span = request.span
    span.note(
        request_id=request.request_id,
        outcome=outcome,
        attempts=stats.attempts,
        cached_tokens=stats.cached_tokens,
        gen_ai__request__model=request.model,
        gen_ai__usage__input_tokens=len(request.prompt_ids),
        gen_ai__usage__output_tokens=len(stats.token_ids),
    )
    if outcome == "failed" and stats.token_ids:  # the HTTP status was 200
        span.fail("the request failed after its first token")


def _log_fields(request: GenerationRequest, stats: RequestStats) -> dict[str, object]:
    return {
        "prompt_tokens": len(request.prompt_ids),
        "generated": len(stats.token_ids),
        "cached_tokens": stats.cached_tokens,
        "attempts": stats.attempts,
        "prefill_node": stats.prefill_node,
        "decode_node": stats.decode_node,
        "seconds": round(monotonic() - request.arrival_s, 4),
    }


_MOST: Final = 1024


class RecentRequests:
    """Records of the last ended answers by request id. They contain no text."""

    def __init__(self, clock: Callable[[], float] = time.time, most: int = _MOST) -> None:
        """`clock` returns seconds since 1970; the records of the last `most` answers are kept."""
        self._clock = clock
        self._most = most
        self._ended: dict[str, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def ended(self, request: GenerationRequest, stats: RequestStats, outcome: str) -> None:
        """Record an ended answer."""
        self._ended.pop(request.request_id, None)
        self._ended[request.request_id] = answer_record(request, stats, outcome, self._clock())
        if len(self._ended) > self._most:
            del self._ended[next(iter(self._ended))]

    def find(self, request_id: str) -> Mapping[str, Any] | None:
        """Return the record of an ended answer as JSON data, or None."""
        return self._ended.get(request_id)


def answer_record(request: GenerationRequest, stats: RequestStats, outcome: str, now_s: float) -> Mapping[str, Any]:
    """Return an answer's current state as JSON data.

    The parts of TTFT and of the hand-off are in seconds; None if the answer has none.
    """
    since_s = monotonic() - request.arrival_s
    return {
        "request_id": request.request_id,
        "at_s": now_s - since_s,
        "model": request.model,
        "outcome": outcome,
        "seconds": since_s,
        "attempts": stats.attempts,
        "prompt_tokens": len(request.prompt_ids),
        "generated": len(stats.token_ids),
        "cached_tokens": stats.cached_tokens,
        "cached_from": {
            "memory": stats.cached_dram_tokens,
            "ssd": stats.cached_ssd_tokens,
            "remote": stats.cached_remote_tokens,
        },
        "prefill": stats.prefill_node,
        "decode": stats.decode_node,
        "tokenize_s": request.tokenize_s,
        "schedule_s": stats.schedule_s,
        "ttft": None if stats.ttft is None else dict(stats.ttft.parts()),
        "handoff": None if stats.handoff is None else dict(stats.handoff.parts()),
        "tbt_s": stats.mean_tbt_s or None,
    }
