"""Grammars of structured output, from the request fields of OpenAI and vLLM."""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

from frontend.answer_format import PLAIN_ANSWERS, AnswerFormat
from frontend.api.request_models import ChatBody, GenerationBody, ResponseFormat, StructuredOutputs
from frontend.errors import InvalidRequest, Overloaded
from frontend.request import Grammar, ReasoningOptions
from frontend.tool_formats import OPENAI
from frontend.tools import tools_of
from moonpool_proto.v1 import common_pb2
from worker.errors import GrammarBusy, GrammarError, GrammarTooCostly
from worker.grammar_frames import source_nbytes
from worker.grammar_processes import FRONTEND_LIMITS, GrammarProcesses, GrammarSource, InvalidPart

JSON_SCHEMA: Final = common_pb2.Grammar.KIND_JSON_SCHEMA
LARK: Final = common_pb2.Grammar.KIND_LARK
REGEX: Final = common_pb2.Grammar.KIND_REGEX
_MAX_VERDICTS: Final = 1024
_ESCAPES: Final = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


@dataclass(frozen=True)
class UncheckedGrammar:
    """Grammar of a request, and the names of its parts in messages: that of the whole, then those of `source.parts`.

    `fields` are the body's fields, which are less specific.
    """

    source: GrammarSource
    names: tuple[str, ...]
    fields: tuple[str, ...]

    @property
    def grammar(self) -> Grammar:
        return Grammar(cast(common_pb2.Grammar.Kind.ValueType, self.source.kind), self.source.source)


class GrammarChecker:
    """Checks of requests' grammars in processes that can be killed, and a cache of the verdicts."""

    def __init__(self, count: Callable[[str], None]) -> None:
        """`count` is called with "refused" and "killed", as by GrammarProcesses."""
        self._processes = GrammarProcesses(FRONTEND_LIMITS, count)
        # Clients repeat the same grammars. By the grammar's key: None, or the message and the invalid part.
        self._verdicts: OrderedDict[bytes, tuple[str, int] | None] = OrderedDict()

    def warm_up(self) -> None:
        """Begin to start the template process now instead of with the first grammar."""
        self._processes.warm_up()

    def close(self) -> None:
        """End all processes. Blocks."""
        self._processes.close()

    async def check(self, unchecked: UncheckedGrammar, tenant: str) -> Grammar:
        """Return the grammar if it is valid and can be checked within the limits; cancelling ends the check.

        Raises InvalidRequest, and Overloaded if too many grammars of the tenant wait.
        """
        key = unchecked.source.key
        if key not in self._verdicts:
            verdict: tuple[str, int] | None = None
            try:
                await self._processes.check(tenant, unchecked.source).result()
            except GrammarBusy as error:
                raise Overloaded(
                    f"{error}; send the request again", code="grammar_checks", retry_after_s=1.0
                ) from error
            except GrammarTooCostly as error:  # remembered by the processes
                raise _refused(unchecked, str(error), -1) from error
            except GrammarError as error:
                verdict = str(error), error.index if isinstance(error, InvalidPart) else -1
            self._verdicts[key] = verdict
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        found = self._verdicts[key]
        if found is not None:
            raise _refused(unchecked, *found)
        return unchecked.grammar


def _refused(unchecked: UncheckedGrammar, message: str, part: int) -> InvalidRequest:
    return InvalidRequest(f"{unchecked.names[part + 1]}: {message}", param=unchecked.fields[part + 1])


def wants_grammar(body: GenerationBody) -> bool:
    """Return True if `requested_grammar` may return one; it takes long for large schemas."""
    fields = (
        body.response_format,
        body.structured_outputs,
        body.guided_json,
        body.guided_regex,
        body.guided_choice,
        body.guided_grammar,
    )
    has_tools = isinstance(body, ChatBody) and (body.tools is not None or body.tool_choice is not None)
    return has_tools or any(field is not None for field in fields)


