"""Structured output at the door: every form becomes the grammar it means, and what is none is refused by name."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from frontend.tokenizer import Tokenizer
from moonpool_proto.v1 import common_pb2, worker_pb2

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ü"]}}, "required": ["b"]}
JSON, LARK, REGEX = common_pb2.Grammar.KIND_JSON_SCHEMA, common_pb2.Grammar.KIND_LARK, common_pb2.Grammar.KIND_REGEX
ANY_OBJECT = {"type": "object"}

ASKED: list[tuple[dict[str, Any], int, Any]] = [
    ({"response_format": {"type": "json_object"}}, JSON, ANY_OBJECT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        JSON,
        SCHEMA,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, JSON, SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON, SCHEMA),
    ({"structured_outputs": {"json_object": True}}, JSON, ANY_OBJECT),
    ({"structured_outputs": {"regex": "[ab]{2}"}}, REGEX, "[ab]{2}"),
    ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, LARK, 'start: "a" | "b"'),
    ({"guided_json": SCHEMA}, JSON, SCHEMA),
    ({"guided_regex": "a+"}, REGEX, "a+"),
    ({"guided_grammar": 'start: "x"'}, LARK, 'start: "x"'),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_form_becomes_its_grammar(cluster: Any, front: Any, path: str) -> None:
    seen: list[common_pb2.Grammar] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit.sampling.grammar)
        return [20], worker_pb2.FINISH_LENGTH

    cluster.answer_with(answer)
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    for fields, kind, source in ASKED:
        status, body = await front.post(path, {**prompt, "max_tokens": 1, **fields})
        assert status == 200, body
        assert seen[-1].kind == kind
        assert (json.loads(seen[-1].source) if kind == JSON else seen[-1].source) == source
    # The order of properties is the order of the answer's.
    assert seen[1].source.index('"b"') < seen[1].source.index('"a"')


@pytest.mark.parametrize("name", ["structured_outputs", "guided_choice"])
async def test_a_choice_is_one_of_its_texts_whatever_characters_they_have(
    cluster: Any, front: Any, model_path: Any, tokenizer: Tokenizer, name: str
) -> None:
    seen: list[str] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit.sampling.grammar.source)
        return [20], worker_pb2.FINISH_LENGTH

    cluster.answer_with(answer)
    texts = ["yes", 'quo"te', "back\\slash\n", "\x00", "/re/", "🎉 é", "a | b"]
    field = texts if name == "guided_choice" else {"choice": texts}
    assert (await front.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, name: field}))[0] == 200
    vocabulary = LLTokenizer((model_path / "tokenizer.json").read_text(), eos_token=1, n_vocab=340)
    for text, is_one in [*((text, True) for text in texts), ("no", False), ("yes ", False), ("a", False)]:
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(seen[0]), log_level=0)
        taken = matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False))
        assert (taken and matcher.is_accepting()) == is_one, text


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "",
    ),
    ({"guided_json": {"type": "nothing"}}, "guided_json", "nothing"),
    ({"guided_json": {"$ref": "#/$defs/missing"}}, "guided_json", "missing"),
    ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 4}}, "guided_json", ""),
    ({"guided_regex": "(["}, "guided_regex", ""),
    ({"guided_grammar": "start: thing"}, "guided_grammar", "thing"),
    ({"guided_grammar": ""}, "guided_grammar", ""),
    ({"structured_outputs": {"json": "no"}}, "structured_outputs.json", "is not valid JSON"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "at most one of"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "at most one of"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "complete"),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "complete"),
]


async def test_what_cannot_be_served_is_refused_with_its_reason(cluster: Any, front: Any) -> None:
    for fields, param, word in REFUSED:
        status, body = await front.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **fields})
        assert (status, body["error"].get("param")) == (400, param), (fields, body)
        assert word in body["error"]["message"]
    assert cluster.conductor.scheduled == []


async def test_what_asks_for_nothing_is_no_grammar(cluster: Any, front: Any) -> None:
    seen: list[bool] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit.sampling.HasField("grammar"))
        return [20], worker_pb2.FINISH_LENGTH

    cluster.answer_with(answer)
    body = {"prompt": "a", "max_tokens": 1, "response_format": {"type": "text"}, "structured_outputs": {}}
    assert (await front.post(COMPLETIONS, {**body, "guided_choice": [], "guided_json": None}))[0] == 200
    assert seen == [False]


async def test_a_grammar_that_the_model_cannot_follow_is_the_requests_fault(cluster: Any, front: Any) -> None:
    prefill = cluster.workers["p0"]

    async def on_submit(submit: worker_pb2.Submit) -> None:
        prefill.fail(submit, "grammar", retryable=False)

    prefill.on_submit = on_submit
    status, body = await front.post(COMPLETIONS, {"prompt": "a", "guided_regex": "a+"})
    assert (status, body["error"]["code"]) == (400, "grammar")
    assert len(cluster.conductor.scheduled) == 1


async def test_the_token_that_completes_a_grammar_is_shown(cluster: Any, front: Any, tokenizer: Tokenizer) -> None:
    """A model without an end token ends where its grammar does, with a token that is a part of the answer."""
    ids = list(tokenizer.encode(" and the cat", add_special_tokens=False))
    cluster.answer_with(lambda submit: (ids, worker_pb2.FINISH_COMPLETE))
    _, body = await front.post(COMPLETIONS, {"prompt": "a", "max_tokens": 50, "guided_regex": " and the cat"})
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" and the cat", "stop", None)
