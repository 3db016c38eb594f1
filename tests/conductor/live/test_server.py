"""The conductor as a process part: real gRPC over unix sockets, its decision log replayed."""

import asyncio
import json

import grpc
import numpy as np
import pytest

from conductor import frontend_streams
from conductor.config import ConductorConfig
from conductor.decision_log import find_decisions, find_records, recorded_runs, replay
from conductor.policy.decisions import Place
from conductor.server import serve_conductor
from moonpool_proto.v1 import common_pb2, conductor_pb2
from rpc.control import AddressInUse, CallRefused
from rpc.versions import own_software
from settings.keys import assemble


async def test_a_request_is_placed_on_joined_nodes_and_completed(conductor):
    _, client = await conductor()
    assert not (await client.cluster()).ready_models
    await client.join_pair()
    assert (await client.cluster()).ready_models == ["m"]
    placement = (await client.schedule()).placement
    assert placement.prefill.node_id == "prefill-0"
    assert placement.decode.target == "unix:/nowhere/decode-0.sock"
    assert not (await client.json("Validate"))["ok"]
    await client.complete()
    assert await client.json("Validate") == {
        "ok": True,
        "problems": [],
        "counts": {"requests": 0, "committed_tokens": 0, "prefills": 0, "sends": 0, "copies": 0, "copy_tasks": 0},
    }


async def test_a_placement_names_its_decision_in_the_event_log_and_the_objectives_version_on_request(
    conductor, tmp_path
):
    log = tmp_path / "log"
    service, client = await conductor(decision_log=log)
    await client.join_pair()
    plain = (await client.schedule("plain")).placement
    placed = {name: (await client.schedule(name, wants_receipt=True)).placement for name in ("a", "b")}
    await client.complete("a")
    await service.stop()
    assert (plain.HasField("decision"), plain.slo_version) == (False, 0)
    (run,) = recorded_runs(log)
    for name, placement in placed.items():
        number = placement.decision.number
        found = find_decisions(run, [number])[number]
        assert placement.decision.run == run.number
        assert (found.step.event.request_id, found.slo_version) == (name, placement.slo_version)
        assert found.step.made[0].predicted_ttft_s == placement.predicted_ttft_s


async def test_a_placement_names_no_decision_without_an_event_log(conductor, tmp_path):
    _, client = await conductor(decision_log=tmp_path / "log", decision_log_events=False)
    await client.join_pair()
    placement = (await client.schedule(wants_receipt=True)).placement
    assert (placement.HasField("decision"), placement.slo_version) == (False, 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"chain": b"x" * 17}, "multiple of 16"),
        ({"chain": bytes(17 * 16), "prompt": 256}, "more than 256 prompt tokens"),
        ({"prompt": 0}, "must be positive"),
        ({"new": 0}, "must be positive"),
        ({"request_id": ""}, "request_id"),
    ],
)
async def test_a_malformed_request_is_refused_and_disturbs_nothing(conductor, fields, said):
    _, client = await conductor()
    await client.join_pair()
    with pytest.raises(CallRefused, match=said) as caught:
        await client.schedule(**fields)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert (await client.schedule("good")).HasField("placement")


async def test_calls_of_one_message_are_answered_in_order_and_a_wrong_one_fails_alone(conductor):
    _, client = await conductor()
    await client.join_pair()
    good = {"model": "m", "prompt_tokens": 64, "max_new_tokens": 4, "frontend_id": "f"}
    calls = [
        conductor_pb2.FrontendCall(number=7, schedule=conductor_pb2.ScheduleRequest(request_id="a", **good)),
        conductor_pb2.FrontendCall(number=8, schedule=conductor_pb2.ScheduleRequest(**good)),
        conductor_pb2.FrontendCall(number=9),
        conductor_pb2.FrontendCall(
            number=10, complete=conductor_pb2.CompleteRequest(request_id="a", outcome="finished")
        ),
        *(
            conductor_pb2.FrontendCall(
                number=number, schedule=conductor_pb2.ScheduleRequest(request_id=f"r{number}", **good)
            )
            for number in range(11, 60)
        ),
    ]
    stream = client.stub.Schedule()
    assert not (await stream.read()).answers
    await stream.write(conductor_pb2.FrontendCalls(calls=calls))
    answers = []
    while len(answers) < len(calls):
        answers += (await asyncio.wait_for(stream.read(), 20)).answers
    assert [answer.number for answer in answers] == list(range(7, 60))
    kinds = [answer.WhichOneof("answer") for answer in answers]
    assert kinds == ["schedule", "refused", "refused", "complete", *["schedule"] * 49]
    assert "request_id is empty" in answers[1].refused
    assert all(answer.schedule.HasField("placement") for answer in answers[4:])
    stream.cancel()


