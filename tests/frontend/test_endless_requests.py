"""Requests without an end at the door: what they may ask, how they are asked on, when they are given up."""

import asyncio
import gc
import tracemalloc
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

import frontend
from frontend.config import ServedModelConfig
from frontend.errors import FrontendConfigError
from frontend.tokenizer import Tokenizer
from moonpool_proto.v1 import common_pb2, worker_pb2
from tests.frontend.conftest import BLOCK_TOKENS, MAX_MODEL_LEN

BODY = {"prompt": [5, 6, 7], "stream": True, "endless": True}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stream": False}, "must be streamed: set stream to true"),
        ({"max_tokens": 9}, "omit max_tokens"),
        ({"n": 2}, "got n = 2: send several requests"),
    ],
)
async def test_an_endless_answer_with_an_end_is_refused(front: Any, fields: dict[str, Any], words: str) -> None:
    status, body = await front.post("/v1/completions", BODY | fields)
    assert (status, body["error"]["param"]) == (400, "endless")
    assert words in body["error"]["message"]


async def test_it_asks_for_all_that_fits_and_outlives_the_request_timeout(start_front: Any, cluster: Any) -> None:
    seen: list[worker_pb2.Submit] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit)
        return [20, 21, 22], worker_pb2.FINISH_NONE

    cluster.answer_with(answer)
    async with start_front(request_timeout_s=3.0, endless_idle_s=4.0) as front:
        events = await front.events("/v1/completions", BODY)
    asked = cluster.conductor.scheduled[0]
    assert asked.endless
    assert 0 <= asked.waited_s < 3
    assert (seen[0].idle_s, seen[0].sampling.max_tokens) == (4.0, asked.max_new_tokens)
    assert asked.max_new_tokens > 100
    assert sum("choices" in event for event in events) >= 1
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "no token for 4 s: 3 tokens generated" in events[-1]["error"]["message"]
    completion = await cluster.conductor.completion()
    assert (completion.outcome, completion.generated) == ("failed", 3)


async def test_it_ends_when_its_client_leaves(front: Any, cluster: Any) -> None:
    cluster.answer_with(lambda submit: ([20, 21, 22], worker_pb2.FINISH_NONE))
    stream = await asyncio.wait_for(front.open_stream("/v1/completions", BODY), 60)
    await front.events_of(stream, 1)
    stream.close()
    assert (await cluster.conductor.completion()).outcome == "cancelled"


ENDLESS_IDS = list(range(20, 40))


async def send_up_to(front: Any, cluster: Any, submit: Any, start: int, end: int) -> None:
    """The decode node sends the tokens [start, end), no faster than the frontend takes them."""
    for first in range(start, end, 500):
        cluster.workers["d0"].send(submit, first, list(islice(cycle(ENDLESS_IDS), 500)))
        await front.has_generated(first + 500)


async def read_all(stream: Any) -> None:
    async for _ in stream.content.iter_any():
        pass


def frontends_nbytes() -> int:
    """Memory that the frontend's own code holds."""
    gc.collect()  # the interpreter keeps up to 2,000 freed tuples of each length until then
    own = tracemalloc.Filter(True, str(Path(frontend.__file__).parent / "*"))
    snapshot = tracemalloc.take_snapshot().filter_traces([own])
    return sum(each.size for each in snapshot.statistics("filename"))


async def test_each_token_of_an_endless_answer_takes_four_bytes(front: Any, cluster: Any) -> None:
    """Its id, which another attempt would need; not its text, nor its time."""
    opening = front.open_stream("/v1/completions", BODY | {"endless": {"window": 64}})
    submit = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].send(submit, 0, ENDLESS_IDS[:1], cached=0)
    stream = await opening
    reader = asyncio.create_task(read_all(stream))
    tracemalloc.start()
    try:
        await send_up_to(front, cluster, submit, 1, 9_001)
        before = frontends_nbytes()
        await send_up_to(front, cluster, submit, 9_001, 24_001)
        after = frontends_nbytes()
    finally:
        tracemalloc.stop()
    reader.cancel()
    stream.close()
    assert after - before < 15_000 * 6
    completion = await cluster.conductor.completion()
    assert (completion.outcome, completion.generated) == ("cancelled", 24_001)
    assert completion.slow_tbt_s > 0


