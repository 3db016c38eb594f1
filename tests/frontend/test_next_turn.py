"""After a chat's answer, what the next turn's prompt begins with is computed, unless it is stored or nobody asked."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from frontend.api.request_base import MAX_PRIORITY
from frontend.api.request_models import ChatBody, ChatMessage
from frontend.config import ServedModelConfig
from frontend.next_turn import MOST_AT_ONCE, NextTurnPrefills, common_length, next_prefix
from frontend.request import GenerationRequest
from frontend.tool_formats import HERMES
from moonpool_proto.v1 import conductor_pb2, worker_pb2

STOP = worker_pb2.FINISH_STOP
USER = {"role": "user", "content": "the quick brown fox jumps over the lazy dog and the cat sat on the mat"}
HINTED: dict[str, Any] = {"messages": [USER], "hints": {"prefill_next_turn": True, "pause_s": 30}}
CHAT, METRIC = "/v1/chat/completions", "moonpool:next_turn_prefills_total"
THOUGHT, SAID = "the lazy cat</t>", "the quick brown fox jumps over the mat " * 12 + "again"
FORGETFUL = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content.split('</t>')[-1] if message.role == 'assistant' else message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def forgetful(model_path: Path, tmp_path: Path) -> Path:
    """The model with a template that drops what an answer thought from the history."""
    folder = tmp_path / "forgetful"
    shutil.copytree(model_path, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": FORGETFUL}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def submits(cluster: Any, ids_of: Any) -> list[worker_pb2.Submit]:
    """All requests that reach a worker; each one's answer thinks and says something, or is one token."""
    seen: list[worker_pb2.Submit] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit)
        is_whole = submit.sampling.max_tokens > 1
        return ([*ids_of(THOUGHT + SAID), 3] if is_whole else ids_of(SAID)[:1]), STOP

    cluster.answer_with(answer)
    return seen


async def turn_after(front: Any, answer: str) -> list[int]:
    """Prompt of a next turn."""
    messages = [USER, {"role": "assistant", "content": answer}, {"role": "user", "content": "and the cat"}]
    status, body = await front.post("/tokenize", {"messages": messages})
    assert status == 200, body
    return list(body["tokens"])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "hint", [HINTED, {"messages": [USER], "nvext": {"agent_hints": {"speculative_prefill": True}}}]
)
async def test_the_prefix_of_the_next_prompt_is_computed_after_the_answer(
    cluster: Any, start_front: Any, forgetful: Path, submits: Any, prompt_of: Any, hint: dict[str, Any], streams: bool
) -> None:
    async with start_front(models=(ServedModelConfig(forgetful, "tiny"),)) as front:
        body = {**hint, "max_tokens": 300}
        await (front.events(CHAT, body) if streams else front.post(CHAT, body))
        await front.has_counted(f'{METRIC}{{outcome="computed"}}', 1)
        asked, ahead = submits
        assert ahead.request_id == f"{asked.request_id}-next"
        assert ahead.sampling.max_tokens == 1
        assert ahead.hints.pause_s == (30 if hint is HINTED else 0)
        computed, following = prompt_of(ahead), await turn_after(front, THOUGHT + SAID)
        assert following[: len(computed)] == computed
        assert len(following) - len(computed) <= len("and the cat<|im_end|><|im_start|>assistant")
        assert computed[: len(prompt_of(asked))] == prompt_of(asked)
        assert len(computed) >= len(prompt_of(asked)) + 64
        told = [request for request in cluster.conductor.scheduled if request.request_id == ahead.request_id]
        assert [request.priority for request in told] == [MAX_PRIORITY]
        await front.quiet()
        metrics = (await front.get("/metrics"))[1]
        assert (
            'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 1.0' in metrics
        )  # the client's only


async def test_nothing_is_computed_unasked_or_where_the_history_repeats_the_answer(front: Any, submits: Any) -> None:
    assert (await front.post(CHAT, {"messages": [USER], "max_tokens": 300}))[0] == 200
    assert (await front.post(CHAT, {**HINTED, "max_tokens": 300}))[0] == 200
    await front.has_counted(f'{METRIC}{{outcome="covered"}}', 1)
    await front.quiet()
    assert len(submits) == 2


