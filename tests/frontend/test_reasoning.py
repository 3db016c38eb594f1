"""Reasoning of chat answers over real HTTP: apart from the content, counted, and free of the content's grammar."""

from typing import Any

import openai
import pytest

from moonpool_proto.v1 import common_pb2, worker_pb2

LENGTH = worker_pb2.FINISH_LENGTH
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


async def ask(front: Any, **fields: Any) -> dict[str, Any]:
    status, body = await front.post(CHAT, {"messages": USER, **fields})
    assert status == 200, body
    return body


@pytest.mark.parametrize(
    ("family", "text", "num_reasoning"),
    [("qwen3", "<think>\nwhy\n</think>\n\nso", 7), ("deepseek", "why\n</think>\n\nso", 5)],
)
async def test_reasoning_is_a_field_of_its_own_and_its_tokens_are_counted(
    serve_family: Any, family: str, text: str, num_reasoning: int
) -> None:
    async with serve_family(family) as (front, model):
        model.answers(text)
        body = await ask(front)
    assert body["choices"][0]["message"] == {"role": "assistant", "reasoning_content": "why", "content": "so"}
    num_tokens = len(model.ids(text)) + 1
    assert body["usage"]["completion_tokens"] == num_tokens
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}


async def test_the_openai_client_is_streamed_the_reasoning_before_the_content(serve_family: Any) -> None:
    async with serve_family("deepseek") as (front, model):
        model.answers("why not\n</think>\n\nso so")
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}, n=2
            )
            parts: list[list[tuple[str, str]]] = [[], []]
            async for chunk in stream:
                for choice in chunk.choices:
                    delta = choice.delta.model_dump()
                    for name in ("reasoning_content", "content"):
                        if delta.get(name):
                            parts[choice.index].append((name, delta[name]))
                usage = chunk.usage
    for part in parts:
        names = [name for name, _ in part]
        assert names == sorted(names, reverse=True), "reasoning first"
        assert len(names) > 4, "piece by piece"
        assert "".join(text for name, text in part if name == "reasoning_content") == "why not"
        assert "".join(text for name, text in part if name == "content") == "so so"
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 2 * 9


async def test_no_event_of_a_stream_is_empty(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model):
        model.answers("<think>\nwhy\n</think>\n\nso")
        first, *events = await front.events(CHAT, {"messages": USER})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(choice["delta"] or choice["finish_reason"] for event in events for choice in event["choices"])


async def test_thinking_that_the_template_turns_off_leaves_only_content(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model):
        model.answers("<think> is a tag")
        body = await ask(front, chat_template_kwargs={"enable_thinking": False})
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "reasoning_content": None, "content": "<think> is a tag"}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_an_answer_cut_within_its_reasoning_has_no_content(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model):
        model.answers("<think>\nwhy\n", LENGTH)
        choice = (await ask(front))["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
        assert choice["message"]["reasoning_content"] == "why\n"
        model.answers("<think>\nwhy not</think>so")
        choice = (await ask(front, stop="not"))["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "not")
        assert choice["message"] == {"role": "assistant", "reasoning_content": "why ", "content": None}


async def test_the_parser_is_chosen_by_the_setting(serve_family: Any) -> None:
    async with serve_family("qwen3", own_reasoning_parser="off") as (front, model):
        model.answers("<think>why</think>so")
        body = await ask(front)
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "<think>why</think>so"}
        assert "completion_tokens_details" not in body["usage"]
    async with serve_family("llama3", own_reasoning_parser="deepseek_r1") as (front, model):
        model.answers("why</think>so")
        message = (await ask(front))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("why", "so")


async def test_reasoning_can_be_left_out_and_is_text_in_completions(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model):
        model.answers("<think>why</think>so")
        body = await ask(front, include_reasoning=False)
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "so"}
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        events = await front.events(CHAT, {"messages": USER, "include_reasoning": False})
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas) == "so"
        assert not any("reasoning_content" in delta for delta in deltas)
        _, completion = await front.post(COMPLETIONS, {"prompt": "a"})
        assert completion["choices"][0]["text"] == "<think>why</think>so"


async def test_every_token_has_its_log_probability_reasoning_or_not(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model):
        model.answers("<think>why</think>so")
        body = await ask(front, logprobs=True)
        scored = [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]]
        assert "".join(scored) == "<think>why</think>so<|im_end|>"
        assert len(scored) == body["usage"]["completion_tokens"]
        events = await front.events(CHAT, {"messages": USER, "logprobs": True})
        scores = [choice.get("logprobs") for event in events for choice in event["choices"]]
        assert sum(len(each["content"]) for each in scores if each) == len(scored)


GRAMMARS: list[
    tuple[dict[str, Any], str, str]
] = [  # fields, content that the grammar accepts, and one that it does not
    ({"response_format": FORMAT}, '{"a":5}', '{"b":5}'),
    ({"guided_regex": "a/b+"}, "a/bb", "a/c"),
    ({"guided_choice": ["yes", "no"]}, "no", "perhaps"),
    ({"guided_grammar": 'start: "x" NUMBER // }\nNUMBER: /[0-9]+/'}, "x12", "x"),
    ({"tools": TOOLS}, NOW, NOW[:-1]),
    ({"tools": TOOLS, "tool_choice": "required"}, NOW, "so"),
]


