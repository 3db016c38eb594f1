"""Tool calls in the formats of model families over real HTTP: grammars, answers, and the selection of a format."""

import json
from pathlib import Path
from typing import Any

import pytest

from frontend.answer_format import AnswerFormat, answer_format
from frontend.errors import FrontendConfigError
from frontend.tokenizer import Tokenizer
from tests.frontend.agent_models import make_model

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = {
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "Ulm"}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Ulm"}}, {"name": "now", "arguments": {}}]',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "mistral_named": '[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}[TOOL_CALLS]now[ARGS]{}',
}
OPENERS = {
    "qwen3_coder": "<tool_call>",
    "qwen3": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral_named": "[TOOL_CALLS]",
}


async def ask(front: Any, **fields: Any) -> dict[str, Any]:
    status, body = await front.post(CHAT, {"messages": USER, "tools": TOOLS, **fields})
    assert status == 200, body
    return body["choices"][0]


@pytest.mark.parametrize("family", [*CALLS])
async def test_calls_have_the_format_of_the_template(serve_family: Any, family: str) -> None:
    text = CALLS[family]
    async with serve_family(family) as (front, model):
        seen = model.answers(text)
        choice = await ask(front)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        called = [call["function"] for call in choice["message"]["tool_calls"]]
        assert called == [{"name": "weather", "arguments": '{"city": "Ulm"}'}, {"name": "now", "arguments": "{}"}]
        assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
        events = await front.events(CHAT, {"messages": USER, "tools": TOOLS})
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
        firsts = [(piece["index"], piece["function"]["name"]) for piece in pieces if "id" in piece]
        assert firsts == [(0, "weather"), (1, "now")]
        assert "".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == 0) == '{"city": "Ulm"}'
        # Arguments come as they are generated; those between tags, whole.
        assert sum(piece["index"] == 0 for piece in pieces) > (2 if family == "qwen3_coder" else 5)
        assert not any(delta.get("content") for delta in deltas)

        await ask(front, tool_choice="required")
        await ask(front, tool_choice={"type": "function", "function": {"name": "weather"}})
        auto, required, named = seen[0], seen[2], seen[3]
        assert model.accepts(auto, text)
        assert model.accepts(required, text)
        assert not model.accepts(named, text), "one call"
        assert model.accepts(auto, "It is noon.")
        assert not model.accepts(required, "It is noon.")
        for wrong in (text.replace("weather", "wether"), text.replace("city", "town"), f"well{OPENERS[family]}now"):
            assert not model.accepts(auto, wrong)


@pytest.mark.parametrize("family", [*CALLS])
async def test_the_text_of_an_answer_without_calls_can_be_held_to_a_schema(serve_family: Any, family: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": PARAMETERS}}
    async with serve_family(family) as (front, model):
        seen = model.answers('{"city":"Ulm"}')
        choice = await ask(front, response_format=schema)
        assert choice["message"]["content"] == '{"city":"Ulm"}'
        assert model.accepts(seen[0], '{"city":"Ulm"}')
        assert model.accepts(seen[0], CALLS[family])
        assert not model.accepts(seen[0], "It is noon.")


@pytest.mark.parametrize("family", [*CALLS])
async def test_with_tool_choice_none_calls_are_text(serve_family: Any, family: str) -> None:
    async with serve_family(family) as (front, model):
        seen = model.answers(CALLS[family])
        choice = await ask(front, tool_choice="none")
        assert not seen[0].sampling.HasField("grammar")
        # Special tokens are not shown unless they are parsed.
        shown = CALLS[family].replace("[TOOL_CALLS]", "").replace("[ARGS]", "")
        assert choice["message"]["content"] == shown
        assert "tool_calls" not in choice["message"]


async def test_text_that_only_resembles_a_call_is_content(serve_family: Any) -> None:
    async with serve_family("llama3") as (front, model):
        for text in ('{"name": "Bob", "parameters": {}}', '{"city": "Ulm"}', "<|python_tag|>print()"):
            model.answers(text)
            choice = await ask(front)
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


async def test_variants_of_a_template_are_followed(serve_family: Any) -> None:
    async with serve_family("mistral_spaced") as (front, model):
        seen = model.answers('[TOOL_CALLS] [{"name": "now", "arguments": {}}]')
        assert (await ask(front))["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        assert model.accepts(seen[0], '[TOOL_CALLS] [{"name": "now", "arguments": {}}]')
        assert not model.accepts(seen[0], '[TOOL_CALLS][{"name": "now", "arguments": {}}]')
    async with serve_family("llama3_single") as (front, model):
        seen = model.answers('{"name": "now", "parameters": {}}')
        await ask(front)
        assert model.accepts(seen[0], '{"name": "now", "parameters": {}}')
        assert not model.accepts(seen[0], CALLS["llama3"])


async def test_parameters_between_tags_have_the_types_of_their_schemas(serve_family: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "days": {"$ref": "#/$defs/Days"},
            "note": {"type": "string"},
            "on": {"type": "boolean"},
        },
        "required": ["unit"],
        "$defs": {"Days": {"type": "integer", "minimum": 1}},
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]

    def call(**values: str) -> str:
        inside = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return f"<tool_call>\n<function=weather>\n{inside}</function>\n</tool_call>"

    async with serve_family("qwen3_coder") as (front, model):
        seen = model.answers(call(unit="C", days="3", note='say "so"\n\n</parameter> 5', on="true"))
        message = (await ask(front, tools=tools))["message"]
        arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
        assert arguments == {"unit": "C", "days": 3, "note": 'say "so"\n\n</parameter> 5', "on": True}
        assert model.accepts(seen[0], call(unit="F"))
        assert model.accepts(seen[0], call(unit="C", days="3", note="5 </param", on="false"))
        assert model.accepts(seen[0], call(unit="C", note="a </parameter> b\n</parameter> c"))
        for wrong in ({"unit": "K"}, {"days": "3"}, {"unit": "C", "days": "0"}, {"unit": "C", "on": "True"}):
            assert not model.accepts(seen[0], call(**wrong))


async def test_a_mistral_call_goes_back_into_the_history_with_its_id(serve_family: Any) -> None:
    async with serve_family("mistral") as (front, model):
        seen = model.answers(CALLS["mistral"])
        message = (await ask(front))["message"]
        assert all(len(call["id"]) == 9 for call in message["tool_calls"])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in message["tool_calls"]]
        await ask(front, messages=[*USER, message, *results])
        assert '"arguments": {"city": "Ulm"}' in model.prompt(seen[1])