async def test_a_rejected_prefill_is_not_repeated_and_no_ones_loss(
    cluster: Any, start_front: Any, forgetful: Path, submits: Any
) -> None:
    place = cluster.conductor.place

    def refuse(request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        if not request.request_id.endswith("-next"):
            return place(request)
        return conductor_pb2.ScheduleReply(rejection=conductor_pb2.Rejection(reason="full", retry_after_s=0.01))

    cluster.conductor.place = refuse
    async with start_front(models=(ServedModelConfig(forgetful, "tiny"),)) as front:
        status, body = await front.post(CHAT, {**HINTED, "max_tokens": 300})
        assert (status, body["choices"][0]["message"]["content"]) == (200, THOUGHT + SAID)
        await front.has_counted(f'{METRIC}{{outcome="failed"}}', 1)
        await front.quiet()
        asked = [request.request_id for request in cluster.conductor.scheduled]
        assert sum(name.endswith("-next") for name in asked) == 1
        assert len(submits) == 1


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "the cat", "hints": {"prefill_next_turn": True}}, "hints.prefill_next_turn"),
        (CHAT, {**HINTED, "n": 2}, "n"),
        (
            CHAT,
            {**HINTED, "continue_final_message": True, "add_generation_prompt": False},
            "hints.prefill_next_turn",
        ),
        (
            CHAT,
            {**HINTED, "nvext": {"agent_hints": {"speculative_prefill": False}}},
            "nvext.agent_hints.speculative_prefill",
        ),
        (CHAT, {"messages": [USER], "hints": {"prefill_next_turn": "yes"}}, "hints.prefill_next_turn"),
    ],
)
async def test_what_has_no_next_turn_is_refused(front: Any, path: str, fields: dict[str, Any], param: str) -> None:
    status, body = await front.post(path, fields)
    assert (status, body["error"]["param"]) == (400, param)


def shown(messages: Any) -> list[int]:
    """Ids of a rendering with an id per byte."""
    calls = [[(call.id, call.function.name) for call in message.tool_calls or ()] for message in messages]
    return list("".join(f"{m.role}:{m.text}{c or ''};" for m, c in zip(messages, calls, strict=True)).encode())


def text_of(ids: NDArray[np.int32]) -> str:
    return bytes(ids.tolist()).decode()


def test_after_calls_a_result_is_expected_and_ids_of_calls_are_not_guessed() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    called = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    body = ChatBody.model_validate({"messages": [USER], "tools": tools})
    assert text_of(next_prefix(body, "it sat", HERMES, shown)) == f"user:{USER['content']};assistant:it sat;user:"
    prefix = text_of(next_prefix(body, called, HERMES, shown))
    # The ids are random, so they may have digits in common.
    assert prefix.rstrip("0123456789abcdef") == f"user:{USER['content']};assistant:[('call_"

    def without_ids(messages: list[ChatMessage]) -> list[int]:
        return shown([message.model_copy(update={"tool_calls": None}) for message in messages])

    assert text_of(next_prefix(body, called, HERMES, without_ids)) == f"user:{USER['content']};assistant:;tool:"


def test_common_length_is_that_of_the_equal_beginning() -> None:
    one = np.array([1, 2, 3], np.int32)
    for other, length in (([1, 2, 3, 4], 3), ([1, 2], 2), ([1, 9, 3], 1), ([], 0)):
        assert common_length(one, np.array(other, np.int32)) == length


class Session:
    """Stands for the session of one prefill, which ends when it is told to."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def collect(self) -> None:
        await self.ended

    def end(self, error: Exception) -> None:
        self.ended.set_exception(error)


async def test_prefills_beyond_the_bound_are_dropped_and_all_end_with_the_frontend() -> None:
    counted: list[str] = []
    prefills = NextTurnPrefills(counted.append)
    closed: list[Any] = []

    async def prepare() -> GenerationRequest | None:
        return object()  # type: ignore[return-value]

    async def close(session: Any) -> None:
        closed.append(session)

    tasks = []
    for _ in range(MOST_AT_ONCE):
        assert prefills.may_begin()
        tasks.append(asyncio.create_task(prefills.run(prepare, lambda _: Session(), close)))  # type: ignore[arg-type, return-value]
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not prefills.may_begin()
    assert counted == ["dropped"]
    prefills.end()
    await asyncio.gather(*tasks)
    assert counted == ["dropped", *["failed"] * MOST_AT_ONCE]
    assert len(closed) == MOST_AT_ONCE
    assert not prefills.may_begin()