async def seen_by_workers(start_front: Any, cluster: Any, body: dict[str, Any], **settings: Any) -> Any:
    """The Submit of an endless request, and its ScheduleRequest."""
    submits: list[worker_pb2.Submit] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        submits.append(submit)
        return [20, 21, 22], worker_pb2.FINISH_STOP

    cluster.answer_with(answer)
    async with start_front(**settings) as front:
        events = await front.events("/v1/completions", body)
    assert not any("error" in event for event in events), events
    return submits[0], cluster.conductor.scheduled[0]


async def test_a_window_of_whole_blocks_and_its_slides_reach_the_workers(start_front: Any, cluster: Any) -> None:
    prompt = [5] * (MAX_MODEL_LEN + 300)
    body = BODY | {"prompt": prompt, "endless": {"sinks": 1, "window": 131}}
    submit, asked = await seen_by_workers(start_front, cluster, body, endless_limit_tokens=5000)
    assert submit.rolling == worker_pb2.RollingWindow(sinks=1, window=128, slide=16)
    assert asked.window_tokens == 128 + BLOCK_TOKENS
    assert submit.sampling.max_tokens == 5000 - len(prompt)


async def test_workers_choose_the_sinks_and_the_setting_the_window_if_the_request_does_not(
    start_front: Any, cluster: Any
) -> None:
    submit, _ = await seen_by_workers(start_front, cluster, BODY, endless_window=64)
    assert not submit.rolling.HasField("sinks")
    assert (submit.rolling.window, submit.rolling.slide) == (64, 8)


@pytest.mark.parametrize(("own", "expected"), [(128, 128), (0, 0)])
async def test_a_models_own_window_takes_the_place_of_the_settings(
    start_front: Any, cluster: Any, model_path: Path, own: int, expected: int
) -> None:
    models = (ServedModelConfig(model_path, "tiny", own_window=own),)
    submit, _ = await seen_by_workers(start_front, cluster, BODY, endless_window=64, models=models)
    assert submit.rolling.window == expected


async def test_a_request_longer_than_the_bound_is_refused(start_front: Any) -> None:
    async with start_front(endless_limit_tokens=5000) as front:
        body = BODY | {"prompt": [5] * 5000, "endless": {"window": 64}}
        status, answer = await front.post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    limit = "The limit on prompt and answer of endless requests (--endless-limit) is 5000 tokens"
    assert limit in answer["error"]["message"]


async def test_a_stream_of_ids_as_long_as_the_bound_is_taken(start_front: Any, cluster: Any) -> None:
    """As long as no other request's prompt may be."""
    body = BODY | {"prompt": [5] * 240_000, "endless": {"window": 64}}
    submit, _ = await seen_by_workers(start_front, cluster, body, endless_limit_tokens=250_000)
    assert submit.sampling.max_tokens == 10_000


async def test_truncation_keeps_what_the_bound_leaves(start_front: Any, cluster: Any) -> None:
    body = BODY | {"prompt": [5] * 6000, "endless": {"window": 64}, "truncate_prompt_tokens": -1}
    submit, _ = await seen_by_workers(
        start_front, cluster, body, endless_limit_tokens=5000, completion_default_tokens=100
    )
    assert len(submit.prompt_ids) // 4 == 4900


async def test_a_text_of_many_contexts_is_truncated(start_front: Any, cluster: Any) -> None:
    body = BODY | {"prompt": "the cat sat " * 40_000, "endless": {"window": 64}, "truncate_prompt_tokens": 4000}
    submit, _ = await seen_by_workers(start_front, cluster, body)
    assert len(submit.prompt_ids) // 4 == 4000


