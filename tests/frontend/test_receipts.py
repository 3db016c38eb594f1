"""Receipts in answers: who gets one, what stands in it, and what the conductor is told for it."""

import asyncio
from typing import Any

import pytest

from frontend.receipts import decision_id, parse_decision_id
from moonpool_proto.v1 import conductor_pb2, worker_pb2

LENGTH = worker_pb2.FINISH_LENGTH
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": list(range(10, 30)), "max_tokens": 2, "seed": 5}
ASKED = BODY | {"return_receipt": True}
RUN = 0x187A2B3C4D5E6F70


def logged(cluster: Any, *places: tuple[str, str | None]) -> None:
    """The conductor places attempt i on `places[i]`, and its log has the decisions from number 40 on."""

    def place(request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        reply: conductor_pb2.ScheduleReply = cluster.placement(*places[min(request.attempt, len(places) - 1)])
        placement = reply.placement
        placement.decision.run, placement.decision.number = RUN, 40 + request.attempt
        placement.slo_version, placement.reuse_blocks = 3 + request.attempt, 2
        placement.predicted_ttft_s, placement.predicted_tbt_s = 0.1 + request.attempt, 1 / 3
        return reply

    cluster.conductor.place = place


async def test_an_answer_carries_where_its_kv_came_from_and_its_decision(cluster: Any, front: Any) -> None:
    logged(cluster, ("p0", "d0"))
    cluster.answer_with(lambda submit: ([20, 21], LENGTH))
    status, answer = await front.post(COMPLETIONS, ASKED)
    receipt = answer["moonpool"]["receipt"]
    end = await cluster.conductor.completion()
    assert status == 200
    assert receipt == {
        "version": 1,
        "request_id": answer["id"],
        "model": "tiny",
        "prompt_tokens": 20,
        "generated_tokens": 2,
        "ttft_s": end.ttft_s,  # to the last bit, as in the conductor's log
        "tbt_s": end.mean_tbt_s,
        "attempts": [
            {
                "attempt": 0,
                "decision": "187a2b3c4d5e6f70-40",
                "objectives_version": 3,
                "prefill_node": "p0",
                "decode_node": "d0",
                "helpers": [],
                "reuse_blocks": 2,
                "predicted_ttft_s": 0.1,
                "predicted_tbt_s": 1 / 3,
                "tokens_before": 0,
                "outcome": "finished",
                "kv": {
                    "computed_tokens": 12,
                    "cached_own_tokens": 1,
                    "cached_dram_tokens": 4,
                    "cached_ssd_tokens": 2,
                    "cached_remote_tokens": 1,
                    "recomputed_blocks": 0,
                    "sibling_tokens": 0,
                },
            }
        ],
    }
    assert (end.kv.cached_tokens, end.kv.cached_ssd_tokens) == (8, 2)
    assert receipt["ttft_s"] > 0
    assert [request.wants_receipt for request in cluster.conductor.scheduled] == [True]


async def test_chats_and_streams_carry_it_too_a_stream_in_its_last_event(cluster: Any, front: Any) -> None:
    logged(cluster, ("p0", "d0"))
    cluster.answer_with(lambda submit: ([20, 21], LENGTH))
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "return_receipt": True}
    _, whole = await front.post(CHAT, chat)
    assert whole["moonpool"]["receipt"]["request_id"] == whole["id"]
    for path, body in ((COMPLETIONS, ASKED), (CHAT, chat)):
        *earlier, last = await front.events(path, body)
        assert last["moonpool"]["receipt"]["request_id"] == last["id"]
        assert not any("moonpool" in event for event in earlier)


async def test_each_choice_has_its_own_receipt(cluster: Any, front: Any) -> None:
    logged(cluster, ("p0", "d0"))
    cluster.answer_with(lambda submit: ([20, 21], LENGTH))
    _, answer = await front.post(COMPLETIONS, ASKED | {"n": 2})
    first, second = [each["receipt"] for each in answer["moonpool"]]
    ends = {end.request_id: end for end in [await cluster.conductor.completion() for _ in range(2)]}
    assert [first["request_id"], second["request_id"]] == [answer["id"], f"{answer['id']}-1"]
    assert [each["ttft_s"] for each in (first, second)] == [ends[each["request_id"]].ttft_s for each in (first, second)]


async def test_who_does_not_ask_gets_none_and_the_conductor_is_told_no_sources(cluster: Any, front: Any) -> None:
    logged(cluster, ("p0", "d0"))
    cluster.answer_with(lambda submit: ([20, 21], LENGTH))
    for body in (BODY, BODY | {"return_receipt": False}, BODY | {"return_receipt": None}):
        _, answer = await front.post(COMPLETIONS, body)
        assert "receipt" not in answer["moonpool"]
        assert not (await cluster.conductor.completion()).HasField("kv")
    assert not any(request.wants_receipt for request in cluster.conductor.scheduled)


