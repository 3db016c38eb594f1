"""Tool calls: what the grammar lets through, how answers are taken apart, and the whole over real HTTP."""

import json
import random
from collections.abc import Callable
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from frontend.api.request_models import ChatBody, ChatMessage
from frontend.chat_rendering import ChatTemplate, native_messages
from frontend.errors import InvalidRequest
from frontend.grammars import requested_grammar
from frontend.tokenizer import Tokenizer
from frontend.tool_formats import HERMES, CallDelta, ToolReader, ToolSpec
from moonpool_proto.v1 import common_pb2, worker_pb2

STOP, LENGTH = worker_pb2.FINISH_STOP, worker_pb2.FINISH_LENGTH
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/Days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Days": {"enum": [1, 3]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "a \\"}{\\\\", "days": 3}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
IdsOf = Callable[[str], list[int]]


@pytest.fixture
async def cluster(cluster: Any) -> Any:
    """Long enough for the text that tells a model of its tools, byte by byte."""
    for status in cluster.conductor.cluster.nodes:
        status.node.max_model_len = 4096
    return cluster


@pytest.fixture(scope="module")
def accepts(model_path: Any, tokenizer: Tokenizer) -> Callable[[str, str], bool]:
    """Return True if a grammar accepts a whole text, in this model's tokens."""
    vocabulary = LLTokenizer((model_path / "tokenizer.json").read_text(), eos_token=1, n_vocab=340)

    def accepts(lark: str, text: str) -> bool:
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        taken = matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False))
        return taken and matcher.is_accepting()

    return accepts


def grammar(**fields: Any) -> str:
    """Return the grammar of a request with these fields."""
    found = requested_grammar(ChatBody.model_validate({"messages": USER, "tools": TOOLS, **fields}))
    assert found is not None
    return found.source.source


@pytest.mark.parametrize(
    ("text", "auto", "required", "single"),
    [
        ("any text, {} and <tool too", True, False, False),
        (CALL, True, True, True),
        (NOW, True, True, True),
        (f"{CALL}\n{NOW}", True, True, False),
        (f"let me see{CALL}", True, False, False),
        (CALL[:-1], False, False, False),
        (f"{CALL} done", False, False, False),
        (CALL.replace("3}", "2}"), False, False, False),
        (CALL.replace("weather", "wether"), False, False, False),
        ('<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>', False, False, False),
    ],
)
def test_the_grammar_accepts_calls_that_conform_and_text_where_it_may(
    accepts: Callable[[str, str], bool], text: str, auto: bool, required: bool, single: bool
) -> None:
    assert accepts(grammar(), text) == auto
    assert accepts(grammar(tool_choice="required"), text) == required
    assert accepts(grammar(tool_choice="required", parallel_tool_calls=False), text) == single


