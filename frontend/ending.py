"""What is told of a request once it is over: counters, a line in the log, the facts of its span."""

import logging
from time import monotonic
from typing import Literal

from frontend.output import FinishReason
from frontend.request import Facts, GenerationRequest
from telemetry import RequestMetrics, logs

__all__ = ["Outcome", "tell_end"]

_log = logging.getLogger(__name__)
Outcome = Literal["finished", "failed", "cancelled"]


def tell_end(
    request: GenerationRequest,
    facts: Facts,
    metrics: RequestMetrics,
    outcome: Outcome,
    finish_reason: FinishReason | None,
) -> None:
    """Once per answer. `finish_reason` where it finished."""
    if facts.attempts:
        _count(request, facts, metrics, outcome, finish_reason)
    if request.span.is_on and not request.sampling.choice:
        _trace(request, facts, outcome)
    with logs.request(request.request_id, facts.attempts - 1 if facts.attempts else None):
        _log.info("request %s", outcome, extra=_said(request, facts))


def _count(
    request: GenerationRequest,
    facts: Facts,
    metrics: RequestMetrics,
    outcome: Outcome,
    finish_reason: FinishReason | None,
) -> None:
    if outcome == "cancelled":
        metrics.finished("abort")
    elif finish_reason is None:
        metrics.finished("error")
    else:
        metrics.finished(finish_reason)
        assert facts.first_token_s is not None  # finished means a token came
        assert facts.last_token_s is not None
        metrics.e2e.observe(facts.last_token_s - request.arrival_s)
        metrics.decode.observe(facts.last_token_s - facts.first_token_s)
        metrics.request_prompt_tokens.observe(len(request.prompt_ids))
        metrics.request_generation_tokens.observe(len(facts.token_ids))


def _trace(request: GenerationRequest, facts: Facts, outcome: Outcome) -> None:
    """A prompt's first answer speaks for the others."""
    span = request.span
    span.note(
        request_id=request.request_id,
        outcome=outcome,
        attempts=facts.attempts,
        cached_tokens=facts.cached_tokens,
        gen_ai__request__model=request.model,
        gen_ai__usage__input_tokens=len(request.prompt_ids),
        gen_ai__usage__output_tokens=len(facts.token_ids),
    )
    if outcome == "failed" and facts.token_ids:  # the status, which went out before, said otherwise
        span.fail("it failed after its first token")


def _said(request: GenerationRequest, facts: Facts) -> dict[str, object]:
    return {
        "prompt_tokens": len(request.prompt_ids),
        "generated": len(facts.token_ids),
        "cached_tokens": facts.cached_tokens,
        "attempts": facts.attempts,
        "prefill_node": facts.prefill_node,
        "decode_node": facts.decode_node,
        "seconds": round(monotonic() - request.arrival_s, 4),
    }
