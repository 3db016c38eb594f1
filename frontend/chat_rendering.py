"""Rendering of chats with the model's template: its messages, tools and calls, and the messages' spans in the text.

Templates are rendered as transformers does. The span of a message is found by rendering the chat again with marks
around the message. A template may trim a message, drop a part or quote it, so the marks are placed inside the message's
outer whitespace. If the text without marks differs from the original, or a message's marks are not both found with the
message between them, that message has no span.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frontend.api.request_models import ChatMessage, Tool, ToolCall
from frontend.errors import InvalidRequest, ModelFilesError
from frontend.reasoning import harmony, think_tags
from frontend.tool_formats import HERMES


class ChatTemplate:
    """Compiled chat template, run in a sandbox, because it comes with the weights and is untrusted.

    `source` is its text; `takes_tools` is True if it uses the variable `tools`; `reasoning_key` is the key under which
    it reads a message's reasoning.
    """

    def __init__(self, source: str, variables: Mapping[str, str], origin: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._inputs = find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError) as error:  # of Python's compiler, too
            raise ModelFilesError(f"chat template of {origin} does not compile: {error}") from error
        self.source = source
        self.takes_tools = "tools" in self._inputs
        self.reasoning_key = "thinking" if "message.thinking" in source else "reasoning_content"
        self._variables = dict(variables)

    @classmethod
    def find(cls, path: Path, settings: Mapping[str, Any]) -> "ChatTemplate | None":
        """Return the folder's template from chat_template.jinja or tokenizer_config.json; None if it has none."""
        file = path / "chat_template.jinja"
        try:
            source = file.read_text("utf-8") if file.exists() else settings.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFilesError(f"{file} cannot be read as UTF-8 text: {error}") from error
        if isinstance(source, list):  # several templates by name
            named = [entry for entry in source if isinstance(entry, dict)]
            source = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelFilesError(f"chat_template of {path} must be a string")
        variables = {name: text for name, value in settings.items() if (text := _token_text(name, value)) is not None}
        return cls(source, variables, str(path))

    def reasoning_variables(self, effort: str, *, is_hint: bool) -> dict[str, Any]:
        """Return the variables by which the template asks the model for this effort (`ReasoningEffort`).

        A template that only switches reasoning off and on treats all efforts but "none" alike. Raises InvalidRequest
        for an effort for which the template cannot ask; those but "none" are approximated or ignored if the effort
        `is_hint`.
        """
        is_flexible = is_hint and effort != "none"
        if harmony.CHANNEL in self.source:
            if is_flexible and effort in ("xhigh", "max"):
                effort = "high"
            if effort not in _HARMONY_EFFORTS:
                raise _no_effort(f"must be {', '.join(_HARMONY_EFFORTS)} for this model, got {effort!r}")
            return {"reasoning_effort": effort}
        if "reasoning_effort" in self._inputs:
            return {"reasoning_effort": effort}
        if switch := next((name for name in _SWITCHES if name in self._inputs), None):
            return {switch: effort != "none"}
        if is_flexible or (effort == "none" and think_tags.CLOSE not in self.source):
            return {}  # the model always reasons, or never
        raise _no_effort(f"is not supported by this model, whose chat template cannot ask for it, got {effort!r}")

    def render(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """Return the chat's text; `extra` are the client's variables. Raises InvalidRequest if the template fails."""
        variables = {**self._variables, "tools": None, "documents": None, **extra}
        try:
            return self._template.render(
                variables | {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
            )
        except (
            *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
            RecursionError,  # call arguments and variables may be deeply nested
        ) as error:
            raise InvalidRequest(f"the model's chat template rejects these messages: {error}", param="messages") from (
                error
            )


_HARMONY_EFFORTS: Final = ("low", "medium", "high")
_SWITCHES: Final = ("enable_thinking", "thinking")  # Qwen3, GLM; DeepSeek


def _no_effort(problem: str) -> InvalidRequest:
    return InvalidRequest(f"reasoning_effort {problem}", param="reasoning_effort", code="unsupported_parameter")


def _token_text(name: str, value: object) -> str | None:
    # Templates may use bos_token, eos_token and others, which are strings or objects that contain the string.
    if not name.endswith("_token"):
        return None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_OPEN, _CLOSE = HERMES.sections.opener, HERMES.sections.closer
_INTRODUCTION = """\
You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within {open}{close} XML tags:
{open}
{{"name": <function-name>, "arguments": <args-json-object>}}
{close}"""


def native_messages(messages: Sequence[ChatMessage], reasoning_key: str) -> list[dict[str, Any]]:
    """Return messages for a template that supports tools; calls are objects, as in transformers.

    Raises InvalidRequest.
    """
    return [_native(index, message, reasoning_key) for index, message in enumerate(messages)]


def plain_messages(messages: Sequence[ChatMessage], tools: Sequence[Tool], reasoning_key: str) -> list[dict[str, Any]]:
    """Return messages for a template without tool support: tools in the system text, calls and results as text."""
    chat: list[dict[str, Any]] = []
    for is_result, run in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            results = "\n".join(f"<tool_response>\n{message.text}\n</tool_response>" for message in run)
            chat.append({"role": "user", "content": results})
        else:
            chat += [
                {"role": _role(message), "content": _with_calls(message), **_reasoning(message, reasoning_key)}
                for message in run
            ]
    if not tools:
        return chat
    introduction = _INTRODUCTION.format(
        tools="\n".join(json.dumps(as_plain(tool), ensure_ascii=False) for tool in tools), open=_OPEN, close=_CLOSE
    )
    if chat and chat[0]["role"] == "system":
        return [{"role": "system", "content": f"{chat[0]['content']}\n\n{introduction}"}, *chat[1:]]
    return [{"role": "system", "content": introduction}, *chat]


def as_plain(tool: Tool) -> dict[str, Any]:
    """Return the tool's definition as the client sent it, without hints, which are no part of the prompt."""
    return tool.model_dump(exclude_none=True, exclude={"cache_control"})


def _native(index: int, message: ChatMessage, reasoning_key: str) -> dict[str, Any]:
    found: dict[str, Any] = {"role": _role(message), "content": message.text, **_reasoning(message, reasoning_key)}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call, f"messages.{index}.tool_calls.{number}.function.arguments"),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        found |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return found


def _role(message: ChatMessage) -> str:
    # Templates do not support "developer", OpenAI's newer name for "system".
    return "system" if message.role == "developer" else message.role


def _reasoning(message: ChatMessage, key: str) -> dict[str, str]:
    # Templates that render reasoning test whether it is defined. That of gpt-oss rejects it beside content and calls.
    if message.reasoning_content is None or (key == "thinking" and message.text and message.tool_calls):
        return {}
    return {key: message.reasoning_content}


def _with_calls(message: ChatMessage) -> str:
    """Return the message with its calls in the format of answers.

    Arguments stay unchanged, so that the history equals what was generated.
    """
    functions = [call.function for call in message.tool_calls or ()]
    calls = [
        f'{_OPEN}\n{{"name": {json.dumps(called.name)}, "arguments": {called.arguments or "{}"}}}\n{_CLOSE}'
        for called in functions
    ]
    # No separator: the text before a call ends where the call begins.
    return message.text + "\n".join(calls)


def _arguments(call: ToolCall, param: str) -> Any:
    try:
        value = json.loads(call.function.arguments or "{}")
        json.dumps(value, ensure_ascii=False).encode()  # an escape may be half of a surrogate pair
        return value
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from error


Message = Mapping[str, Any]


@dataclass(frozen=True)
class ContentSpan:
    """Span of message `index`: its content, without trailing whitespace, is text[start:end]."""

    index: int
    start: int
    end: int


def content_spans(
    text: str, chat: Sequence[Message], indices: Collection[int], render: Callable[[Sequence[Message]], str], nonce: str
) -> list[ContentSpan]:
    """Return the spans of the messages `indices` in `text` (which is `render(chat)`), in the order of the text.

    The messages' contents must be strings. `nonce` is a string without `:` that clients cannot guess.
    """
    wanted = frozenset(indices)
    marked = [_marked(message, nonce, at) if at in wanted else message for at, message in enumerate(chat)]
    pieces = re.split(f"\ue000{re.escape(nonce)}:(\\d+)([<>])\ue001", render(marked))
    if "".join(pieces[::3]) != text:
        return []
    opened: dict[int, list[int]] = {}
    closed: dict[int, list[int]] = {}
    at = 0
    for piece, number, kind in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=False):
        at += len(piece)
        (opened if kind == "<" else closed).setdefault(int(number), []).append(at)
    spans = []
    for index in indices:
        starts, ends = opened.get(index, []), closed.get(index, [])
        if len(starts) == len(ends) == 1:
            content = chat[index]["content"].rstrip()
            start = ends[0] - len(content)  # includes leading whitespace, if the template kept it
            if start >= 0 and text[start : ends[0]] == content:
                spans.append(ContentSpan(index, start, ends[0]))
    spans.sort(key=lambda span: span.start)
    return spans


def _marked(message: Message, nonce: str, index: int) -> dict[str, Any]:
    content = message["content"]
    core = content.strip()
    at = content.find(core)
    before, after = content[:at], content[at + len(core) :]
    marked = f"{before}\ue000{nonce}:{index}<\ue001{core}\ue000{nonce}:{index}>\ue001{after}"
    return {**message, "content": marked}