@pytest.mark.parametrize("value", ["yes", 1, "true", {}])
async def test_another_value_than_true_or_false_is_refused(front: Any, value: Any) -> None:
    for path, body in ((COMPLETIONS, BODY), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
        status, answer = await front.post(path, body | {"return_receipt": value})
        assert (status, answer["error"]["param"]) == (400, "return_receipt")


async def test_an_attempt_that_failed_is_in_the_receipt(cluster: Any, front: Any, second_pair: Any) -> None:
    logged(cluster, ("p0", "d0"), ("p1", None))
    task = asyncio.create_task(front.post(COMPLETIONS, ASKED))
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
    lost = await prefill.submitted()
    prefill.send(lost, 0, [20], cached=8)
    await front.has_generated(1)
    decode.end_stream()
    second_pair[0].send(await second_pair[0].submitted(), 1, [21], finish=LENGTH, cached=20)
    _, answer = await task
    first, second = answer["moonpool"]["receipt"]["attempts"]
    assert (first["outcome"], first["decision"], first["tokens_before"]) == ("retry", "187a2b3c4d5e6f70-40", 0)
    assert (second["outcome"], second["decision"], second["tokens_before"]) == ("finished", "187a2b3c4d5e6f70-41", 1)
    assert (second["prefill_node"], second["decode_node"], second["objectives_version"]) == ("p1", "p1", 4)
    assert first["kv"]["computed_tokens"] == 12
    assert second["kv"] == first["kv"] | {"computed_tokens": 1, "cached_own_tokens": 13}  # of 21 tokens
    ends = [await cluster.conductor.completion() for _ in range(2)]
    assert [(end.attempt, end.outcome, end.kv.cached_tokens) for end in ends] == [(0, "retry", 8), (1, "finished", 20)]


async def test_an_attempt_without_a_token_has_no_sources(cluster: Any, front: Any, second_pair: Any) -> None:
    logged(cluster, ("p0", "d0"), ("p1", "d1"))
    task = asyncio.create_task(front.post(COMPLETIONS, ASKED))
    cluster.workers["p0"].fail(await cluster.workers["p0"].submitted(), "engine", retryable=True)
    again = await second_pair[0].submitted()
    second_pair[0].send(again, 0, [20], cached=0)
    second_pair[1].send(again, 1, [21], finish=LENGTH)
    first, second = (await task)[1]["moonpool"]["receipt"]["attempts"]
    assert first["kv"] is None
    assert second["kv"]["computed_tokens"] == 20 - 0
    retry = await cluster.conductor.completion()
    assert (retry.outcome, retry.HasField("kv")) == ("retry", False)


async def test_blocks_recomputed_on_either_worker_are_counted(cluster: Any, front: Any) -> None:
    logged(cluster, ("p0", "d0"))
    task = asyncio.create_task(front.post(COMPLETIONS, ASKED))
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
    submit = await prefill.submitted()
    for worker, index, timing in (
        (prefill, 0, worker_pb2.Timing(recomputed_blocks=2)),
        (decode, 1, worker_pb2.Timing(recomputed_blocks=3, handoff=worker_pb2.HandoffTiming())),
    ):
        message = worker_pb2.WorkerMessage()
        token = message.tokens.add(request_id=submit.request_id, index=index, token_id=20, timing=timing)
        token.finish = LENGTH if index else worker_pb2.FINISH_NONE
        worker._outbox.put_nowait(message)
    (attempt,) = (await task)[1]["moonpool"]["receipt"]["attempts"]
    assert attempt["kv"]["recomputed_blocks"] == 5
    assert (await cluster.conductor.completion()).kv.recomputed_blocks == 5


async def test_without_an_event_log_the_receipt_names_no_decision(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20, 21], LENGTH))
    _, answer = await front.post(COMPLETIONS, ASKED)
    assert answer["moonpool"]["receipt"]["attempts"][0]["decision"] is None


def test_ids_of_decisions_are_read_back_and_have_one_form() -> None:
    assert parse_decision_id(decision_id(RUN, 40)) == (RUN, 40)
    for other in ("", "1-0", "01-2", "1-02", "1-2 ", "A-1", "1-2-3", "1", "-1", "1-٢"):
        with pytest.raises(ValueError, match="must be RUN-NUMBER"):
            parse_decision_id(other)
