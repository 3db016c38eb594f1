"""Bodies that nobody means: each gets a clear answer in OpenAI's shape, never a 5xx, and nothing stays behind."""

import json
import random
from typing import Any

import pytest

from frontend.api import request_models
from moonpool_proto.v1 import worker_pb2

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
SURROGATE = '"\\ud800"'
NESTED = '{"a":' * 2000 + "1" + "}" * 2000
MANY = json.dumps([f"stop {at}" for at in range(10_000)])

RAW: list[tuple[str, str, int]] = [
    # (path, body, status)
    (COMPLETIONS, f'{{"prompt": {SURROGATE}}}', 400),
    (COMPLETIONS, f'{{"prompt": "a", "stop": {SURROGATE}}}', 400),
    (COMPLETIONS, f'{{"prompt": "a", "guided_regex": {SURROGATE}}}', 400),
    (COMPLETIONS, f'{{"prompt": "a", "guided_json": {{"const": {SURROGATE}}}}}', 400),
    (COMPLETIONS, f'{{"prompt": "a", "unknown": {SURROGATE}}}', 400),
    (COMPLETIONS, f'{{"prompt": "a", {SURROGATE}: 1}}', 400),
    (CHAT, f'{{"messages": [{{"role": "user", "content": {SURROGATE}}}]}}', 400),
    (CHAT, f'{{"messages": {json.dumps(USER)}, "chat_template_kwargs": {{"suffix": {SURROGATE}}}}}', 400),
    (COMPLETIONS, f'{{"prompt": "a", "stop": {MANY}}}', 400),
    (COMPLETIONS, f'{{"prompt": {MANY}}}', 400),
    (COMPLETIONS, f'{{"prompt": "a", "guided_json": {NESTED}}}', 400),
    (COMPLETIONS, f'{{"prompt": "a", "guided_json": {json.dumps(NESTED)}}}', 400),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": 1' + "0" * 4000 + "}", 400),
    (COMPLETIONS, '{"prompt": "a", "temperature": 1' + "0" * 400 + "}", 400),
    (COMPLETIONS, '{"prompt": "a", "temperature": 1e400}', 400),
    (COMPLETIONS, '{"prompt": "a", "logit_bias": {"5": 1e400}}', 400),
    (COMPLETIONS, '{"prompt": "a", "logit_bias": {"' + "9" * 400 + '": 1}}', 400),
    (COMPLETIONS, '{"prompt": "a", "temperature": NaN}', 400),
    (COMPLETIONS, '{"prompt": [' + "9" * 400 + "]}", 400),
    (COMPLETIONS, '{"prompt": "' + "w" * 600_000 + '"}', 400),
    (
        CHAT,
        '{"messages": ' + json.dumps(USER) + ', "tools": [{"type": "function", "function": {"name": "\\u0000"}}]}',
        400,
    ),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": 1, "guided_regex": "(a{1,1000}){1,1000}"}', 200),
    (COMPLETIONS, '{"prompt": "a", "guided_regex": "' + "(" * 60_000 + '"}', 400),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": 2, "max_tokens": 1}', 200),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": 1, "stop": "\\u0000"}', 200),
    (COMPLETIONS, '{"prompt": "\\u0000\\uffff\\ud83c\\udf89", "max_tokens": 1}', 200),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": 1, "logit_bias": {"5": 1, "5": 2}}', 200),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": 1, "user": "\\u0000", "metadata": {"a": [1, null]}}', 200),
]


@pytest.mark.parametrize(("path", "body", "expected"), RAW, ids=[f"{at}" for at in range(len(RAW))])
async def test_a_hostile_body_has_a_clear_answer(cluster: Any, front: Any, path: str, body: str, expected: int) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    async with front.http.post(front.url + path, data=body.encode()) as response:
        answer = await response.json()
    assert response.status == expected, answer
    if expected == 400:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert 0 < len(answer["error"]["message"]) < 2000
    await front.quiet()


async def test_ten_thousand_stop_texts_are_refused_by_their_number(front: Any) -> None:
    _, answer = await front.post(COMPLETIONS, {"prompt": "a", "stop": json.loads(MANY)})
    assert answer["error"]["param"] == "stop"
    assert answer["error"]["message"] == "stop must have at most 16 strings, got 10000"


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value, often one that looks nearly right."""
    plain: list[Any] = [
        None, True, False, 0, 1, -1, 2, 0.5, -0.5, 2**31, 2**63, 2**64, 1e308, "", "a", "none", "auto", "text",
        "json_object", "function", "\x00", "🎉", [], {}, [5], ["a"], {"5": 1}, {"type": "function"},
    ]  # fmt: skip
    if depth > 2 or rng.random() < 0.6:
        return rng.choice(plain)
    if rng.random() < 0.5:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = ["type", "json", "regex", "name", "function", "parameters", "schema", "json_schema", "role", "content", "id"]
    return {rng.choice(keys): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


@pytest.mark.parametrize(
    ("path", "model"), [(COMPLETIONS, request_models.CompletionBody), (CHAT, request_models.ChatBody)]
)
async def test_no_mixture_of_fields_is_a_fault_of_ours(cluster: Any, front: Any, path: str, model: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    base = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER}
    rng = random.Random(path)
    statuses = set()
    for _ in range(400):
        fields = {name: anything(rng) for name in rng.sample(sorted(model.model_fields), rng.randrange(1, 4))}
        body = {**base, "max_tokens": 1, **fields}
        if body.get("stream") is True:
            body.pop("stream")
        status, answer = await front.post(path, body)
        assert status in (200, 400, 404), (body, answer)
        statuses.add(status)
    assert statuses >= {200, 400}
    await front.quiet()
