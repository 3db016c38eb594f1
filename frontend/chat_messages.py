"""From a client's chat to the messages that a template is given, tools and their calls among them. Pure."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from frontend.api.models import ChatMessage
from frontend.api.tool_models import Tool, ToolCall
from frontend.errors import InvalidRequest
from frontend.tools import CLOSE, OPEN

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

Message = dict[str, Any]


def native_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """For a template that knows tools: calls as objects, as transformers hands them over. Raises InvalidRequest."""
    return [_native(index, message) for index, message in enumerate(messages)]


def plain_messages(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[Message]:
    """For a template that knows none: tools in a system text, calls as text, results in messages of the user."""
    chat: list[Message] = []
    for is_result, run in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            results = "\n".join(f"<tool_response>\n{message.text}\n</tool_response>" for message in run)
            chat.append({"role": "user", "content": results})
        else:
            chat += [{"role": _role(message), "content": _with_calls(message)} for message in run]
    if not tools:
        return chat
    introduction = _INTRODUCTION.format(
        tools="\n".join(json.dumps(as_plain(tool), ensure_ascii=False) for tool in tools), open=OPEN, close=CLOSE
    )
    if chat and chat[0]["role"] == "system":
        return [{"role": "system", "content": f"{chat[0]['content']}\n\n{introduction}"}, *chat[1:]]
    return [{"role": "system", "content": introduction}, *chat]


def as_plain(tool: Tool) -> dict[str, Any]:
    """A tool as templates and models know it: what the client said of it."""
    return tool.model_dump(exclude_none=True)


def _native(index: int, message: ChatMessage) -> Message:
    found: Message = {"role": _role(message), "content": message.text}
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
    # Templates know no "developer", which is OpenAI's newer word for "system".
    return "system" if message.role == "developer" else message.role


def _with_calls(message: ChatMessage) -> str:
    """As answers write calls; the arguments stay as they are, so that the history reads as it was generated."""
    calls = [
        f'{OPEN}\n{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments or "{}"}}}\n{CLOSE}'
        for call in message.tool_calls or ()
    ]
    # What an answer wrote before its first call ends where the call begins.
    return message.text + "\n".join(calls)


def _arguments(call: ToolCall, param: str) -> Any:
    try:
        value = json.loads(call.function.arguments or "{}")
        json.dumps(value, ensure_ascii=False).encode()  # an escape may be half a character, which is no text
        return value
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is no JSON: {error}", param=param) from error