def test_the_text_of_an_answer_that_calls_nothing_can_be_held_to_a_schema(accepts: Callable[[str, str], bool]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    lark = grammar(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
    assert accepts(lark, '{"a":5}')
    assert accepts(lark, f"{CALL}\n{NOW}")
    assert not accepts(lark, "some text")
    assert not accepts(lark, '{"a": 5}')  # no space: a model could pad for ever


def test_an_answer_calls_sixteen_times_at_most(accepts: Callable[[str, str], bool]) -> None:
    lark = grammar(tool_choice="required")
    assert accepts(lark, "\n".join([NOW] * 16))
    assert not accepts(lark, "\n".join([NOW] * 17))


def hermes() -> ToolReader:
    return HERMES.reader([ToolSpec("weather", WEATHER), ToolSpec("now", {})])


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """(content, (name, arguments) of every call) of an answer that came in pieces."""
    reader = hermes()
    content, calls = "", list[tuple[str, str]]()
    for at, piece in enumerate(pieces, start=1):
        delta = reader.feed(piece, is_last=at == len(pieces))
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append((call.name, ""))
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    return content, calls


def test_an_answer_is_taken_apart_however_it_is_cut_into_pieces() -> None:
    text = f"so <tool_ca{CALL}\n{NOW}"
    expected = ("so <tool_ca", [("weather", '{"city": "a \\"}{\\\\", "days": 3}'), ("now", "{}")])
    assert read([text]) == expected
    assert read(list(text)) == expected
    rng = random.Random(3)
    for _ in range(50):
        cuts = sorted(rng.sample(range(1, len(text)), 6))
        assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == expected


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    reader = hermes()
    assert reader.feed("a <tool", is_last=False).content == "a "
    assert reader.feed("box", is_last=False).content == "<toolbox"
    assert reader.feed(" <", is_last=True).content == " <"
    reader = hermes()
    head = reader.feed('<tool_call>\n{"name": "now", "arguments": {"a', is_last=False)
    assert head.calls == (CallDelta(0, "now", ""), CallDelta(0, None, '{"a'))


def answering(cluster: Any, ids_of: IdsOf, text: str, finish: int = STOP) -> list[common_pb2.Sampling]:
    """Let the cluster answer with `text`; what it was asked for."""
    seen: list[common_pb2.Sampling] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit.sampling)
        return ids_of(text) + ([3] if finish == STOP else []), finish

    cluster.answer_with(answer)
    return seen


async def test_calls_are_told_apart_from_the_text(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    seen = answering(cluster, ids_of, f"Let me see.\n{CALL}\n{NOW}")
    status, whole = await front.post(CHAT, {"messages": USER, "tools": TOOLS})
    assert status == 200, whole
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see.\n"
    weather, now = choice["message"]["tool_calls"]
    assert (weather["type"], weather["function"]["name"], now["function"]["name"]) == ("function", "weather", "now")
    assert json.loads(weather["function"]["arguments"]) == {"city": 'a "}{\\', "days": 3}
    assert weather["id"] != now["id"]
    assert seen[0].grammar.kind == common_pb2.Grammar.KIND_LARK
    assert "<tool_call>" in seen[0].grammar.source


async def test_the_openai_client_puts_streamed_calls_together(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    answering(cluster, ids_of, f"{CALL}\n{NOW}")
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=USER,
            tools=TOOLS,
            tool_choice="required",
            stream=True,
        )
        pieces: dict[int, list[Any]] = {}
        content, finish = "", None
        async for chunk in stream:
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                content += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    pieces.setdefault(call.index, []).append(call)
    assert (content, finish) == ("", "tool_calls")
    assert [calls[0].function.name for calls in pieces.values()] == ["weather", "now"]
    assert all(calls[0].id and not any(call.id for call in calls[1:]) for calls in pieces.values())
    arguments = ["".join(call.function.arguments for call in calls) for calls in pieces.values()]
    assert [json.loads(text) for text in arguments] == [{"city": 'a "}{\\', "days": 3}, {}]
    assert len(pieces[0]) > 5  # arguments come as they are generated


async def test_no_event_of_a_stream_is_empty(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    answering(cluster, ids_of, f"{CALL}\n{NOW}")
    _, *chunks = await front.events(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "required"})
    assert all(chunk["choices"][0]["delta"] or chunk["choices"][0]["finish_reason"] for chunk in chunks[1:])


async def test_a_text_without_calls_is_an_answer_like_any(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    answering(cluster, ids_of, "no <b>calls</b> <tool")
    _, whole = await front.post(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "auto"})
    message = whole["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "no <b>calls</b> <tool"}
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_a_call_that_is_cut_short_has_ended_for_its_length(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    answering(cluster, ids_of, CALL[:60], LENGTH)
    _, whole = await front.post(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "required"})
    choice = whole["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city"')


async def test_tool_choice_says_which_tools_the_grammar_has(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    seen = answering(cluster, ids_of, CALL)
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("none", "required", named):
        status, _ = await front.post(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": choice})
        assert status == 200
    assert not seen[0].HasField("grammar")
    assert "now" in seen[1].grammar.source
    assert "weather" in seen[2].grammar.source
    assert "now" not in seen[2].grammar.source
    none = await front.post(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "none"})
    assert none[1]["choices"][0]["message"]["content"] == CALL


async def test_a_template_without_tools_is_given_them_as_a_system_text(
    cluster: Any, front: Any, ids_of: IdsOf, tokenizer: Tokenizer, prompt_of: Any
) -> None:
    async def text(messages: list[Any], **fields: Any) -> str:
        _, body = await front.post("/tokenize", {"messages": messages, **fields})
        return tokenizer.decode(body["tokens"], skip_special_tokens=False)

    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a":1}'}}
    chat = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "sunny"}]},
    ]
    shown = await text(chat, tools=TOOLS)
    assert shown.startswith("<|bos|><|im_start|>system\nBe brief.\n\nYou may call")
    assert json.dumps(TOOLS[0], ensure_ascii=False) in shown
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "now", "arguments": {"a":1}}\n</tool_call><|im_end|>' in shown
    results = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nsunny\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in shown
    assert (await text(USER, tools=TOOLS)).startswith("<|bos|><|im_start|>system\nYou may call")