async def test_the_next_turn_of_a_chat_has_the_first_ids_of_the_answer_as_they_were_generated(
    start_front: Any, cluster: Any, tokenizer: Tokenizer, prompt_of: Callable[[Any], list[int]]
) -> None:
    """As many as the window has: no KV after them is stored."""
    text = ("the cat sat on it " * 9).strip()
    letters = [tokenizer.encode(char, add_special_tokens=False)[0] for char in text]  # not as it is tokenised
    submits: list[worker_pb2.Submit] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        submits.append(submit)
        return [*letters, 3], worker_pb2.FINISH_STOP

    cluster.answer_with(answer)
    chat = [{"role": "user", "content": "the cat"}]
    async with start_front(endless_window=64) as front:
        for _ in range(2):
            events = await front.events("/v1/chat/completions", {"messages": chat, "endless": True})
            told = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
            assert told == text
            chat += [{"role": "assistant", "content": told}, {"role": "user", "content": "it"}]
    first, second = map(prompt_of, submits)
    assert second[: len(first) + 64] == first + letters[:64]
    assert second[len(first) + 64 :][:60] != letters[64:124]
    assert tokenizer.decode(second, skip_special_tokens=True).count(text) == 1


@pytest.mark.parametrize("window", [7, 10**6])
async def test_a_default_window_that_suits_no_request_is_refused_at_the_start(start_front: Any, window: int) -> None:
    with pytest.raises(FrontendConfigError, match=rf"--endless-window does not suit model .*got {window}"):
        async with start_front(endless_window=window):
            pass


async def test_a_default_window_that_only_the_workers_exclude_is_refused_by_the_flag(start_front: Any) -> None:
    async with start_front(endless_window=MAX_MODEL_LEN) as front:
        status, body = await front.post("/v1/completions", BODY)
        assert (status, body["error"]["param"]) == (400, "endless")
        assert "the window of --endless-window must have 8 to" in body["error"]["message"]
        assert f"got {MAX_MODEL_LEN}" in body["error"]["message"]


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        (common_pb2.Software(version="0.0.9", wire=2), "d0 is Moonpool 0.0.9 (wire 2)"),
        (common_pb2.Software(), "d0 is a Moonpool that does not report its version (wire 1)"),
    ],
)
async def test_a_worker_that_does_not_know_windows_is_named(
    start_front: Any, cluster: Any, reported: common_pb2.Software, words: str
) -> None:
    """With the version that it reported to the conductor: its stream has none."""
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_STOP))
    cluster.workers["d0"].software = common_pb2.Software()
    (node,) = (status.node for status in cluster.conductor.cluster.nodes if status.node.node_id == "d0")
    node.software.CopyFrom(reported)
    async with start_front() as front:
        status, body = await front.post("/v1/completions", BODY | {"endless": {"window": 64}})
        assert status == 500
        assert f"{words}, which does not know windows of endless requests" in body["error"]["message"]
        assert "error" not in (await front.events("/v1/completions", BODY))[-1]


@pytest.mark.parametrize(
    ("endless", "param", "words"),
    [
        ({"window": 7}, "endless.window", f"8 to {MAX_MODEL_LEN - BLOCK_TOKENS} tokens"),
        ({"window": MAX_MODEL_LEN}, "endless.window", f"8 to {MAX_MODEL_LEN - BLOCK_TOKENS} tokens"),
        ({"window": 64, "sinks": 3}, "endless.sinks", "at most 2, half of a block, got 3"),
        ({"window": 64, "sinks": -1}, "endless", "sinks"),
        ({"sinks": 4}, "endless", "window"),
        (3, "endless", "must be true, or an object with `window` and `sinks`"),
    ],
)
async def test_a_bad_window_is_refused_by_its_field(front: Any, endless: Any, param: str, words: str) -> None:
    status, answer = await front.post("/v1/completions", BODY | {"endless": endless})
    assert status == 400
    assert answer["error"]["param"].startswith(param)
    assert words in answer["error"]["message"]
