"""Hints of the client: three vocabularies with one meaning, contradictions, and who receives them."""

import json
from typing import Any

import pytest

from frontend.api.hints import MAX_HINT_S, hints_of, priority_of
from frontend.api.request_models import ChatBody, CompletionBody, Tool, parse
from frontend.chat_rendering import as_plain
from frontend.errors import InvalidRequest
from frontend.request import NO_HINTS, RequestHints
from moonpool_proto.v1 import worker_pb2

USER = {"role": "user", "content": "hi"}
LENGTH = worker_pb2.FINISH_LENGTH
WEATHER = {"type": "function", "function": {"name": "weather"}}
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": [USER], **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, NO_HINTS),
        ({"hints": {}, "nvext": {"agent_hints": {}}}, NO_HINTS),
        ({"hints": {"expected_output_tokens": 40}}, RequestHints(40)),
        ({"nvext": {"agent_hints": {"osl": 40, "speculative_prefill": False}}}, RequestHints(40)),
        ({"hints": {"expected_output_tokens": 40}, "nvext": {"agent_hints": {"osl": 40}}}, RequestHints(40)),
        ({"hints": {"pause_s": 5}}, RequestHints(0, 5.0, 60.0)),
        ({"hints": {"pause_s": 100}}, RequestHints(0, 100.0, 300.0)),
        ({"hints": {"pause_s": MAX_HINT_S}}, RequestHints(0, MAX_HINT_S, MAX_HINT_S)),
        ({"hints": {"pause_s": 5, "lifetime_s": 7.5}}, RequestHints(0, 5.0, 7.5)),
        ({"hints": {"lifetime_s": 900}, "cache_control": EPHEMERAL}, RequestHints(0, 0.0, 900.0)),
        ({"nvext": {"cache_control": EPHEMERAL}}, RequestHints(0, 0.0, 300.0)),
        ({"messages": [USER | {"cache_control": HOUR}]}, RequestHints(0, 0.0, 3600.0)),
        ({"tools": [WEATHER | {"cache_control": HOUR}], "cache_control": EPHEMERAL}, RequestHints(0, 0.0, 3600.0)),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": EPHEMERAL}]}]},
            RequestHints(0, 0.0, 300.0),
        ),
    ],
)
def test_hints_of_all_vocabularies(fields: dict[str, Any], expected: RequestHints) -> None:
    assert hints_of(chat(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"hints": {"expected_output_tokens": 0}}, "hints.expected_output_tokens"),
        ({"hints": {"expected_output_tokens": "9"}}, "hints.expected_output_tokens"),
        ({"hints": {"pause_s": -1}}, "hints.pause_s"),
        ({"hints": {"lifetime_s": 0}}, "hints.lifetime_s"),
        ({"hints": {"lifetime_s": MAX_HINT_S + 1}}, "hints.lifetime_s"),
        ({"hints": {"pause": 1}}, "hints.pause"),
        ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"cache_control": {"ttl": "5m"}}, "cache_control.type"),
        ({"messages": [USER | {"cache_control": {}}]}, "messages.0.cache_control.type"),
        ({"nvext": {"agent_hints": {"osl": 1.5}}}, "nvext.agent_hints.osl"),
        ({"nvext": {"agent_hints": {"strict_priority": 1}}}, "nvext.agent_hints.strict_priority"),
    ],
)
def test_invalid_hints_are_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hints": {"expected_output_tokens": 4}, "nvext": {"agent_hints": {"osl": 5}}}, "give one of them"),
        ({"hints": {"pause_s": 9, "lifetime_s": 8}}, r"at least hints.pause_s \(9\), got 8"),
    ],
)
def test_contradicting_hints_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        hints_of(chat(**fields))


def test_dynamos_priorities_are_turned_round_and_must_not_contradict() -> None:
    assert priority_of(chat(nvext={"agent_hints": {"priority": 5}})) == -5
    assert priority_of(chat(priority=-5, nvext={"agent_hints": {"priority": 5}})) == -5
    assert priority_of(chat(priority=3)) == 3
    with pytest.raises(InvalidRequest, match="which means -5 here"):
        priority_of(chat(priority=5, nvext={"agent_hints": {"priority": 5}}))


def test_completions_take_hints_too() -> None:
    body = parse(CompletionBody, json.dumps({"prompt": "a", "cache_control": HOUR, "hints": {"pause_s": 2}}).encode())
    assert hints_of(body) == RequestHints(0, 2.0, 3600.0)


def test_a_tools_cache_control_is_no_part_of_the_prompt() -> None:
    assert as_plain(Tool.model_validate(WEATHER | {"cache_control": HOUR})) == WEATHER


async def test_conductor_and_workers_receive_the_hints(cluster: Any, front: Any) -> None:
    seen: list[worker_pb2.Submit] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit)
        return [20], LENGTH

    cluster.answer_with(answer)
    body = {"prompt": list(range(20)), "max_tokens": 1}
    assert (await front.post("/v1/completions", body))[0] == 200
    hinted = body | {"hints": {"expected_output_tokens": 7, "pause_s": 2, "lifetime_s": 9}}
    assert (await front.post("/v1/completions", hinted))[0] == 200
    without, with_hints = cluster.conductor.scheduled
    assert not without.HasField("hints")
    assert not seen[0].HasField("hints")
    for hints in (with_hints.hints, seen[-1].hints):
        assert (hints.expected_output_tokens, hints.pause_s, hints.lifetime_s) == (7, 2.0, 9.0)
