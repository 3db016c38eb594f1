"""A chat longer than the context: refused by default, or the oldest turns go, and the beginning stays for long."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.answer_memory import AnswerMemory
from frontend.api.request_models import ChatMessage, ChatRendering
from frontend.errors import ContextLengthExceeded
from frontend.prompts import ChatPrompt, ChatTruncator, PromptReader, _first_fitting, _Tried, first_kept, head_length
from frontend.tokenizer import Tokenizer
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


BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
STEPS = 16


class Model:
    """A tokenizer that counts what it reads, with a truncator for chats of `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokenizer = Tokenizer(BUNDLED)
        self.reader = PromptReader(self.tokenizer, "m", AnswerMemory(1 << 20))
        self.truncator = ChatTruncator(self.reader, self.tokenizer)
        self.num_prompts = 0
        self.num_chars = 0
        encode = self.tokenizer.encode

        def counted(text: str, *, add_special_tokens: bool) -> list[int]:
            self.num_chars += len(text)
            return encode(text, add_special_tokens=add_special_tokens)

        self.tokenizer.encode = counted  # type: ignore[method-assign]
        read = self.reader.chat

        def counted_chat(*args: Any, **options: Any) -> ChatPrompt:
            self.num_prompts += 1
            return read(*args, **options)

        self.reader.chat = counted_chat  # type: ignore[method-assign]

    def check(self, text: str, wanted: int) -> None:
        """Raise as the frontend does for a text that certainly does not fit."""
        if self.tokenizer.least_tokens(text, self.limit) + wanted > self.limit:
            raise ContextLengthExceeded("too long")

    def truncated(self, messages: list[ChatMessage], wanted: int) -> tuple[list[int] | None, int]:
        """(ids, dropped messages); None: it does not fit."""
        try:
            prompt, dropped = self.truncator.truncate(
                messages,
                ChatRendering(),
                limit=self.limit,
                wanted=wanted,
                add_special_tokens=False,
                scope=("t",),
                check=partial(self.check, wanted=wanted),
            )
        except ContextLengthExceeded:
            return None, 0
        fits = len(prompt.token_ids) + wanted <= self.limit
        return (prompt.token_ids, dropped) if fits else (None, 0)

    def truncated_one_by_one(self, messages: list[ChatMessage], wanted: int) -> tuple[list[int] | None, int]:
        """The same by the former algorithm, which read the prompt for each budget in turn."""

        def read(kept: list[ChatMessage]) -> list[int]:
            return self.reader.chat(kept, ChatRendering(), add_special_tokens=False, scope=("t",)).token_ids

        ids = read(messages)
        roles = [message.role for message in messages]
        head = head_length(roles)
        if len(ids) + wanted <= self.limit:
            return ids, 0
        if head == len(roles):
            return None, 0
        overhead = self.truncator._overhead
        sizes = [overhead + len(self.tokenizer.encode(each.text, add_special_tokens=False)) for each in messages]
        word = ChatMessage.model_validate({"role": "user", "content": "a"})
        opened = self.reader.chat_ids([*messages[:head], word], ChatRendering(), add_special_tokens=False)
        step = -(-self.limit // STEPS)
        most, start = self.limit - step * (1 - (-wanted // step)), head
        for share in range(STEPS, -1, -2):
            budget = max(0, most) * share // STEPS
            at = first_kept(roles, sizes, fixed=len(opened) - overhead - 1, budget=budget, target=budget // 2)
            if at == start:
                continue
            start = at
            ids = read([*messages[:head], *messages[start:]])
            if len(ids) + wanted <= self.limit:
                return ids, start - head
        return None, 0


WORDS = st.sampled_from(["the water ", "\n\n", "owl", "é🎉", "<|im_start|>", "    ", "0123456789" * 8])
CONTENT = st.lists(WORDS, min_size=1, max_size=40).map("".join)


@st.composite
def chats(draw: Any) -> list[ChatMessage]:
    head = draw(st.lists(CONTENT, max_size=1))
    turns = draw(st.lists(st.tuples(CONTENT, CONTENT), max_size=25))
    said = [("system", text) for text in head]
    said += [each for user, answer in turns for each in (("user", user), ("assistant", answer))]
    said.append(("user", draw(CONTENT)))
    return [ChatMessage.model_validate({"role": role, "content": text}) for role, text in said]


MODEL = Model(256)


@settings(deadline=None, max_examples=150)
@given(chats(), st.integers(1, 200))
def test_truncation_drops_what_trying_each_budget_in_turn_dropped(messages: list[ChatMessage], wanted: int) -> None:
    expected = MODEL.truncated_one_by_one(messages, wanted)
    MODEL.num_prompts = 0
    assert MODEL.truncated(messages, wanted) == expected
    assert MODEL.num_prompts <= 5


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(0, 50))
def test_the_first_start_that_fits_is_found_by_few_tries(starts: list[int], least: int) -> None:
    tried: list[int] = []

    def read(start: int) -> _Tried:
        tried.append(start)
        return _Tried(ContextLengthExceeded(f"{start}"), fits=start >= least)

    start, _ = _first_fitting(starts, read, {})
    assert start == next((each for each in starts if each >= least), starts[-1])
    assert len(tried) == len(set(tried)) <= 5


def test_a_long_history_is_tokenised_at_most_twice() -> None:
    model = Model(1024)
    said = [("user", f"{at}: " + "the owls of the water wait before little places " * 8) for at in range(200)]
    chat = [{"role": role, "content": text} for at in said for role, text in (at, ("assistant", at[1]))]
    messages = [ChatMessage.model_validate(each) for each in [*chat, {"role": "user", "content": "and now?"}]]
    history = sum(len(message.text) for message in messages)
    assert history > 20 * model.limit
    ids, dropped = model.truncated(messages, 100)
    assert ids is not None
    assert dropped > 300
    assert model.num_prompts <= 2
    assert model.num_chars <= 2 * history
    assert model.truncated_one_by_one(messages, 100) == (ids, dropped)


def test_a_head_that_alone_is_too_long_is_refused_before_it_is_tokenised() -> None:
    model = Model(256)
    said = [("system", "=" * 200_000), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [ChatMessage.model_validate({"role": role, "content": text}) for role, text in said]
    model.truncated([messages[1]], 1)  # so that the template's overhead is known
    model.num_chars = 0
    assert model.truncated(messages, 10) == (None, 0)
    assert model.num_chars < 1000
