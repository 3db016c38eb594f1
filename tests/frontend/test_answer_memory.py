"""Conversations come back: an answer in a history keeps the ids it was generated with, and its text to the byte."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontend.answer_memory import AnswerMemory, AnswerTokens, answer_tokens
from frontend.api.request_models import ChatMessage, ChatRendering
from frontend.prompts import ChatPrompt, PromptReader
from frontend.tokenizer import Tokenizer, byte_alphabet
from moonpool_proto.v1 import worker_pb2

STOP, LENGTH = worker_pb2.FINISH_STOP, worker_pb2.FINISH_LENGTH
SCOPE = ("tenant", "salt")
TRIMMING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNTHINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTING = "{{ messages | length }} messages" + TRIMMING
TWICE = "{% for message in messages %}{{ message.content }}|{{ message.content }}<|im_end|>{% endfor %}"
LENGTHS = "{% for message in messages %}{{ message.content | length }}:{{ message.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def token_of(tokenizer: Tokenizer) -> dict[int, int]:
    """The id of each byte."""
    return {byte: tokenizer._fast.token_to_id(char) for char, byte in byte_alphabet().items()}


@pytest.fixture
def letters(token_of: dict[int, int]) -> Callable[[str], list[int]]:
    """A text's ids, one for each byte: as no tokenizer would make them."""
    return lambda text: [token_of[byte] for byte in text.encode()]