@pytest.mark.parametrize(("stop", "reason"), [("days", "stop"), ("</tool", "tool_calls")])
async def test_a_call_that_a_stop_text_cuts_is_no_reason_to_end(
    cluster: Any, front: Any, ids_of: IdsOf, stop: str, reason: str
) -> None:
    answering(cluster, ids_of, CALL)
    _, whole = await front.post(CHAT, {"messages": USER, "tools": TOOLS, "stop": stop})
    assert whole["choices"][0]["finish_reason"] == reason


def test_arguments_nested_deeper_than_a_template_can_write_are_refused() -> None:
    template = ChatTemplate("{{ tools }}{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}", {}, "here")
    nested: Any = []
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(InvalidRequest, match="rejects"):
        template.render([{"role": "assistant", "tool_calls": nested}], {}, add_generation_prompt=True)


def test_a_template_that_knows_tools_gets_them_and_calls_as_objects() -> None:
    source = (
        "{{ tools | tojson }}{% for message in messages %}[{{ message.role }}:{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.a }})"
        "{% endfor %}]{% endfor %}"
    )
    template = ChatTemplate(source, {}, "here")
    assert template.takes_tools
    assert not ChatTemplate("{{ messages }}", {}, "here").takes_tools
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 7}'}}
    messages = [
        ChatMessage.model_validate({"role": "developer", "content": "be"}),
        ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]}),
        ChatMessage.model_validate({"role": "tool", "content": "noon", "tool_call_id": "1"}),
    ]
    text = template.render(native_messages(messages, "thinking"), {"tools": [1]}, add_generation_prompt=True)
    assert text == "[1][system:be][assistant:now(7)][tool:noon]"
    for arguments in ("{", '{"a": "\\ud800"}', "[" * 5000 + "]" * 5000):
        broken = call | {"function": {"name": "now", "arguments": arguments}}
        with pytest.raises(InvalidRequest, match="is not valid JSON"):
            native_messages([ChatMessage.model_validate({"role": "assistant", "tool_calls": [broken]})], "thinking")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": TOOLS + TOOLS}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/no"}}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "tomorrow"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": TOOLS, "guided_regex": "a+"}, "guided_regex"),
    ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
    ({"messages": [*USER, {"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages.1.tool_calls.0.id"),
    ({"messages": [{"role": "tool", "content": None}]}, "messages.0.content"),
]


async def test_what_is_wrong_with_tools_is_refused_naming_the_field(cluster: Any, front: Any) -> None:
    for fields, param in BAD:
        status, body = await front.post(CHAT, {"messages": USER, **fields})
        assert (status, body["error"].get("param")) == (400, param), (fields, body)
    assert cluster.conductor.scheduled == []