async def test_a_restarted_conductor_learns_the_ledger_from_what_workers_hold(conductor, tmp_path):
    service, client = await conductor()
    await client.join_pair()
    await client.schedule()
    await client.close()
    await service.stop()
    _, client = await conductor()
    held = conductor_pb2.Held(request_id="r", committed_tokens=288)
    await client.worker("decode-0", common_pb2.ROLE_DECODE).join(held=[held])
    assert (await client.json("Validate"))["counts"]["committed_tokens"] == 288
    await client.complete()
    assert (await client.json("Validate"))["ok"]


async def opened(client, incarnation, *, calls=()):
    """A stream as a frontend `f` opens it."""
    stream = client.stub.Schedule()
    await stream.read()
    hello = conductor_pb2.FrontendCalls(frontend_id="f", incarnation=incarnation, software=own_software(), calls=calls)
    await stream.write(hello)
    await stream.read()
    return stream


SCHEDULE = conductor_pb2.FrontendCall(
    number=1,
    schedule=conductor_pb2.ScheduleRequest(
        request_id="r", model="m", prompt_tokens=64, max_new_tokens=4, frontend_id="f"
    ),
)


async def test_requests_of_a_frontend_whose_stream_ended_are_released_after_the_bound(conductor, monkeypatch):
    monkeypatch.setattr(frontend_streams, "RESUME_S", 0.3)
    _, client = await conductor()
    await client.join_pair()
    stream = await opened(client, 1, calls=[SCHEDULE])
    assert (await client.json("Validate"))["counts"]["requests"] == 1
    stream.cancel()

    async def released():
        return (await client.json("Validate"))["ok"]

    await client.until(released)
    assert (await client.json("State"))["counters"]["orphans"] == 1


async def test_a_frontend_that_opens_its_stream_again_loses_nothing(conductor, monkeypatch):
    monkeypatch.setattr(frontend_streams, "RESUME_S", 0.3)
    _, client = await conductor()
    await client.join_pair()
    (await opened(client, 1, calls=[SCHEDULE])).cancel()
    again = await opened(client, 1)
    await asyncio.sleep(0.6)
    assert (await client.json("Validate"))["counts"]["requests"] == 1
    again.cancel()


async def test_a_restarted_frontend_releases_the_requests_of_its_predecessor_at_once(conductor):
    _, client = await conductor()
    await client.join_pair()
    former = await opened(client, 1, calls=[SCHEDULE])
    successor = await opened(client, 2)
    assert (await client.json("Validate"))["ok"]
    former.cancel()
    successor.cancel()


async def test_requests_of_a_frontend_that_never_completes_are_released(conductor):
    _, client = await conductor(orphan_timeout_s=0.3)
    await client.join_pair()
    await client.schedule()

    async def released():
        return (await client.json("Validate"))["ok"]

    await client.until(released)
    assert (await client.json("State"))["counters"]["orphans"] == 1


