"""Schemas of tools that no grammar enforces completely: enforced as far as possible, or refused if they are strict."""

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from frontend.answer_format import AnswerFormat
from frontend.api.request_models import MAX_TOOLS, ChatBody
from frontend.grammars import UncheckedGrammar, requested_grammar
from frontend.tokenizer import Tokenizer
from frontend.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_NAMED, OPENAI, QWEN3_CODER, ToolFormat
from worker.errors import GrammarError
from worker.grammar import check_grammar

FORMATS = [HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_NAMED, QWEN3_CODER, OPENAI]
STRING, OBJECT = {"type": "string"}, {"type": "object"}
KEYWORDS: list[dict[str, Any]] = [
    OBJECT | {"propertyNames": {"pattern": "^a"}},
    {"type": "array", "items": STRING, "uniqueItems": True},
    {"type": "array", "contains": STRING},
    {"type": "integer", "not": {"const": 1}},
    OBJECT | {"if": {"required": ["b"]}, "then": {"required": ["c"]}},
    OBJECT | {"dependentRequired": {"a": ["b"]}},
    {"oneOf": [STRING, {"type": "string", "maxLength": 5}]},
    {"anyOf": [STRING | {"format": "uuuid"}, {"type": "integer"}]},
    {"anyOf": [STRING | {"pattern": "^(?!x).*$"}, {"type": "integer"}]},
    STRING | {"pattern": None},
    OBJECT | {"required": None},
    OBJECT | {"patternProperties": {"^(?=x)": STRING}, "additionalProperties": False},
    {"type": "array", "items": STRING | {"pattern": r"\bword\b"}},
    {"type": "array", "items": STRING | {"pattern": r"(a)\1"}},
    {"type": "array", "items": STRING | {"pattern": r"(?>a)"}},
    {"type": "array", "items": STRING | {"pattern": r"^a\Z"}},
    {"type": "array", "items": STRING | {"pattern": "^.{1,5000}$"}},
]


def grammar(form: ToolFormat, *tools: dict[str, Any]) -> UncheckedGrammar:
    listed = [{"type": "function", "function": tool} for tool in tools]
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": listed})
    found = requested_grammar(body, AnswerFormat(tools=form))
    assert found is not None
    return found


def check(unchecked: UncheckedGrammar) -> None:
    """Check a grammar and its parts as the frontend's processes do."""
    for part in unchecked.source.parts:
        check_grammar(unchecked.source.part_kind, part)
    check_grammar(unchecked.source.kind, unchecked.source.source)


def tool(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": "f", "parameters": OBJECT | {"properties": {"a": schema}}, **fields}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("schema", KEYWORDS, ids=lambda schema: " ".join(schema))
def test_a_keyword_that_no_grammar_enforces_is_an_error_only_in_a_strict_tool(
    form: ToolFormat, schema: dict[str, Any]
) -> None:
    check(grammar(form, tool(schema)))
    check(grammar(form, tool(schema, strict=False)))
    with pytest.raises(GrammarError):
        check(grammar(form, tool(schema, strict=True)))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_tool_may_require_null(form: ToolFormat) -> None:
    parameters = OBJECT | {"properties": {"a": STRING}, "required": None}
    check(grammar(form, {"name": "f", "parameters": parameters}))
    with pytest.raises(GrammarError):
        check(grammar(form, {"name": "f", "parameters": parameters, "strict": True}))


def test_what_a_grammar_can_enforce_stays_enforced(model_path: Any, tokenizer: Tokenizer) -> None:
    properties = {
        "a": {"type": "array", "items": STRING | {"pattern": "^x$", "description": "no constraint"}},
        "description": {"enum": ["default"]},
    }
    parameters = OBJECT | {"properties": properties, "required": ["description"], "propertyNames": {"maxLength": 20}}
    lark = grammar(HERMES, {"name": "f", "parameters": parameters}).source.source
    assert "no constraint" not in lark
    vocabulary = LLTokenizer((model_path / "tokenizer.json").read_text(), eos_token=1, n_vocab=340)

    def accepts(arguments: str) -> bool:
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0)
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        taken = matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False))
        return taken and matcher.is_accepting()

    assert accepts('{"a": [], "description": "default"}')
    assert not accepts('{"a": []}')
    assert not accepts('{"a": [], "description": "other"}')
    assert accepts('{"a": ["x"], "description": "default"}')
    assert not accepts('{"a": ["y"], "description": "default"}')


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_most_tools_fit_into_a_grammar(form: ToolFormat) -> None:
    text = "x" * 1000  # descriptions are no part of the grammar
    named = [{"name": f"{'f' * 20}{number}", "description": text} for number in range(MAX_TOOLS)]
    parameters = OBJECT | {"description": text}
    check(grammar(form, *(each | {"parameters": parameters} for each in named)))
