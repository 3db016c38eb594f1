"""AIPerf's datasets of requests and conversations: JSONL of the types mooncake_trace, multi_turn and single_turn.

Turns of a session state what they add to the conversation: a prompt is the previous prompt, its answer and the turn's
own input, except where a turn contains the whole conversation (`messages`, or the context mode
message_array_with_responses). Answers are not part of the files; within a session they are pieces that only its later
turns share.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from traces.fields import MAX_TOKENS, RecordFields, RecordPlace, json_fields, object_fields, shown
from traces.formats.base import LineFormat, SessionStarts, SourceSettings, TraceRecord
from traces.prompt_blocks import PromptBlocks
from traces.row import TraceRow

_INPUTS = ("input_length", "text_input", "messages", "payload")
_TEXTS = ("text", "texts")
_MEDIA = ("image", "images", "image_uuids", "audio", "audios", "video", "videos")
_TIMING = ("timestamp", "delay", "output_length", "extra")
_WHOLE, _ADDED, _ADDED_WITH_ANSWERS = (
    "message_array_with_responses",
    "deltas_without_responses",
    "deltas_with_responses",
)


@dataclass(frozen=True, slots=True)
class _Turn:
    """Last turn of a session: its prompt, the length of its answer, its arrival and its number from 0."""

    prompt: PromptBlocks
    output_length: int
    timestamp_ms: float
    number: int


_Piece = Callable[[PromptBlocks], None]


@dataclass(frozen=True, slots=True)
class _Input:
    """Input of a turn, as pieces that append themselves to a prompt.

    `whole`: it contains the conversation so far. `answers`: it contains the previous answer. `is_known`: its contents
    are given, not only its length.
    """

    pieces: tuple[_Piece, ...]
    whole: bool = False
    answers: bool = False
    is_known: bool = True


class AiPerfFormat(LineFormat):
    """AIPerf's datasets. Memory grows with the blocks of the sessions that the file names."""

    name = "aiperf"
    has_own_times = False

    def __init__(self, settings: SourceSettings) -> None:
        super().__init__(settings)
        self._sessions: dict[str, _Turn] = {}
        self._starts = SessionStarts(settings)
        self._num_unknown = 0

    def rows(self, record: TraceRecord) -> list[TraceRow]:
        """Return the requests of a line: one, or all turns of a conversation."""
        fields = json_fields(record.value, record.place)
        session = fields.text("session_id") if fields.has("session_id") else ""
        if fields.has("turns"):
            return self._conversation(fields, session)
        # Lines of type single_turn are prompts of their own; a session only orders them.
        is_single = any(map(fields.has, _TEXTS))
        added = _Input(self._texts(fields), whole=True) if is_single else self._trace_input(fields)
        return self._requests(session, [(fields, added)], follows=bool(session))

    def _conversation(self, fields: RecordFields, session: str) -> list[TraceRow]:
        turns = fields.get("turns")
        if not isinstance(turns, list) or not turns:
            raise fields.place.bad(f"turns {shown(turns)}", "a non-empty list of turns")
        inputs: list[tuple[RecordFields, _Input]] = []
        system: tuple[_Piece, ...] = ()
        for number, turn in enumerate(turns):
            each = object_fields(turn, fields.place.within(f"turn {number}"))
            pieces = self._texts(each)
            if number == 0 and each.values.get("role") == "system" and not any(map(each.has, _TIMING)):
                system = pieces
                continue
            inputs.append((each, _Input(system + pieces)))
            system = ()
        if not inputs:
            raise fields.place.bad("turns with a system message only", "a turn that asks for an answer")
        return self._requests(session or f"line {fields.place.line}", inputs, follows=bool(session))

    def _requests(self, session: str, inputs: list[tuple[RecordFields, _Input]], *, follows: bool) -> list[TraceRow]:
        """Return the requests of the next turns of a session. `follows`: other lines may belong to it."""
        last = self._sessions.get(session) if follows else None
        turns = []
        for fields, added in inputs:
            last = self._turn(session, last, fields, added)
            turns.append(last)
        rows = []
        for turn, (_, added) in zip(turns, inputs, strict=True):
            self.unknown_prompts += not added.is_known
            rows.append(
                self._row(
                    round(turn.timestamp_ms), turn.prompt.num_tokens, turn.output_length, turn.prompt.ids(), session
                )
            )
        if follows:
            self._sessions[session] = turns[-1]
        return rows

    def _turn(self, session: str, last: _Turn | None, fields: RecordFields, added: _Input) -> _Turn:
        output_length = (
            fields.tokens("output_length", least=0) if fields.has("output_length") else self.settings.output_tokens
        )
        number = last.number + 1 if last else 0
        if last is None or added.whole:
            prompt = PromptBlocks(self.block_tokens)
        else:
            prompt = last.prompt.copy()
            if not added.answers:
                prompt.append(f"answer {last.number} of {session}".encode("utf-8", "surrogatepass"), last.output_length)
        for append in added.pieces:
            append(prompt)
        if not 1 <= prompt.num_tokens <= MAX_TOKENS:
            raise fields.place.bad(f"a prompt of {prompt.num_tokens} tokens", f"1 to {MAX_TOKENS} tokens")
        return _Turn(prompt, output_length, self._arrival_ms(last, fields), number)

    def _arrival_ms(self, last: _Turn | None, fields: RecordFields) -> float:
        delay_ms = fields.time("delay", unit="milliseconds") if fields.has("delay") else 0.0
        if fields.has("timestamp"):
            return fields.time("timestamp", unit="milliseconds")
        if last is None:
            return self._starts.next_ms() + delay_ms
        return last.timestamp_ms + 1000 * last.output_length / self.settings.output_rate + delay_ms

    def _texts(self, fields: RecordFields) -> tuple[_Piece, ...]:
        """Return the input of a turn of type multi_turn or single_turn."""
        for name in _MEDIA:
            if fields.has(name):
                raise fields.place.bad(name, "a turn of text only", "unsupported")
        if sum(map(fields.has, _TEXTS)) != 1:
            raise fields.place.bad(f"the fields {shown(sorted(fields.values))}", "either text or texts", "missing")
        texts = [fields.get("text")] if fields.has("text") else _contents(fields.get("texts"), fields.place)
        if not all(isinstance(text, str) for text in texts):
            raise fields.place.bad(f"text {shown(texts)}", "strings")
        return self._tokens(texts)

    def _trace_input(self, fields: RecordFields) -> _Input:
        """Return the input of a line of type mooncake_trace."""
        given = [name for name in _INPUTS if fields.has(name)]
        if len(given) != 1:
            raise fields.place.bad(
                f"{' and '.join(given) or 'no input'} among {shown(sorted(fields.values))}",
                f"exactly one of {', '.join(_INPUTS)}, or text, texts or turns",
                "missing",
            )
        mode = fields.text("context_mode") if fields.has("context_mode") else ""
        if mode and mode not in (_WHOLE, _ADDED, _ADDED_WITH_ANSWERS):
            raise fields.place.bad(
                f"context_mode {shown(mode)}", f"{_WHOLE}, {_ADDED} or {_ADDED_WITH_ANSWERS}", "unsupported"
            )
        whole, answers = mode == _WHOLE, mode == _ADDED_WITH_ANSWERS
        match given[0]:
            case "payload":
                raise fields.place.bad("payload", "input_length, text_input or messages", "unsupported")
            case "text_input":
                return _Input(self._tokens([fields.text("text_input")]), whole, answers)
            case "messages":
                is_delta = fields.values.get("message_mode", "history") == "delta"
                texts = _message_texts(fields)
                return _Input(self._tokens(texts), not is_delta, answers)
        return self._numbered_input(fields, whole, answers)

    def _numbered_input(self, fields: RecordFields, whole: bool, answers: bool) -> _Input:
        """Return an input that is given by its length, with or without the ids of its blocks."""
        input_length = fields.tokens("input_length", least=1)
        if fields.has("hash_ids"):
            ids = fields.ids("hash_ids", input_length=input_length, block_tokens=self.source_block_tokens)
            piece: _Piece = partial(
                PromptBlocks.append_ids, ids=ids, num_tokens=input_length, block_tokens=self.source_block_tokens
            )
            return _Input((piece,), whole, answers)
        self._num_unknown += 1
        piece = partial(PromptBlocks.append, name=b"unknown %d" % self._num_unknown, num_tokens=input_length)
        return _Input((piece,), whole, answers, is_known=False)

    def _tokens(self, texts: list[str]) -> tuple[_Piece, ...]:
        return tuple(partial(PromptBlocks.append_tokens, ids=ids) for ids in self.settings.encode(texts))


def _contents(texts: Any, place: RecordPlace) -> list[Any]:
    """Return the texts of a batch: strings, or objects with a list `contents`."""
    if not isinstance(texts, list):
        raise place.bad(f"texts {shown(texts)}", "a list of strings, or of objects with contents")
    found: list[Any] = []
    for each in texts:
        contents = each.get("contents") if isinstance(each, dict) else [each]
        if not isinstance(contents, list):
            raise place.bad(f"texts {shown(each)}", "strings, or objects with a list contents")
        found += contents
    return found


def _message_texts(fields: RecordFields) -> list[str]:
    """Return the texts of OpenAI's messages, with tools and tool calls as JSON."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.place.bad(f"messages {shown(messages)}", "a non-empty list of messages")
    found = [json.dumps(fields.get("tools"), sort_keys=True)] if fields.has("tools") else []
    for number, message in enumerate(messages):
        each = object_fields(message, fields.place.within(f"message {number}"))
        found.append(each.text("role"))
        content = each.values.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
            if text is not None and not isinstance(text, str):
                raise each.place.bad(f"content {shown(part)}", "text", "unsupported")
            found.append(text or "")
        if each.has("tool_calls"):
            found.append(json.dumps(each.get("tool_calls"), sort_keys=True))
    return found
