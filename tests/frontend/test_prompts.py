"""A chat longer than the context: refused by default, or the oldest turns go, and the beginning stays for long."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.prompts import first_kept, head_length
from moonpool_proto.v1 import worker_pb2

STOP = worker_pb2.FINISH_STOP
SYSTEM = {"role": "system", "content": "be brief"}
ROLES = ("system", *("user", "assistant") * 20, "user")


def turn(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"{number}: the quick brown fox jumps over the lazy dog and the cat"}


async def talk(cluster: Any, front: Any, prompt_of: Any, turns: int, **options: Any) -> list[tuple[list[int], Any]]:
    """(prompt, body) of each turn of one dialogue; the answers become its history."""
    prompts: list[list[int]] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        prompts.append(prompt_of(submit))
        return [*range(30, 50), 3], STOP

    cluster.answer_with(answer)
    chat, bodies = [SYSTEM], []
    for number in range(turns):
        chat.append(turn(number))
        status, body = await front.post("/v1/chat/completions", {"messages": chat, "max_tokens": 30, **options})
        assert status == 200, body
        bodies.append(body)
        chat.append({"role": "assistant", "content": body["choices"][0]["message"]["content"]})
    return list(zip(prompts, bodies, strict=True))


def common(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


async def test_a_chat_that_is_too_long_is_refused_by_both_numbers(front: Any) -> None:
    messages = [turn(number) for number in range(60)]
    for options in ({}, {"truncation": "disabled"}):
        status, body = await front.post("/v1/chat/completions", {"messages": messages, **options})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "512" in body["error"]["message"]
        assert 'set truncation to "auto"' in body["error"]["message"]


async def test_the_oldest_turns_go_and_the_answer_says_how_many_messages(
    cluster: Any, front: Any, prompt_of: Any, tokenizer: Any
) -> None:
    said = await talk(cluster, front, prompt_of, 40, truncation="auto")
    dropped = [body["moonpool"]["dropped_messages"] for _, body in said]
    assert dropped[0] == 0
    assert dropped[-1] > 0
    assert all(count % 2 == 0 for count in dropped)
    for number, (prompt, _) in enumerate(said):
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        assert len(prompt) + 30 <= 512
        assert text.startswith("<|bos|><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n")
        assert f"user\n{dropped[number] // 2}: the" in text
        assert f"user\n{number}: the" in text


async def test_after_a_cut_the_next_turns_go_on_from_the_same_beginning(
    cluster: Any, front: Any, prompt_of: Any
) -> None:
    said = await talk(cluster, front, prompt_of, 40, truncation="auto")
    prompts = [prompt for prompt, _ in said]
    cuts = {body["moonpool"]["dropped_messages"] for _, body in said}
    reused = [common(a, b) for a, b in pairwise(prompts)]
    going_on = [same >= len(before) for same, before in zip(reused, prompts, strict=False)]
    assert len(cuts) >= 3
    assert going_on.count(False) == len(cuts) - 1
    assert going_on.count(True) >= 4 * going_on.count(False)


async def test_what_cannot_be_cut_is_refused(front: Any) -> None:
    long = {"role": "user", "content": "the quick brown fox " * 200}
    for messages in ([long], [turn(1), {"role": "assistant", "content": "ok"}, long], [{**long, "role": "system"}]):
        status, body = await front.post("/v1/chat/completions", {"messages": messages, "truncation": "auto"})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_truncation_is_for_chats(front: Any) -> None:
    status, body = await front.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "truncation": "auto"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_parameter", "truncation")


def test_the_head_is_what_the_system_says_first() -> None:
    assert head_length(["system", "developer", "user", "system"]) == 2
    assert head_length(["user"]) == 0
    assert head_length(["system"]) == 1


@given(st.lists(st.integers(1, 60), min_size=len(ROLES), max_size=len(ROLES)), st.integers(60, 400))
def test_a_turns_cut_is_found_again_at_every_later_turn(sizes: list[int], budget: int) -> None:
    cuts = [
        first_kept(ROLES[:end], sizes[:end], fixed=sizes[0], budget=budget, target=budget // 2)
        for end in range(2, len(ROLES) + 1, 2)
    ]
    assert cuts == sorted(cuts)
    for end, cut in zip(range(2, len(ROLES) + 1, 2), cuts, strict=True):
        assert ROLES[cut] == "user"
        whole = sizes[0] + sum(sizes[cut:end])
        assert whole <= budget or cut == end - 1
    for end, (before, after) in enumerate(pairwise(cuts), start=2):
        if after > before:  # nothing goes before it must
            assert sizes[0] + sum(sizes[before : 2 * end]) > budget


@pytest.mark.parametrize(
    ("roles", "kept"),
    [
        (("user", "assistant", "tool", "assistant", "user"), 4),
        (("user", "user", "assistant", "user"), 3),
        (("assistant", "user"), 1),
        (("user", "assistant"), 0),
    ],
)
def test_only_whole_turns_go(roles: tuple[str, ...], kept: int) -> None:
    assert first_kept(roles, [10] * len(roles), fixed=0, budget=15, target=12) == kept