@pytest.mark.parametrize(("fields", "good", "bad"), GRAMMARS)
async def test_a_grammar_applies_to_the_content_only(
    serve_family: Any, fields: dict[str, Any], good: str, bad: str
) -> None:
    async with serve_family("qwen3") as (front, model):
        seen = model.answers(f"<think>\nwhy\n</think>\n\n{good}")
        message = (await ask(front, **fields))["choices"][0]["message"]
        assert message["reasoning_content"] == "why"
        assert (message["content"] == good) != ("tool_calls" in message)
        for before in ("", "<think>\nwhy {}\n</think>\n\n", "<think></think>"):
            assert model.accepts(seen[0], before + good)
            assert not model.accepts(seen[0], before + bad)
        assert not model.accepts(seen[0], f"<think>\nwhy\n{good}"), "never closed"


async def test_reasoning_that_the_prompt_opens_must_end_before_the_grammar_begins(serve_family: Any) -> None:
    async with serve_family("deepseek") as (front, model):
        seen = model.answers('why</think>{"a":5}')
        message = (await ask(front, response_format=FORMAT))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("why", '{"a":5}')
        assert model.accepts(seen[0], 'why\n</think>\n\n{"a":5}')
        assert not model.accepts(seen[0], '{"a":5}')


async def test_without_reasoning_to_come_a_grammar_is_that_of_the_whole_answer(serve_family: Any) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    async with serve_family("qwen3") as (front, model):
        seen = model.answers('{"a":5}')
        await ask(front, response_format=FORMAT, **off)
        assert seen[0].sampling.grammar.kind == common_pb2.Grammar.KIND_JSON_SCHEMA
        await ask(front, tools=TOOLS, **off)
        assert model.accepts(seen[1], NOW)
        assert not model.accepts(seen[1], f"<think></think>{NOW}")


async def test_a_continued_answer_is_in_its_reasoning_if_the_message_is(serve_family: Any) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    async with serve_family("qwen3") as (front, model):
        model.answers("so</think>so")
        for content, expected in (("well", (None, "so</think>so")), ("<think>well", ("so", "so"))):
            messages = [*USER, {"role": "assistant", "content": content}]
            message = (await ask(front, messages=messages, **fields))["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == expected


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_a_continued_message_of_gpt_oss_ends_before_a_call(serve_family: Any, tool_choice: str) -> None:
    call = "<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    messages = [*USER, {"role": "assistant", "content": "well"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "tools": TOOLS}
    async with serve_family("harmony") as (front, model):
        seen = model.answers(f" so{call}")
        choice = (await ask(front, messages=messages, tool_choice=tool_choice, **fields))["choices"][0]
        assert model.prompt(seen[0]).endswith("well")
        assert choice["message"]["content"] == " so"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        assert model.accepts(seen[0], f" so{call}")
        assert model.accepts(seen[0], " so") == (tool_choice == "auto")
        assert not model.accepts(seen[0], "<|channel|>final<|message|>so")


async def test_a_limit_within_a_header_of_gpt_oss_leaves_no_content(serve_family: Any) -> None:
    async with serve_family("harmony") as (front, model):
        model.answers("<|channel|>analysis<|message|>why<|end|><|start|>assistant", worker_pb2.FINISH_LENGTH)
        choice = (await ask(front))["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == ("why", "length")
    assert not choice["message"]["content"]


async def test_gpt_oss_with_calls_of_hermes_has_headers(serve_family: Any) -> None:
    async with serve_family("harmony", own_tool_call_parser="hermes") as (front, model):
        seen = model.answers(f"<|channel|>final<|message|>{NOW}")
        choice = (await ask(front, tools=TOOLS))["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
        assert model.accepts(seen[0], f"<|channel|>final<|message|>{NOW}")
        fields = {"continue_final_message": True, "add_generation_prompt": False, "tools": TOOLS}
        await ask(front, messages=[*USER, {"role": "assistant", "content": "well"}], **fields)
        assert model.accepts(seen[1], f"so{NOW}")


async def test_an_invalid_part_of_a_grammar_after_reasoning_is_named(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, _):
        for fields, param in (
            ({"guided_regex": "(("}, "guided_regex"),
            ({"guided_json": {"type": "none"}}, "guided_json"),
            ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ):
            status, body = await front.post(CHAT, {"messages": USER, **fields})
            assert (status, body["error"]["param"]) == (400, param), body


async def test_the_history_keeps_reasoning_that_the_client_sends_back(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model):
        seen = model.answers("so")
        answer = {"role": "assistant", "reasoning_content": "why", "content": "so"}
        await ask(front, messages=[*USER, answer, *USER])
        assert "<think>\nwhy\n</think>\n\nso<|im_end|>" in model.prompt(seen[0])
    async with serve_family("harmony") as (front, model):
        seen = model.answers("<|channel|>final<|message|>so")
        await ask(front, messages=[*USER, answer, *USER])
        assert "<|channel|>analysis<|message|>why<|message|>so<|end|>" in model.prompt(seen[0])


async def test_the_channels_of_gpt_oss_are_told_apart(serve_family: Any) -> None:
    analysis = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
    async with serve_family("harmony") as (front, model):
        seen = model.answers(f'{analysis}<|channel|>final<|message|>{{"a":5}}')
        body = await ask(front, response_format=FORMAT)
        message = body["choices"][0]["message"]
        assert message == {"role": "assistant", "reasoning_content": "why", "content": '{"a":5}'}
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
        assert model.accepts(seen[0], f'{analysis}<|channel|>final<|message|>{{"a":5}}')
        assert not model.accepts(seen[0], f"{analysis}<|channel|>final<|message|>so")
        call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
        seen = model.answers(analysis + call)
        choice = (await ask(front, tools=TOOLS, tool_choice="required"))["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "why"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        assert model.accepts(seen[0], analysis + call)
        assert not model.accepts(seen[0], f"{analysis}<|channel|>final<|message|>so")
