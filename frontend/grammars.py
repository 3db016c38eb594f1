"""Grammars of structured output, from the request fields of OpenAI and vLLM."""

import json
from functools import lru_cache
from typing import Any, Final, NoReturn

from frontend.api.request_models import ChatBody, GenerationBody, ResponseFormat, StructuredOutputs
from frontend.errors import InvalidRequest
from frontend.request import Grammar
from frontend.tools import tools_grammar, tools_of
from moonpool_proto.v1 import common_pb2
from worker.errors import GrammarError
from worker.grammar import check_grammar

JSON_SCHEMA: Final = common_pb2.Grammar.KIND_JSON_SCHEMA
LARK: Final = common_pb2.Grammar.KIND_LARK
REGEX: Final = common_pb2.Grammar.KIND_REGEX


def checked_grammar(body: GenerationBody) -> Grammar | None:
    """Return the body's grammar, validated; None if it has none. Raises InvalidRequest for an invalid grammar."""
    found = grammar_of(body)
    if found is None:
        return None
    grammar, param = found
    check(grammar, param)
    return grammar


def checked_chat_grammar(body: ChatBody) -> Grammar | None:
    """Return a chat's grammar, which includes tool calls. Raises InvalidRequest also for unsupported combinations."""
    tools = tools_of(body)
    if tools is None:
        return checked_grammar(body)
    for index, tool in enumerate(tools.specs):
        schema = Grammar(JSON_SCHEMA, json.dumps(tool.parameters))
        check(schema, f"tools: function.parameters of {tool.name!r} (tool {index})", field="tools")
    answer = grammar_of(body)
    if answer is not None:
        grammar, param = answer
        if tools.must_call or grammar.kind != JSON_SCHEMA:
            raise InvalidRequest(
                f"{param} cannot be combined with tools: an answer either calls a tool or is text. With "
                "tool_choice "
                "'auto', a JSON schema for the text is supported",
                param=param,
            )
        check(grammar, param)
    lark = tools_grammar(
        tools.specs,
        must_call=tools.must_call,
        parallel=tools.parallel,
        text_schema=None if answer is None else json.loads(answer[0].source),
    )
    whole = Grammar(LARK, lark)
    check(whole, "tools")
    return whole


def check(grammar: Grammar, name: str, *, field: str | None = None) -> None:
    """Raise InvalidRequest if `grammar` is too large, unsupported or invalid.

    `field` is the body's field if `name`, used in the message, is more specific.
    """
    try:
        _check_once(grammar.kind, grammar.source)
    except GrammarError as error:
        raise InvalidRequest(f"{name}: {error}", param=field or name) from error


@lru_cache(maxsize=64)  # clients repeat the same grammars, and checking many tools is slow
def _check_once(kind: common_pb2.Grammar.Kind.ValueType, source: str) -> None:
    check_grammar(kind, source)


def grammar_of(body: GenerationBody) -> tuple[Grammar, str] | None:
    """Return the body's grammar and the field that gives it; None if no field does.

    Raises InvalidRequest for two grammars and for invalid JSON. The grammar itself is checked elsewhere.
    """
    requested = [*_of_format(body.response_format), *_of_structured(body.structured_outputs), *_of_guided(body)]
    if len(requested) > 1:
        names = ", ".join(name for _, name in requested)
        raise InvalidRequest(f"at most one of {names} may be given", param=requested[1][1])
    return requested[0] if requested else None


def _of_format(requested: ResponseFormat | None) -> list[tuple[Grammar, str]]:
    if requested is None or requested.type == "text":
        return []
    if requested.type == "json_object":
        return [(_any_object(), "response_format")]
    if requested.json_schema is None:
        raise InvalidRequest(
            "response_format of type json_schema requires the field json_schema with name and schema",
            param="response_format.json_schema",
        )
    return [(_json(requested.json_schema.schema_, "response_format.json_schema.schema"), "response_format")]


def _of_structured(requested: StructuredOutputs | None) -> list[tuple[Grammar, str]]:
    if requested is None:
        return []
    name = "structured_outputs"
    found: list[tuple[Grammar, str]] = []
    if requested.json_ is not None:
        found.append((_json(requested.json_, f"{name}.json"), f"{name}.json"))
    if requested.json_object:
        found.append((_any_object(), f"{name}.json_object"))
    if requested.regex is not None:
        found.append((Grammar(REGEX, requested.regex), f"{name}.regex"))
    if requested.choice is not None:
        found.append((_choice(requested.choice), f"{name}.choice"))
    if requested.grammar is not None:
        found.append((Grammar(LARK, requested.grammar), f"{name}.grammar"))
    return found


def _of_guided(body: GenerationBody) -> list[tuple[Grammar, str]]:
    found: list[tuple[Grammar, str]] = []
    if body.guided_json is not None:
        found.append((_json(body.guided_json, "guided_json"), "guided_json"))
    if body.guided_regex is not None:
        found.append((Grammar(REGEX, body.guided_regex), "guided_regex"))
    if body.guided_choice is not None:
        found.append((_choice(body.guided_choice), "guided_choice"))
    if body.guided_grammar is not None:
        found.append((Grammar(LARK, body.guided_grammar), "guided_grammar"))
    return found


def _any_object() -> Grammar:
    return Grammar(JSON_SCHEMA, '{"type":"object"}')


def _json(schema: dict[str, Any] | str, param: str) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema, parse_constant=_no_json)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} must be a JSON Schema object", param=param)
    return Grammar(JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def _choice(texts: list[str]) -> Grammar:
    # A JSON schema would add quotes to the text. Lark literals have the syntax of JSON strings.
    return Grammar(LARK, "start: " + " | ".join(map(json.dumps, texts)))
