"""ShareGPT conversations: a JSON list of {"id", "conversations": [{"from", "value"}]}, without times.

Each answer becomes a request whose prompt is all that was said before it, without a chat template.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from traces.fields import RecordPlace, object_fields, shown
from traces.formats.base import SessionStarts, SourceSettings, TraceFormat, TraceRecord
from traces.json_values import array_elements
from traces.prompt_blocks import PromptBlocks
from traces.row import TraceRow

_ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
_OTHERS = ("human", "user", "system", "tool", "function_call", "observation")


class ShareGptFormat(TraceFormat):
    """ShareGPT's conversations; those without a question and an answer yield no request."""

    name = "sharegpt"
    has_own_times = False

    def __init__(self, settings: SourceSettings) -> None:
        super().__init__(settings)
        self._starts = SessionStarts(settings)

    def records(self, raw: IO[bytes], source: str) -> Iterator[TraceRecord]:
        """Yield the conversations."""
        for place, value in array_elements(raw, source, "conversation"):
            yield TraceRecord(place, value)

    def rows(self, record: TraceRecord) -> list[TraceRow]:
        """Return a request for each answer that follows a question."""
        fields = object_fields(record.value, record.place)
        messages = fields.get("conversations")
        if not isinstance(messages, list):
            raise record.place.bad(f"conversations {shown(messages)}", "a list of messages")
        session = str(fields.get("id")) if fields.has("id") else record.place.detail
        said = [_message(each, record.place.within(f"message {i}")) for i, each in enumerate(messages)]
        tokens = self.settings.encode([text for _, text in said])
        blocks, asked = PromptBlocks(self.block_tokens), False
        turns: list[tuple[int, int, tuple[int, ...]]] = []
        for (is_answer, _), ids in zip(said, tokens, strict=True):
            if is_answer and asked and ids:
                turns.append((blocks.num_tokens, len(ids), blocks.ids()))
            blocks.append_tokens(ids)
            asked = not is_answer and blocks.num_tokens > 0
        return self._timed(turns, session) if turns else []

    def _timed(self, turns: list[tuple[int, int, tuple[int, ...]]], session: str) -> list[TraceRow]:
        now_ms, rows = float(self._starts.next_ms()), []
        for input_length, output_length, ids in turns:
            rows.append(self._row(round(now_ms), input_length, output_length, ids, session))
            now_ms += 1000 * (output_length / self.settings.output_rate + self.settings.think_time_s)
        return rows


def _message(value: object, place: RecordPlace) -> tuple[bool, str]:
    """Return (whether it is an answer, its text)."""
    fields = object_fields(value, place)
    sender = fields.text("from").lower()
    if sender not in _ANSWERS + _OTHERS:
        raise place.bad(f"from {shown(sender)}", f"one of {', '.join(_OTHERS + _ANSWERS)}")
    return sender in _ANSWERS, fields.text("value")
