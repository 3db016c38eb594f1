"""What is sent to an OpenAI-compatible route and what is read from the events of its answer. Pure.

A dialect is a small value that can be pickled: it goes to the processes that send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from loadtest.errors import StreamFailed
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord

_SHOWN = 200


class Dialect(Protocol):
    """One route: its body, its choices, and what a whole answer has to be."""

    @property
    def path(self) -> str:
        """The route, such as /v1/completions."""

    def body(self, request: PlannedRequest, *, model: str, cache_salt: str) -> dict[str, Any]:
        """What is posted."""

    def take_choice(self, choice: dict[str, Any], now: float, record: RequestRecord, request: PlannedRequest) -> None:
        """Put one choice of an event that came at `now` into `record`. Raises StreamFailed."""

    def check(self, record: RequestRecord, usage: dict[str, Any] | None, request: PlannedRequest) -> None:
        """Hold the whole answer against what was asked and what the server says of it. Raises StreamFailed."""


@dataclass(frozen=True)
class TokenIdCompletions:
    """Completions of token ids, so that no second tokenisation moves a block's border, of exactly the length asked
    for."""

    path: str = "/v1/completions"

    def body(self, request: PlannedRequest, *, model: str, cache_salt: str) -> dict[str, Any]:
        """A greedy or seeded request that tells the ids it produced."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": request.prompt.tolist(),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if cache_salt:
            body["cache_salt"] = cache_salt
        return body

    def take_choice(self, choice: dict[str, Any], now: float, record: RequestRecord, request: PlannedRequest) -> None:
        """Tokens by their ids where the server gives them, else an event with text counts as one token."""
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and echoed != request.prompt.tolist():
            raise StreamFailed("the server's prompt_token_ids are not the prompt that was sent")
        take_tokens(record, choice.get("token_ids"), now, has_text=bool(choice.get("text")))

    def check(self, record: RequestRecord, usage: dict[str, Any] | None, request: PlannedRequest) -> None:
        """Every count must be what was asked for."""
        if usage is None:
            raise StreamFailed("the answer came without usage")
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if prompt != len(request.prompt):
            raise StreamFailed(f"usage says {prompt} prompt tokens; {len(request.prompt)} were sent")
        if completion != request.max_tokens:
            raise StreamFailed(f"usage says {completion} completion tokens; {request.max_tokens} were asked for")
        if record.token_ids and len(record.token_ids) != request.max_tokens:
            raise StreamFailed(f"{len(record.token_ids)} token ids came; {request.max_tokens} were asked for")
        record.output_tokens = request.max_tokens
        record.cached_tokens = cached_tokens_of(usage, len(request.prompt))


def take_tokens(record: RequestRecord, ids: Any, now: float, *, has_text: bool) -> None:
    """Put the tokens of one choice into `record`; where the server gives no ids, an event with text is one token.

    Raises StreamFailed for ids that are no list of integers.
    """
    if ids is None:
        record.token_times.extend([now] if has_text else [])
        return
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise StreamFailed(f"malformed event: found token_ids {str(ids)[:_SHOWN]}, expected a list of integers")
    record.token_ids.extend(ids)
    record.token_times.extend([now] * len(ids))


def delta_text(choice: dict[str, Any]) -> str:
    """The text that a chat's event adds. Raises StreamFailed."""
    delta = choice.get("delta") or {}
    text = (delta.get("content") or "") if isinstance(delta, dict) else delta
    if not isinstance(delta, dict) or not isinstance(text, str):
        raise StreamFailed(f"malformed event: found the delta {str(delta)[:_SHOWN]!r}, expected an object with content")
    return text


def cached_tokens_of(usage: dict[str, Any], prompt_tokens: int) -> int:
    """The reused prompt tokens that usage tells, 0 where it tells none. Raises StreamFailed for an impossible count."""
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0 if isinstance(details, dict) else details
    if not isinstance(cached, int) or not 0 <= cached < max(prompt_tokens, 1):
        raise StreamFailed(f"usage says {cached} cached tokens of a prompt of {prompt_tokens}")
    return cached