async def test_calls_follow_the_reasoning_of_a_qwen3(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model):
        seen = model.answers(f"<think>\nI call <tool_call>\n</think>\n\n{CALLS['qwen3']}")
        message = (await ask(front, tool_choice="required"))["message"]
        assert message["reasoning_content"] == "I call <tool_call>"
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "now"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Ulm"}
        assert model.accepts(seen[0], f"<think>\nI call\n</think>\n\n{CALLS['qwen3']}")


async def test_a_bare_call_of_a_llama_may_follow_reasoning(serve_family: Any) -> None:
    async with serve_family("llama3", own_reasoning_parser="deepseek_r1") as (front, model):
        seen = model.answers(f"why</think>\n\n{CALLS['llama3']}")
        message = (await ask(front))["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "now"]
        for text, accepted in ((CALLS["llama3"], True), ("It is noon.", True), ('{"name": "no"}', False)):
            assert model.accepts(seen[0], f"why</think>\n\n{text}") == accepted


def form_of(base: Path, path: Path, family: str, reasoning: str = "auto", calls: str = "auto") -> AnswerFormat:
    """Return the format of a family's answers under these settings."""
    folder = path / family
    tokenizer = Tokenizer(folder if folder.exists() else make_model(base, folder, family))
    return answer_format(tokenizer, reasoning, calls, model="m")


def test_formats_are_selected_by_template_or_by_name(model_path: Path, tmp_path: Path) -> None:
    found = {
        family: (form.reasoning and form.reasoning.name, form.tools.name)
        for family in ("qwen3", "qwen3_coder", "deepseek", "llama3", "mistral", "mistral_named", "harmony")
        for form in [form_of(model_path, tmp_path, family)]
    }
    assert found == {
        "qwen3": ("qwen3", "hermes"),
        "qwen3_coder": (None, "qwen3_coder"),
        "deepseek": ("qwen3", "hermes"),
        "llama3": (None, "llama3_json"),
        "mistral": (None, "mistral"),
        "mistral_named": (None, "mistral"),
        "harmony": ("openai_gptoss", "openai"),
    }
    form = form_of(model_path, tmp_path, "qwen3", "off", "llama3_json")
    assert (form.reasoning, form.tools.name) == (None, "llama3_json")
    plain = answer_format(Tokenizer(model_path), "auto", "auto", model="m")
    assert (plain.reasoning, plain.tools.name, plain.markers) == (None, "hermes", {})


def test_a_parser_that_does_not_suit_the_model_is_refused(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FrontendConfigError, match=r"tool_call_parser of the model 'm' must be auto or hermes.*'mistral'"
    ):
        form_of(model_path, tmp_path, "deepseek", calls="mistral")
    with pytest.raises(FrontendConfigError, match=r"'openai' of the model 'm' requires .* 'openai_gptoss', got 'off'"):
        form_of(model_path, tmp_path, "harmony", "off", "openai")