Letters = Callable[[str], list[int]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class Prompts:
    """The prompts that the scripted cluster was asked with, and what it answers."""

    def __init__(self, cluster: Any, prompt_of: Any, ids: list[int], finish: int) -> None:
        self.seen: list[list[int]] = []

        def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
            self.seen.append(prompt_of(submit))
            return ids, finish

        cluster.answer_with(answer)


async def said(front: Any, messages: list[dict[str, str]], **options: Any) -> str:
    status, body = await front.post("/v1/chat/completions", {"messages": messages, "max_tokens": 60, **options})
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_comes_back_with_the_ids_it_was_generated_with(
    cluster: Any, front: Any, prompt_of: Any, letters: Letters, ids_of: Letters, streamed: bool
) -> None:
    ids = letters("the cat 🎉")
    prompts = Prompts(cluster, prompt_of, [*ids, 3], STOP)
    chat = [user("hi")]
    if streamed:
        events = await front.events("/v1/chat/completions", {"messages": chat, "max_tokens": 60})
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    else:
        text = await said(front, chat)
    assert ids_of(text) != ids
    await said(front, [*chat, assistant(text), user("more")])
    first, second = prompts.seen
    assert second[: len(first) + len(ids) + 1] == [*first, *ids, 3]
    _, metrics = await front.get("/metrics")
    assert 'moonpool:answer_memory_hits_total{model_name="tiny"} 1.0' in metrics
    assert 'moonpool:answer_memory_misses_total{model_name="tiny"} 0.0' in metrics


async def test_each_of_several_answers_comes_back_as_it_was(
    cluster: Any, front: Any, prompt_of: Any, letters: Letters
) -> None:
    answers, prompts = [letters("the cat"), letters("the fox")], []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        prompts.append(prompt_of(submit))
        return [*answers[submit.sampling.choice], 3], STOP

    cluster.answer_with(answer)
    chat = {"messages": [user("hi")], "max_tokens": 60, "n": 2}
    _, body = await front.post("/v1/chat/completions", chat)
    for choice, ids in zip(body["choices"], answers, strict=True):
        await said(front, [user("hi"), assistant(choice["message"]["content"]), user("more")])
        assert prompts[-1][: len(prompts[0]) + len(ids)] == [*prompts[0], *ids]


async def test_nothing_is_kept_where_the_memory_is_off(
    cluster: Any, start_front: Any, prompt_of: Any, letters: Letters, ids_of: Letters
) -> None:
    prompts = Prompts(cluster, prompt_of, [*letters("the cat"), 3], STOP)
    async with start_front(answer_memory_bytes=0) as front:
        text = await said(front, [user("hi")])
        await said(front, [user("hi"), assistant(text), user("more")])
    first, second = prompts.seen
    own = ids_of("the cat<|im_end|>")
    assert own != [*letters("the cat"), 3]
    assert second[: len(first) + len(own)] == [*first, *own]


async def test_an_answer_cut_by_a_stop_string_keeps_its_whole_tokens(
    cluster: Any, front: Any, prompt_of: Any, letters: Letters, ids_of: Letters
) -> None:
    (cut,) = ids_of(" fox")  # of which " f" stands before the stop string
    prompts = Prompts(cluster, prompt_of, [*letters("the cat"), cut, 20, 21], 0)
    text = await said(front, [user("hi")], stop="ox")
    assert text == "the cat f"
    cancel = await cluster.workers["d0"].cancels.get()
    assert (cancel.keep_kv, cancel.kept_tokens) == (True, 7)
    await said(front, [user("hi"), assistant(text), user("more")], stop="ox")
    first, second = prompts.seen
    rest = ids_of(" f<|im_end|>")
    assert second[len(first) : len(first) + 7 + len(rest)] == [*letters("the cat"), *rest]


@pytest.mark.parametrize(("end", "shown"), [(b" \n", " \n"), ("🎉".encode()[:2], "\ufffd"), (b"\xf0 a", "\ufffd a")])
async def test_what_stands_before_an_answers_odd_end_comes_back(
    cluster: Any, front: Any, prompt_of: Any, letters: Letters, token_of: dict[int, int], end: bytes, shown: str
) -> None:
    ids = letters("the cat")
    prompts = Prompts(cluster, prompt_of, [*ids, *(token_of[byte] for byte in end)], LENGTH)
    text = await said(front, [user("hi")])
    assert text == "the cat" + shown
    await said(front, [user("hi"), assistant(text), user("more")])
    first, second = prompts.seen
    assert second[: len(first) + len(ids)] == [*first, *ids]


async def test_a_request_that_its_client_leaves_is_not_kept(cluster: Any, front: Any, until: Any) -> None:
    cluster.answer_with(lambda submit: ([20, 21], 0))
    stream = await front.open_stream("/v1/chat/completions", {"messages": [user("hi")], "max_tokens": 60})
    stream.close()
    assert not (await cluster.workers["d0"].cancels.get()).keep_kv


@pytest.mark.parametrize(("first", "second"), [({"cache_salt": "a"}, {"cache_salt": "b"}), ({"cache_salt": "a"}, {})])
async def test_salts_share_no_answers(
    cluster: Any, front: Any, prompt_of: Any, letters: Letters, first: dict[str, str], second: dict[str, str]
) -> None:
    ids = letters("the cat")
    prompts = Prompts(cluster, prompt_of, [*ids, 3], STOP)
    text = await said(front, [user("hi")], **first)
    chat = [user("hi"), assistant(text), user("more")]
    await said(front, chat, **second)
    await said(front, chat, **first)
    start, other, own = prompts.seen
    assert other[: len(start) + 2] != [*start, *ids[:2]]
    assert own[: len(start) + len(ids)] == [*start, *ids]


async def test_tenants_share_no_answers(cluster: Any, start_front: Any, prompt_of: Any, letters: Letters) -> None:
    ids = letters("the cat")
    prompts = Prompts(cluster, prompt_of, [*ids, 3], STOP)
    async with start_front(api_key=("one", "two")) as front:
        for key, messages in (("one", [user("hi")]), ("two", [user("hi"), assistant("the cat"), user("more")])):
            headers = {"authorization": f"Bearer {key}"}
            status, _ = await front.post("/v1/chat/completions", {"messages": messages}, headers=headers)
            assert status == 200
    start, other = prompts.seen
    assert other[: len(start) + 2] != [*start, *ids[:2]]


async def test_an_edited_history_keeps_the_answers_before_the_edit(
    cluster: Any, front: Any, prompt_of: Any, letters: Letters
) -> None:
    ids = letters("the cat")
    prompts = Prompts(cluster, prompt_of, [*ids, 3], STOP)
    chat = [user("one")]
    for question in ("two", "three", "four"):
        chat += [assistant(await said(front, chat)), user(question)]
    await said(front, chat)
    await said(front, [*chat[:4], user("THREE"), *chat[5:]])
    whole, edited = prompts.seen[-2:]
    before = len(prompts.seen[1]) + len(ids)  # two answers stand before the third question
    assert whole[:before] == edited[:before] == [*prompts.seen[1], *ids]
    assert times(ids, whole[before:]) == 1
    assert times(ids, edited[before:]) == 0


def times(part: list[int], whole: list[int]) -> int:
    return sum(whole[at : at + len(part)] == part for at in range(len(whole)))


def reader_of(model_path: Path, folder: Path, template: str, nbytes: int = 1 << 20) -> tuple[PromptReader, Any]:
    """A reader of the tiny model with another template, and what notes the answer to a prompt."""
    shutil.copytree(model_path, folder, dirs_exist_ok=True)
    settings_ = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    tokenizer, memory = Tokenizer(folder), AnswerMemory(nbytes)

    def note(prompt: ChatPrompt, ids: list[int], text: str) -> None:
        text = text.rstrip()
        memory.remember(prompt.place, text, answer_tokens(ids, text, tokenizer.detokenizer(prompt.token_ids[-16:])))

    return PromptReader(tokenizer, "tiny", memory), note


def read(reader: PromptReader, chat: list[dict[str, str]]) -> ChatPrompt:
    messages = [ChatMessage.model_validate(message) for message in chat]
    return reader.chat(messages, ChatRendering(), add_special_tokens=False, scope=SCOPE)


def plain(reader: PromptReader, chat: list[dict[str, str]]) -> list[int]:
    messages = [ChatMessage.model_validate(message) for message in chat]
    return reader.chat_ids(messages, ChatRendering(), add_special_tokens=False)


def test_a_template_that_trims_leaves_the_end_of_an_answer_to_its_text(
    model_path: Path, tmp_path: Path, letters: Letters
) -> None:
    reader, note = reader_of(model_path, tmp_path, TRIMMING)
    first = read(reader, [user("hi")])
    note(first, letters("the cat \n"), "the cat \n")
    for text in ("the cat \n", "the cat"):  # as given, and as a client would trim it
        second = read(reader, [user("hi"), assistant(text), user("x")])
        assert second.token_ids[: len(first.token_ids) + 8] == [*first.token_ids, *letters("the cat"), 3]


@pytest.mark.parametrize("template", [UNTHINKING, COUNTING, TWICE, LENGTHS])
def test_a_template_that_does_more_than_put_an_answer_down_is_tokenised_plainly(
    model_path: Path, tmp_path: Path, letters: Letters, template: str
) -> None:
    reader, note = reader_of(model_path, tmp_path, template)
    text = "<think>\nhm</think>\n\nthe cat"
    note(read(reader, [user("hi")]), letters(text), text)
    chat = [user("hi"), assistant(text), user("x")]
    second = read(reader, chat)
    assert (second.token_ids, second.num_recalled) == (plain(reader, chat), 0)


def test_an_answer_is_known_only_where_it_was_given(model_path: Path, tmp_path: Path, letters: Letters) -> None:
    reader, note = reader_of(model_path, tmp_path, TRIMMING)
    note(read(reader, [user("hi")]), letters("the cat"), "the cat")
    for chat in ([user("ho"), assistant("the cat")], [user("hi"), assistant("the cats")], [assistant("the cat")]):
        again = read(reader, [*chat, user("x")])
        assert (again.token_ids, again.num_recalled, again.num_forgotten) == (plain(reader, [*chat, user("x")]), 0, 1)


def test_ids_that_show_no_text_do_not_come_back(model_path: Path, tmp_path: Path, letters: Letters) -> None:
    reader, note = reader_of(model_path, tmp_path, TRIMMING)
    first = read(reader, [user("hi")])
    note(first, [*letters("the"), 2, *letters(" cat"), 3], "the cat")  # <|im_start|> in the midst of it
    second = read(reader, [user("hi"), assistant("the cat"), user("x")])
    start = len(first.token_ids)
    assert second.token_ids[start : start + 3] == letters("the")
    assert second.token_ids[start:].count(2) == plain(reader, [user("x")]).count(2)


@pytest.mark.parametrize("text", ["ab ab", "b é ab", " ab", "ab\n", "a🎉b"])
def test_pieces_come_back_where_their_text_is_the_same_there(piece_folder: Path, text: str) -> None:
    tokenizer, memory = Tokenizer(piece_folder), AnswerMemory(1 << 20)
    reader = PromptReader(tokenizer, "pieces", memory)
    first = read(reader, [user("ab")])
    generated = [token_id for char in text for token_id in tokenizer.encode(char, add_special_tokens=False)]
    detokenizer = tokenizer.detokenizer(first.token_ids[-16:])
    told = "".join([*map(detokenizer.feed, generated), detokenizer.flush()])
    answer = answer_tokens(generated, told.rstrip(), tokenizer.detokenizer(first.token_ids[-16:]))
    memory.remember(first.place, told.rstrip(), answer)
    chat = [user("ab"), assistant(told), user("b")]
    second = read(reader, chat)
    own = plain(reader, chat)
    assert tokenizer.decode(second.token_ids, skip_special_tokens=False) == tokenizer.decode(
        own, skip_special_tokens=False
    )
    if second.num_recalled:
        start = len(first.token_ids)
        assert second.token_ids[start : start + len(answer.token_ids)] == answer.token_ids.tolist()
    else:
        assert second.token_ids == own
    if "Prepend" not in (piece_folder / "tokenizer.json").read_text():
        assert second.num_recalled == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 339), min_size=1, max_size=12), min_size=1, max_size=4), st.sampled_from("ab"))