async def test_the_log_of_a_live_run_replays_to_the_same_decisions(conductor, tmp_path):
    folder = tmp_path / "log"
    service, client = await conductor(decision_log=folder, decision_log_block_tokens=64, ttft_slo_s=0.4)
    prefill, decode = await client.join_pair()
    await client.join("prefill-1", common_pb2.ROLE_PREFILL)
    chain = np.arange(16 * 16, dtype=np.uint8).reshape(16, 16)
    sample = conductor_pb2.PrefillSample(new_tokens=256, seconds=0.1)
    for i in range(12):
        await client.schedule(f"r{i}", chain=chain.tobytes())
        phase = conductor_pb2.Progress(request_id=f"r{i}", phase=conductor_pb2.PHASE_PREFILL_STARTED)
        await prefill.report(progress=[phase], prefills=[sample])
        if i % 3 == 0:
            await client.complete(f"r{i}")
    decode.leave()
    await client.until_joined("prefill-0", "prefill-1")
    await client.schedule("late")
    told = await client.explain("r3")
    assert (told["log"], told["records"][0]["outcome"]) == (str(folder), "finished")
    await client.close()
    await service.stop()
    (life,) = recorded_runs(folder)
    steps = list(replay(life))
    assert all(step.logged == step.made for step in steps)
    decisions = [decision for step in steps for decision in step.logged]
    assert {type(decision).__name__ for decision in decisions} == {"Place", "Reject"}
    assert next(len(decision.considered.prefill) for decision in decisions if isinstance(decision, Place)) == 2
    first, second = (find_records(folder, name).records[0]["hash_ids"] for name in ("r0", "r1"))
    assert first == second
    assert len(first) == 4


async def test_a_listen_target_in_use_is_a_clear_error(conductor, tmp_path):
    await conductor()
    config = assemble(ConductorConfig, listen=f"unix:{tmp_path}/c.sock")
    with pytest.raises(AddressInUse):
        await serve_conductor(config, asyncio.Event(), lambda target: None)


async def test_the_overview_tells_the_recent_past_and_explain_a_request_without_any_log(conductor):
    _, client = await conductor()
    prefill, _ = await client.join_pair()
    await client.schedule(prompt=64, new=8)
    await prefill.report(
        progress=[conductor_pb2.Progress(request_id="r", attempt=0, phase=conductor_pb2.PHASE_PREFILL_STARTED)]
    )

    async def overview(first_slice=0):
        request = conductor_pb2.OverviewRequest(first_slice=first_slice)
        return json.loads((await client.stub.Overview(request, timeout=10)).json)

    async def is_marked():
        return bool((await overview())["requests"][0]["marks"])

    await client.until(is_marked)  # reports and completions take different streams: the order must be certain
    ended = conductor_pb2.CompleteRequest(request_id="r", outcome="finished", ttft_s=0.5, mean_tbt_s=0.01, generated=8)
    await client.line.complete(ended, deadline_s=10)
    told = await overview()
    (request,) = told["requests"]
    assert (request["request_id"], request["outcome"], request["prefill"]) == ("r", "finished", "prefill-0")
    assert request["ttft_s"] == 0.5
    assert request["predicted_ttft_s"] > 0
    assert [mark["phase"] for mark in request["marks"]] == ["prefill_started"]
    assert sum(one["flows"].get("m", {}).get("arrived", 0) for one in told["slices"]) == 1
    assert not (await overview(told["slices"][-1]["number"] + 1))["slices"]
    assert told["workers"]["prefill-0"]["is_leaving"] is False
    assert told["objectives"][0]["model"] == "m"
    assert (told["admission"], told["has_decision_log"]) == ("enforce", False)
    explained = await client.explain("r")
    assert explained["log"] is None
    assert explained["remembered"]["request_id"] == "r"
    assert (await client.explain("other"))["remembered"] is None


async def test_a_preview_reserves_nothing_and_a_malformed_one_is_refused(conductor):
    _, client = await conductor()
    await client.join_pair()
    request = conductor_pb2.ScheduleRequest(
        request_id="r", frontend_id="f", model="m", prompt_tokens=256, max_new_tokens=32
    )
    predicted = (await client.stub.Preview(request, timeout=10)).admitted
    assert predicted.ttft_s > 0
    assert predicted.tbt_s > 0
    assert (await client.json("Validate"))["ok"]
    placed = (await client.schedule("r")).placement
    assert (placed.predicted_ttft_s, placed.predicted_tbt_s) == (predicted.ttft_s, predicted.tbt_s)
    request.ttft_objective_s = 1e-6
    assert (await client.stub.Preview(request, timeout=10)).rejection.reason == "ttft"
    request.prompt_tokens = 0
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.stub.Preview(request, timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
