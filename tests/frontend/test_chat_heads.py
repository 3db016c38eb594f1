"""Chats of models with windows tell workers what precedes their first message, so that other chats can share it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontend.answer_memory import AnswerMemory, AnswerTokens
from frontend.api.request_models import ChatMessage, ChatRendering
from frontend.config import ServedModelConfig
from frontend.prompts import ChatPrompt, PromptReader
from frontend.tokenizer import Tokenizer
from moonpool_proto.v1 import worker_pb2

SYSTEM = {"role": "system", "content": "You are the cat of the house, and you speak of nothing else. /no_think"}
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "the cat"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
IN_ORDER = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
WITH_TOOLS = "{{ messages[0].content }} Tools: {{ tools }}|{{ messages[-1].content }}"
REWRITING = IN_ORDER.replace("m.content", "m.content | replace('/no_think', '') | trim")


def changed(model_path: Path, folder: Path, **config: Any) -> Path:
    """Return a copy of the model's folder with changes to config.json."""
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


def read(
    folder: Path,
    chat: list[dict[str, str]],
    *,
    memory: AnswerMemory | None = None,
    special: bool = False,
    rendering: ChatRendering | None = None,
) -> ChatPrompt:
    reader = PromptReader(Tokenizer(folder), "tiny", memory or AnswerMemory(1 << 20))
    messages = [ChatMessage.model_validate(message) for message in chat]
    return reader.chat(messages, rendering or ChatRendering(), add_special_tokens=special, scope=("tenant", ""))


def head(folder: Path, chat: list[dict[str, str]], **options: Any) -> str:
    """Return the text that is reported as the chat's head."""
    prompt = read(folder, chat, **options)
    return Tokenizer(folder).decode(prompt.token_ids[: prompt.head_tokens], skip_special_tokens=False)


@pytest.mark.parametrize("nbytes", [0, 1 << 20])  # of remembered answers
def test_the_head_is_what_chats_with_the_same_system_message_share(windowed: Path, nbytes: int) -> None:
    other = {"role": "user", "content": "Where is the dog?"}
    chats = [SYSTEM, USER], [SYSTEM, USER, ANSWER, USER], [SYSTEM, other]
    found = [head(windowed, chat, memory=AnswerMemory(nbytes)) for chat in chats]
    start = f"<|bos|><|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n"
    assert found == [start] * 3


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        ([SYSTEM, {"role": "developer", "content": "Be brief."}, USER], "<|im_end|><|im_start|>Be brief.<|im_end|>"),
        ([{**SYSTEM, "content": " "}, USER], "<|im_start|> <|im_end|>"),
        ([USER, SYSTEM], ""),
        ([ANSWER, USER], ""),
    ],
)
def test_a_head_ends_before_the_first_message_of_another_role(
    windowed: Path, chat: list[dict[str, str]], expected: str
) -> None:
    found = head(with_template(windowed, IN_ORDER), chat)
    assert found.endswith(f"{expected}<|im_start|>")
    first = next(at for at, message in enumerate(chat) if message["role"] not in ("system", "developer"))
    assert found.count("<|im_start|>") == first + 1


@pytest.mark.parametrize("chat", [[SYSTEM], [SYSTEM, {**USER, "content": " "}]])
def test_a_chat_without_text_after_its_system_message_has_no_head(windowed: Path, chat: list[dict[str, str]]) -> None:
    assert head(with_template(windowed, IN_ORDER), chat) == ""


def test_tools_that_the_template_writes_after_the_system_message_are_in_the_head(windowed: Path) -> None:
    rendering = ChatRendering(tools=[TOOL])  # type: ignore[list-item]
    found = head(with_template(windowed, WITH_TOOLS), [SYSTEM, USER], rendering=rendering)
    assert found.startswith(f"{SYSTEM['content']} Tools: [")
    assert "look" in found
    assert found.endswith("|")


def test_a_template_that_changes_the_system_message_still_recalls_answers(windowed: Path) -> None:
    memory, folder = AnswerMemory(1 << 20), with_template(windowed, REWRITING)
    reader = PromptReader(Tokenizer(folder), "tiny", memory)

    def prompt(*chat: dict[str, str]) -> ChatPrompt:
        messages = [ChatMessage.model_validate(message) for message in chat]
        return reader.chat(messages, ChatRendering(), add_special_tokens=False, scope=("tenant", ""))

    ids = Tokenizer(folder).encode(ANSWER["content"], add_special_tokens=False)
    memory.remember(prompt(SYSTEM, USER).place, ANSWER["content"], AnswerTokens(np.array(ids, np.int32), 7))
    second = prompt(SYSTEM, USER, ANSWER, USER)
    assert second.num_recalled == 1
    assert second.head_tokens > 0


def test_a_token_that_the_tokenizer_puts_first_is_part_of_the_head(windowed: Path) -> None:
    found = head(with_template(windowed, IN_ORDER), [SYSTEM, USER], special=True)
    assert found == f"<|bos|><|im_start|>{SYSTEM['content']}<|im_end|><|im_start|>"


def test_the_head_of_a_tokenizer_that_is_not_byte_level_is_an_estimate(piece_folder: Path, tmp_path: Path) -> None:
    folder = changed(piece_folder, tmp_path / "windowed", sliding_window=16)
    chat = [{"role": "system", "content": "a" * 40}, {"role": "user", "content": "bbb"}]
    prompt = read(folder, chat)
    exact = prompt.token_ids.index(Tokenizer(folder).encode("b", add_special_tokens=False)[-1])
    assert exact - 4 <= prompt.head_tokens <= exact


@pytest.mark.parametrize("config", [{}, {"sliding_window": None}, {"sliding_window": 16, "use_sliding_window": False}])
def test_models_without_windows_need_no_head(model_path: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    assert head(changed(model_path, tmp_path / "plain", **config), [SYSTEM, USER]) == ""


async def test_workers_are_told_where_the_head_ends(cluster: Any, start_front: Any, windowed: Path) -> None:
    submits = list[worker_pb2.Submit]()

    def answer(submit: worker_pb2.Submit) -> Any:
        submits.append(submit)
        return [20], worker_pb2.FINISH_LENGTH

    cluster.answer_with(answer)
    async with start_front(models=(ServedModelConfig(windowed, "tiny"),)) as front:
        status, body = await front.post("/v1/chat/completions", {"messages": [SYSTEM, USER], "max_tokens": 1})
        assert status == 200, body
        assert (await front.post("/v1/completions", {"prompt": "the cat", "max_tokens": 1}))[0] == 200
    assert [submit.head_tokens for submit in submits] == [read(windowed, [SYSTEM, USER]).head_tokens, 0]
