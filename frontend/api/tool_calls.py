"""How calls of tools look on the wire: OpenAI's tool_calls, whole and in deltas."""

import uuid
from typing import Any

from frontend.output import Step
from frontend.tools import CallDelta, ToolReader


class ChoiceCalls:
    """One choice's calls. Every step must be told, in order."""

    def __init__(self) -> None:
        self._reader = ToolReader()

    def message(self, step: Step) -> dict[str, Any]:
        """Content and calls of an answer that came as one step."""
        read = self._reader.feed(step.text, is_last=True)
        calls: dict[int, dict[str, Any]] = {}
        for call in read.calls:
            _merge(calls, call)
        if not calls:
            return {"content": read.content}
        return {"content": read.content or None, "tool_calls": [_without_index(call) for call in calls.values()]}

    def delta(self, step: Step) -> dict[str, Any]:
        """What a step adds: content, or pieces of calls; of each call its id and name first."""
        read = self._reader.feed(step.text, is_last=step.finish_reason is not None)
        calls: dict[int, dict[str, Any]] = {}
        for call in read.calls:
            _merge(calls, call)
        delta: dict[str, Any] = {"content": read.content} if read.content else {}
        return delta | {"tool_calls": list(calls.values())} if calls else delta

    def finish_reason(self, step: Step) -> str | None:
        """OpenAI's: an answer that ended for its calls. One that a stop text cut within a call did not."""
        return "tool_calls" if step.finish_reason == "stop" and self._reader.is_complete else step.finish_reason


def _merge(calls: dict[int, dict[str, Any]], piece: CallDelta) -> None:
    call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
    if piece.name is not None:
        call |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        call["function"] = {"name": piece.name, "arguments": ""}
    call["function"]["arguments"] += piece.arguments


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    return {"id": call["id"], "type": call["type"], "function": call["function"]}