def test_the_text_is_the_templates_whatever_was_generated(
    model_path: Path, tmp_path: Path, tokenizer: Tokenizer, answers: list[list[int]], word: str
) -> None:
    reader, note = reader_of(model_path, tmp_path, TRIMMING)
    chat = [user(word)]
    for ids in answers:
        detokenizer = tokenizer.detokenizer([])
        text = "".join([*map(detokenizer.feed, ids), detokenizer.flush()])
        prompt = read(reader, chat)
        assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == tokenizer.decode(
            plain(reader, chat), skip_special_tokens=False
        )
        note(prompt, ids, text)
        chat += [assistant(text), user(word)]


def test_the_memory_is_bounded_and_drops_what_was_not_used_for_longest() -> None:
    memory = AnswerMemory(4 * 300)
    places = [bytes([n]) * 32 for n in range(5)]
    for place in places[:4]:
        memory.remember(place, "yes", AnswerTokens(np.arange(11, dtype=np.int32), 3))
    assert memory.recall([(places[0], "yes"), (places[1], "yes")]) != [None, None]
    memory.remember(places[4], "yes", AnswerTokens(np.arange(11, dtype=np.int32), 3))
    found = [memory.recall([(place, "yes")]) != [None] for place in places]
    assert found == [True, True, False, True, True]
    assert memory.nbytes == 4 * 300
    memory.remember(places[4], "yes", AnswerTokens(np.arange(3, dtype=np.int32), 3))
    assert memory.nbytes == 4 * 300 - 8 * 4


