"""Chats of models with windows tell workers where their system messages end, so that other chats can share them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from frontend.answer_memory import AnswerMemory
from frontend.api.request_models import ChatMessage, ChatRendering
from frontend.config import ServedModelConfig
from frontend.prompts import PromptReader
from frontend.tokenizer import Tokenizer
from moonpool_proto.v1 import worker_pb2

SYSTEM = {"role": "system", "content": "You are the cat of the house, and you speak of nothing else."}
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "the cat"}
IN_ORDER = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
LAST_FIRST = IN_ORDER.replace("in messages", "in messages | reverse")


def changed(model_path: Path, folder: Path, **config: Any) -> Path:
    """Return a copy of the tiny model's folder with changes to config.json."""
    shutil.copytree(model_path, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.fixture
def windowed(model_path: Path, tmp_path: Path) -> Path:
    return changed(model_path, tmp_path / "windowed", sliding_window=16)


def with_template(folder: Path, template: str) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


def heads(folder: Path, *chats: list[dict[str, str]], nbytes: int = 1 << 20, special: bool = False) -> list[list[int]]:
    """Return the ids of each chat that are reported as those of its system messages."""
    reader = PromptReader(Tokenizer(folder), "tiny", AnswerMemory(nbytes))
    prompts = [
        reader.chat(
            [ChatMessage.model_validate(message) for message in chat],
            ChatRendering(),
            add_special_tokens=special,
            scope=("tenant", ""),
        )
        for chat in chats
    ]
    return [prompt.token_ids[: prompt.head_tokens] for prompt in prompts]


@pytest.mark.parametrize("nbytes", [0, 1 << 20])  # of remembered answers
def test_the_head_is_what_chats_with_the_same_system_message_share(windowed: Path, nbytes: int) -> None:
    other = {"role": "user", "content": "Where is the dog?"}
    one, two, three = heads(windowed, [SYSTEM, USER], [SYSTEM, USER, ANSWER, USER], [SYSTEM, other], nbytes=nbytes)
    assert one == two == three
    assert Tokenizer(windowed).decode(one, skip_special_tokens=False).endswith(SYSTEM["content"])


def test_a_head_of_several_messages_ends_with_the_last(windowed: Path) -> None:
    chat = [SYSTEM, {"role": "developer", "content": "Be brief."}, USER]
    (head,) = heads(with_template(windowed, IN_ORDER), chat)
    text = Tokenizer(windowed).decode(head, skip_special_tokens=False)
    assert text == f"<|im_start|>{SYSTEM['content']}<|im_end|><|im_start|>Be brief."


@pytest.mark.parametrize("chat", [[USER], [USER, ANSWER, USER], [USER, SYSTEM], [{**SYSTEM, "content": " "}, USER]])
def test_a_chat_without_leading_system_messages_has_no_head(windowed: Path, chat: list[dict[str, str]]) -> None:
    assert heads(with_template(windowed, IN_ORDER), chat) == [[]]


def test_a_head_that_the_template_does_not_write_first_is_as_long_as_what_precedes_its_end(windowed: Path) -> None:
    (head,) = heads(with_template(windowed, LAST_FIRST), [SYSTEM, USER])
    text = Tokenizer(windowed).decode(head, skip_special_tokens=False)
    assert text == f"<|im_start|>hi<|im_end|><|im_start|>{SYSTEM['content']}"


@pytest.mark.parametrize("config", [{}, {"sliding_window": None}, {"sliding_window": 16, "use_sliding_window": False}])
def test_models_without_windows_need_no_head(model_path: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    assert heads(changed(model_path, tmp_path / "plain", **config), [SYSTEM, USER]) == [[]]


async def test_workers_are_told_where_the_head_ends(cluster: Any, start_front: Any, windowed: Path) -> None:
    submits = list[worker_pb2.Submit]()

    def answer(submit: worker_pb2.Submit) -> Any:
        submits.append(submit)
        return [20], worker_pb2.FINISH_LENGTH

    cluster.answer_with(answer)
    async with start_front(models=(ServedModelConfig(windowed, "tiny"),)) as front:
        for chat in ([SYSTEM, USER], [USER]):
            status, body = await front.post("/v1/chat/completions", {"messages": chat, "max_tokens": 1})
            assert status == 200, body
        assert (await front.post("/v1/completions", {"prompt": "the cat", "max_tokens": 1}))[0] == 200
    (head,) = heads(windowed, [SYSTEM, USER])
    assert [submit.head_tokens for submit in submits] == [len(head), 0, 0]
