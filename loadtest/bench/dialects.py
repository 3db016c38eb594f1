"""Request bodies and response parsing of `bench serve`. Pure.

Servers need only support OpenAI's protocol: an answer may be shorter than requested, and token counts come from its
`usage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadtest.client import delta_text
from loadtest.errors import StreamFailed
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord


@dataclass(frozen=True, eq=False)
class BenchRequest(PlannedRequest):
    """Planned request whose prompt may be sent as text. A non-empty `text` is sent instead of the token ids."""

    text: str = ""


@dataclass(frozen=True)
class BenchDialect:
    """Completions or chat dialect.

    `extra`: fields added unchanged to every body. `keep_text`: records keep the answers' texts.
    """

    path: str
    chat: bool
    ignore_eos: bool
    extra: Mapping[str, Any] = field(default_factory=dict)
    keep_text: bool = False

    def body(self, request: PlannedRequest, *, model: str, cache_salt: str) -> dict[str, Any]:
        """Return the body of a streaming request that reports usage at its end."""
        text = request.text if isinstance(request, BenchRequest) else ""
        body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            body["messages"] = [{"role": "user", "content": text}]
            body["max_completion_tokens"] = request.max_tokens
        else:
            body["prompt"] = text or request.prompt.tolist()
            body["max_tokens"] = request.max_tokens
        if self.ignore_eos:
            body["ignore_eos"] = True
        if cache_salt:
            body["cache_salt"] = cache_salt
        return {**body, **self.extra}

    def take_choice(self, choice: dict[str, Any], now: float, record: RequestRecord, request: PlannedRequest) -> None:
        """Append the choice's text to the record; events are counted by the caller."""
        text = delta_text(choice) if self.chat else choice.get("text") or ""
        if not isinstance(text, str):
            raise StreamFailed(f"malformed event: found the text {str(text)[:200]!r}, expected a string")
        record.text += text

    def check(self, record: RequestRecord, usage: dict[str, Any] | None, request: PlannedRequest) -> None:
        """Take the token counts from `usage`; raises StreamFailed for an answer without events.

        If usage reports no output tokens, the text is kept so that the caller can count them.
        """
        if not record.event_times:
            raise StreamFailed("the answer contains no tokens")
        counts = usage or {}
        record.output_tokens = _count(counts.get("completion_tokens"))
        record.prompt_tokens = _count(counts.get("prompt_tokens")) or record.prompt_tokens
        details = counts.get("prompt_tokens_details")
        record.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
        if record.output_tokens and not self.keep_text:
            record.text = ""


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
