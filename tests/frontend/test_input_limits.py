"""Inputs that are too large are refused before they cost anything, and none that the model could take."""

import asyncio
import hashlib
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.api.body import BodyBudget
from frontend.errors import BodyTooLarge
from frontend.input_limits import check_values, num_commas
from frontend.tokenizer import Tokenizer
from moonpool_proto.v1 import worker_pb2

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
MAX_MODEL_LEN = 512
MIB = 1 << 20


async def send(front: Any, path: str, raw: bytes) -> tuple[int, Any]:
    async with front.http.post(front.url + path, data=io.BytesIO(raw)) as response:
        return response.status, await response.json()


class Encoded:
    """Texts that the frontend's tokenizer was given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.texts))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Encoded:
    seen, encode = Encoded(), Tokenizer.encode

    def spy(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        seen.texts.append(text)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    return seen


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TOKENIZE, {"prompt": "w" * 15 * MIB}),
        (TOKENIZE, {"messages": [{"role": "user", "content": "w" * 15 * MIB}]}),
        (DETOKENIZE, {"tokens": [1] * 5 * MIB}),
    ],
)
async def test_a_body_that_no_context_holds_is_refused_unread(
    front: Any, encoded: Encoded, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    monkeypatch.setattr(BodyBudget, "take", lambda self, nbytes, tenant: received.append(nbytes))
    status, answer = await send(front, path, json.dumps(body).encode())
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    assert not received
    assert not encoded.texts


TOO_LONG: list[tuple[str, Any, str]] = [
    # (path, body, the field at fault)
    (TOKENIZE, {"prompt": "w" * 200_000}, "prompt"),
    (TOKENIZE, {"messages": [{"role": "user", "content": "w" * 200_000}]}, "messages"),
    (DETOKENIZE, {"tokens": [5] * (4 * MAX_MODEL_LEN + 1)}, "tokens"),
    (COMPLETIONS, {"prompt": "w" * 10 * MIB}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", "w" * 10 * MIB]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 100_000}, "prompt"),
    (COMPLETIONS, {"prompt": "w" * 10 * MIB, "truncate_prompt_tokens": 5}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "w" * 10 * MIB}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "w" * 10 * MIB}], "truncation": "auto"}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "field"), TOO_LONG, ids=[f"{at}" for at in range(len(TOO_LONG))])
async def test_what_is_certainly_too_long_is_refused_without_tokenizing(
    front: Any, encoded: Encoded, path: str, body: Any, field: str
) -> None:
    status, answer = await send(front, path, json.dumps(body).encode())
    assert (status, answer["error"]["param"]) == (400, field), answer
    assert "must have at most" in answer["error"]["message"] or "maximum context" in answer["error"]["message"]
    assert encoded.num_chars < 100
    await front.quiet()


async def test_a_text_of_few_bytes_a_token_is_refused_after_part_of_it(cluster: Any, front: Any, encoded: Any) -> None:
    """64 KiB of bytes that are a token each, where the longest token would allow for 50 contexts of it."""
    text = "\U00010348" * 1500  # 4 bytes, 4 tokens
    assert len(text.encode()) > 8 * MAX_MODEL_LEN
    status, answer = await front.post(COMPLETIONS, {"prompt": text, "max_tokens": 1})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert len(encoded.texts) <= 1


async def test_what_just_fits_is_served(cluster: Any, front: Any, tokenizer: Tokenizer) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    longest = max((tokenizer.token_bytes(at).decode(errors="ignore") for at in range(4, 340)), key=len)
    text = longest * ((MAX_MODEL_LEN - 2) // len(tokenizer.encode(longest, add_special_tokens=False)))
    for body in ({"prompt": text}, {"prompt": [5] * (MAX_MODEL_LEN - 1)}):
        status, answer = await front.post(COMPLETIONS, body | {"max_tokens": 1})
        assert status == 200, answer
    status, answer = await front.post(TOKENIZE, {"prompt": text})
    assert status == 200
    status, answer = await front.post(DETOKENIZE, {"tokens": answer["tokens"] * 3})
    assert status == 200
    escaped = '{"prompt": "' + "\\u0061" * 1500 + '"}'
    assert (await send(front, TOKENIZE, escaped.encode()))[0] == 200


async def test_truncation_keeps_the_end_of_texts_of_several_contexts(
    cluster: Any, front: Any, tokenizer: Tokenizer
) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    text = "the quick brown fox " * 5000
    body = {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 5, "echo": True}
    status, answer = await front.post(COMPLETIONS, body)
    assert status == 200, answer
    assert text.endswith(answer["choices"][0]["text"].removesuffix(tokenizer.decode([20], skip_special_tokens=True)))


async def test_many_values_are_refused_before_they_are_parsed(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("frontend.api.app.parse", never)
    for raw in (
        b'{"prompt":[' + b"1," * (7 * MIB) + b"1]}",
        b'{"prompt":"a","x":[' + b"{}," * (5 * MIB) + b"1]}",
        b'{"prompt":"a","x":[' + b'"\\\\",' * (3 * MIB) + b"1]}",
    ):
        assert (await send(front, COMPLETIONS, raw))[0] == 413
    await front.quiet()


async def test_commas_in_a_text_are_no_values(cluster: Any, front: Any) -> None:
    status, answer = await front.post(COMPLETIONS, {"prompt": ',"\\' * 200_000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def commas(value: Any) -> int:
    if isinstance(value, list):
        return max(0, len(value) - 1) + sum(map(commas, value))
    if isinstance(value, dict):
        return max(0, len(value) - 1) + sum(map(commas, value.values()))
    return 0


@given(JSON, st.booleans())
def test_values_are_counted_by_the_commas_between_them(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert num_commas(raw) == commas(value)
    check_values(raw, commas(value) + 1)
    if commas(value):
        with pytest.raises(BodyTooLarge):
            check_values(raw, commas(value))


@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1, 3 * MIB])
def test_commas_are_counted_across_pieces(size: int) -> None:
    raw = b'["' + b"," * size + b'",1,"' + b"," * 10 + b'"]'
    assert num_commas(raw) == 2


async def test_a_client_that_leaves_while_its_text_waits_costs_no_tokenizing(
    front: Any, encoded: Encoded, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    let, begun, encode = threading.Event(), threading.Semaphore(0), Tokenizer.encode

    def slow(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        begun.release()
        assert let.wait(10)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    busy = [asyncio.create_task(front.post(TOKENIZE, {"prompt": "a"})) for _ in range(2)]
    for _ in busy:
        assert await asyncio.to_thread(begun.acquire, timeout=10)
    leaving = [asyncio.create_task(front.post(path, {"prompt": "gone"})) for path in (TOKENIZE, COMPLETIONS) * 5]
    await until(front.validation, lambda answer: answer["counts"]["queued_work"] == 10)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await until(front.validation, lambda answer: answer["counts"]["queued_work"] == 0)
    let.set()
    assert [status for status, _ in await asyncio.gather(*busy)] == [200, 200]
    assert not begun.acquire(blocking=False), "nothing more was tokenised"
    await front.quiet()


async def test_one_tenants_waiting_texts_delay_another_by_those_in_work(
    start_front: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    entries = [
        {"name": name, "tenant": name, "hash": "sha256:" + hashlib.sha256(name.encode()).hexdigest()} for name in "ab"
    ]
    (tmp_path / "keys.yaml").write_text(json.dumps({"keys": entries}))
    let, order, encode = threading.Semaphore(0), list[str](), Tokenizer.encode

    def slow(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        order.append(text)
        assert let.acquire(timeout=10)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    async with start_front(api_keys_file=tmp_path / "keys.yaml") as front:

        def call(tenant: str) -> "asyncio.Task[Any]":
            headers = {"authorization": f"Bearer {tenant}"}
            return asyncio.create_task(front.post(TOKENIZE, {"prompt": tenant}, headers=headers))

        many = [call("a") for _ in range(30)]
        await until(front.validation, lambda answer: answer["counts"]["queued_work"] == 28)
        other = call("b")
        await until(front.validation, lambda answer: answer["counts"]["queued_work"] == 29)
        for _ in range(31):
            let.release()
        answers = await asyncio.gather(*many, other)
        assert {status for status, _ in answers} == {200}
        assert order.index("b") <= 3
        await front.quiet()


def test_a_tenants_long_bodies_are_read_at_a_bounded_pace() -> None:
    budget, now_s, burst = BodyBudget(1 << 40), 100.0, 0
    while not budget.pause_s("a", MIB, now_s):
        burst += MIB
    assert burst <= 16 * MIB
    began_s = now_s
    for _ in range(640):
        now_s += budget.pause_s("a", MIB, now_s)
    assert 640 / (now_s - began_s) == pytest.approx(64, rel=0.02)  # MiB per second
    assert budget.pause_s("b", MIB, now_s) == 0  # another tenant's


async def test_short_bodies_are_read_at_once_whatever_else_their_tenant_sends() -> None:
    budget = BodyBudget(1 << 40)
    budget.pause_s("a", 1 << 36, asyncio.get_running_loop().time())  # as much as takes minutes
    with budget.place("a") as short, budget.place("a") as long:
        reading = [asyncio.create_task(place.take(nbytes)) for place, nbytes in ((short, 64 << 10), (long, MIB))]
        done, waiting = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        assert (done, waiting) == ({reading[0]}, {reading[1]})
        reading[1].cancel()
    assert not budget.used_nbytes