def requested_grammar(
    body: GenerationBody, form: AnswerFormat = PLAIN_ANSWERS, reasoning: ReasoningOptions | None = None
) -> UncheckedGrammar | None:
    """Return the grammar of an answer, which includes a chat's tool calls; None if there is none.

    `reasoning` may precede what the grammar is for. Raises InvalidRequest for unsupported combinations and too large
    grammars.
    """
    tools = tools_of(body) if isinstance(body, ChatBody) else None
    answer = grammar_of(body)
    if tools is None:
        if answer is None:
            return None
        grammar, param = answer
        if reasoning is None:
            return _sized(UncheckedGrammar(GrammarSource(grammar.kind, grammar.source), (param,), (param,)))
        lark = _assembled(_content_rules(grammar), form, reasoning, has_headers=False)
        source = GrammarSource(LARK, lark, (grammar.source,), grammar.kind)
        return _sized(UncheckedGrammar(source, (param, param), (param, param)))
    if answer is not None and (tools.must_call or answer[0].kind != JSON_SCHEMA):
        param = answer[1]
        raise InvalidRequest(
            f"{param} cannot be combined with tools: an answer either calls a tool or is text. With tool_choice "
            "'auto', a JSON schema for the text is supported",
            param=param,
        )
    parts = [tool.grammar_schema({}) for tool in tools.specs]
    names = [f"tools: function.parameters of {tool.name!r} (tool {index})" for index, tool in enumerate(tools.specs)]
    fields = ["tools"] * len(names)
    rules: list[str] = []
    if answer is not None:
        parts, names, fields = [*parts, answer[0].source], [*names, answer[1]], [*fields, answer[1]]
        rules = [f"answer: {_json_rule(answer[0].source)}"]
    rules += form.tools.grammar(
        tools.specs,
        must_call=tools.must_call,
        parallel=tools.parallel,
        markers=form.markers,
        text="answer" if rules else "",
    )
    lark = _assembled(rules, form, reasoning, has_headers=form.tools is OPENAI)
    source = GrammarSource(LARK, lark, tuple(parts), JSON_SCHEMA)
    return _sized(UncheckedGrammar(source, ("tools", *names), ("tools", *fields)))


def _assembled(
    rules: Sequence[str], form: AnswerFormat, reasoning: ReasoningOptions | None, *, has_headers: bool
) -> str:
    """Return a Lark grammar of answers whose content matches the rule `content` of `rules`, after any reasoning."""
    begin: Sequence[str] = ["start: content"]
    if reasoning is not None:
        begin = reasoning.form.grammar(reasoning.start, form.markers, has_headers=has_headers)
    return "\n".join(["%llguidance {}", *begin, *rules, r"TEXT: /(.|\n)*/"])


def _content_rules(grammar: Grammar) -> list[str]:
    """Return Lark rules for `content` that match what `grammar` matches."""
    if grammar.kind == JSON_SCHEMA:
        return [f"content: {_json_rule(grammar.source)}"]
    if grammar.kind == REGEX:
        return [f"content: /{_within_slashes(grammar.source)}/"]
    return [f"content: %lark {{\n{grammar.source}\n}}"]


def _json_rule(schema: str) -> str:
    # Without white space between the parts, as for a schema alone.
    return f"%json {json.dumps({**json.loads(schema), 'x-guidance': {'whitespace_flexible': False}})}"


def _within_slashes(regex: str) -> str:
    """Return a regular expression as it is written between slashes."""
    return re.sub(r"\\.|/|\n", lambda found: _ESCAPES.get(found[0], found[0]), regex, flags=re.DOTALL)


def _sized(unchecked: UncheckedGrammar) -> UncheckedGrammar:
    """Raise InvalidRequest if the whole grammar is too large, before any of it is checked."""
    try:
        source_nbytes(unchecked.source.source)
    except GrammarError as error:
        raise _refused(unchecked, str(error), -1) from error
    return unchecked


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