def test_a_conversations_first_answers_outlive_its_last() -> None:
    memory = AnswerMemory(3 * 300)
    turns = [(bytes([n]) * 32, "yes") for n in range(3)]
    for place, text in turns:
        memory.remember(place, text, AnswerTokens(np.arange(11, dtype=np.int32), 3))
    memory.recall(turns)
    memory.remember(bytes([9]) * 32, "yes", AnswerTokens(np.arange(11, dtype=np.int32), 3))
    assert [found is not None for found in memory.recall(turns)] == [True, True, False]


def test_a_chats_last_answer_is_measured_with_and_without_a_memory_of_ids(model_path: Path, tmp_path: Path) -> None:
    long, short = "so it goes, " * 40, "ok"
    for nbytes in (0, 1 << 20):
        reader, _ = reader_of(model_path, tmp_path / str(nbytes), TRIMMING, nbytes)
        assert read(reader, [user("hi")]).previous_tokens == 0
        found = [
            read(reader, [user("hi"), assistant(first), user("and?"), assistant(last), user("x")]).previous_tokens
            for first, last in ((short, long), (long, short))
        ]
        actual = len(reader._tokenizer.encode(long.strip(), add_special_tokens=False))
        assert 0.7 * actual < found[0] < 1.4 * actual
        assert 1 <= found[1] < 16


def test_an_answer_that_is_to_be_continued_is_not_the_previous_one(model_path: Path, tmp_path: Path) -> None:
    reader, _ = reader_of(model_path, tmp_path, TRIMMING)
    chat = [user("hi"), assistant("so it goes"), user("and?"), assistant("then")]
    messages = [ChatMessage.model_validate(message) for message in chat]
    rendering = ChatRendering(continue_final_message=True, add_generation_prompt=False)
    whole = reader.chat(messages[:2], rendering, add_special_tokens=False, scope=SCOPE)
    continued = reader.chat(messages, rendering, add_special_tokens=False, scope=SCOPE)
    assert (whole.previous_tokens, continued.previous_tokens > 0) == (0, True)


async def test_the_conductor_learns_how_long_a_chats_last_answer_was(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20, 21], LENGTH))
    for messages in ([user("hi")], [user("hi"), assistant("so it goes, " * 8), user("x")]):
        await front.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    await front.post("/v1/completions", {"prompt": "the", "max_tokens": 2})
    first, second, completion = [request.previous_tokens for request in cluster.conductor.scheduled]
    assert (first, completion) == (0, 0)
    assert 8 < second < cluster.conductor.scheduled[1].prompt_tokens
