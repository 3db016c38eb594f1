"""The record of objectives through live conductors: gRPC and real files."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from conductor.decision_log import recorded_runs, replay
from conductor.errors import SharedStoreRefused
from conductor.policy.events import ObjectivesChanged
from conductor.policy.objectives import Objective, Scope, SloRecord
from moonpool_proto.v1 import conductor_pb2

CONFIGURED = SloRecord(cluster=Scope(ttft=Objective(2.0)))
Start = Any  # the Conductors of conftest.py
Until = Callable[..., Awaitable[None]]


async def test_the_configuration_gives_the_first_version_and_a_call_the_next(start: Start) -> None:
    c = await start(objectives=CONFIGURED)
    first = await c.show()
    assert (first.current.version, first.current.author, first.current.origin) == (1, "configuration", "configuration")
    assert json.loads(first.current.content) == {"cluster": {"ttft": "2s"}}
    assert "lost when it exits" in first.kept
    reply = await c.set({"cluster": {"ttft": "1s"}, "classes": {"chat": {"tbt": "5x"}}}, expect_version=1)
    assert list(reply.differences) == ["classes.chat.tbt: not there -> 5x", "cluster.ttft: 2s -> 1s"]
    seen = await c.show(history=10)
    assert [each.version for each in seen.history] == [2, 1]
    assert (seen.current.author, seen.current.reason, seen.current.origin) == ("alice", "a test", "admin")
    assert seen.current.peer.startswith("unix:")
    assert seen.current.digest != first.current.digest
    assert list(seen.drift) == ["classes.chat.tbt: 5x -> not there", "cluster.ttft: 1s -> 2s"]


async def test_going_back_is_a_new_version_with_an_old_content(start: Start) -> None:
    c = await start(objectives=CONFIGURED)
    await c.set({})
    reply = await c.rollback(1)
    assert (reply.version.version, reply.version.origin, reply.version.author) == (3, "rollback to 1", "bob")
    history = (await c.show(history=3)).history
    assert history[0].digest == history[2].digest != history[1].digest


async def test_a_change_made_for_another_version_is_refused_and_says_whose_came_between(start: Start) -> None:
    c = await start()
    await c.set({"cluster": {"ttft": "1s"}}, reason="the launch")
    code, said = await c.refusal(c.set({}, expect_version=1))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "version 2 by alice (admin: the launch)" in said
    assert await c.version() == 2


async def test_a_trial_and_a_change_of_nothing_make_no_version(start: Start) -> None:
    c = await start()
    trial = await c.set({"cluster": {"ttft": "1s"}}, trial=True)
    assert list(trial.differences) == ["cluster.ttft: not there -> 1s"]
    assert (trial.HasField("preview"), trial.preview.judged, trial.preview.admission) == (True, 0, "enforce")
    assert not (await c.set({})).HasField("preview")  # it is of what is tried, not of what is done
    nothing = await c.set({})
    assert list(nothing.differences) == []
    assert await c.version() == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"content": '{"cluster": {"ttft": "-1s"}}'}, "cluster.ttft is '-1s'"),
        ({"content": "{"}, "not valid JSON"),
        ({"content": "[1]"}, "the record is [1]"),
        ({"content": "[" * 200_000}, "not valid JSON"),
        ({"content": '{"cluster": {"ttft": 1' + 400 * "0" + "}}"}, "cluster.ttft is 1000"),
        ({"content": "{}", "author": ""}, "author"),
        ({"content": "{}", "reason": " "}, "reason"),
        ({"content": "{}", "reason": "two\nlines"}, "one line"),
        ({"rollback_to": 9}, "cannot roll back to version 9"),
    ],
)
async def test_what_cannot_be_is_refused_and_changes_nothing(start: Start, fields: dict[str, Any], said: str) -> None:
    c = await start(objectives=CONFIGURED)
    request = conductor_pb2.ChangeSloRequest(**{"author": "alice", "reason": "a test", **fields})
    code, told = await c.refusal(c.stub.ChangeSlo(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said in told
    assert await c.version() == 1


async def test_new_tenants_that_no_frontend_knows_are_refused_unless_forced(start: Start) -> None:
    c = await start()
    acme = {"tenants": {"acme": {"ttft": "1s"}}}
    await c.set(acme)
    assert await c.version() == 2, "no frontend has told its tenants: nothing is known"
    await c.numbers("front-0", ("globex",))
    code, said = await c.refusal(c.set({"tenants": {"acme": {}, "initech": {}}}))
    assert (code, "tenant 'initech'" in said, "globex" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True, True)
    reply = await c.set({"tenants": {"acme": {}, "initech": {}}}, force=True)
    assert reply.version.version == 3
    assert "initech" in reply.warnings[0]
    await c.numbers("front-0", ("",))
    code, said = await c.refusal(c.set({"tenants": {"umbrella": {}}}))
    assert "front-0 require no API key" in said


async def test_versions_outlive_the_conductor_and_go_before_the_configuration(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"objectives": CONFIGURED, "slo_dir": tmp_path / "slo"}
    c = await start(**fields)
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)
    c = await start(**fields)
    seen = await c.show()
    assert json.loads(seen.current.content) == {"cluster": {"ttft": "1s"}}
    assert list(seen.drift) == ["cluster.ttft: 1s -> 2s"]
    assert (await c.numbers())["slo_drift"] == 1
    assert "the configured objectives are not in force: version 2 by alice" in caplog.text


async def test_a_configuration_that_is_forced_becomes_a_new_version_once(start: Start, tmp_path: Path) -> None:
    c = await start(slo_dir=tmp_path / "slo")
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)
    for _ in range(2):
        c = await start(slo_dir=tmp_path / "slo", objectives=CONFIGURED, slo_force=True)
        seen = await c.show()
        assert (seen.current.version, seen.current.reason) == (3, "forced by --slo-force")
        assert list(seen.drift) == []
        await start.end(c)


async def test_conductors_that_share_a_folder_follow_each_other(start: Start, until: Until, tmp_path: Path) -> None:
    one = await start("one", slo_dir=tmp_path / "slo")
    two = await start("two", slo_dir=tmp_path / "slo")
    await two.set({"cluster": {"ttft": "1s"}})
    await until(one.acknowledged, {"one": 2, "two": 2})
    assert await one.version() == 2
    await start.end(two)
    assert await one.acknowledged() == {"one": 2}, "one that has ended is waited for no more"


async def test_a_damaged_or_foreign_file_is_refused_at_the_start(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "slo"
    c = await start(slo_dir=folder)
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)
    with pytest.raises(SharedStoreRefused, match="'moonpool', but this one is 'other'"):
        await start(slo_dir=folder, cluster_name="other")
    text = (folder / "objectives.json").read_text()
    (folder / "objectives.json").write_text(text.replace("1s", "9s"))
    with pytest.raises(SharedStoreRefused, match="repair it or move it away"):
        await start(slo_dir=folder)


async def test_what_nothing_can_meet_is_told_in_the_reply_the_log_and_the_numbers(
    start: Start, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    c = await start()
    joining = await c.join()
    samples = [conductor_pb2.PrefillSample(new_tokens=n, seconds=n * 0.01) for n in (10, 100, 1000)] * 20
    await joining.write(conductor_pb2.NodeReport(prefills=samples))
    tight = {"cluster": {"ttft": "1ms"}}
    await until(lambda: c.warns_of(tight))
    reply = await c.set(tight)
    assert reply.warnings[0].startswith("cluster.ttft is 0.001s, and no node of model 'm' takes less than")
    assert "no node can meet an objective: cluster.ttft is 0.001s" in caplog.text
    assert (await c.numbers())["slo_unmeetable"] == 1
    assert len((await c.show()).unmeetable) == 1
    joining.cancel()


async def test_a_log_with_changes_of_objectives_replays_to_the_same_decisions(start: Start, tmp_path: Path) -> None:
    c = await start(decision_log=tmp_path / "log", objectives=CONFIGURED)
    joining = await c.join()
    said = []
    for number, objectives in enumerate([{"cluster": {"ttft": "1ms"}}, {"classes": {"chat": {"ttft": "9x"}}}, {}]):
        for slo_class in ("", "chat"):
            request = conductor_pb2.ScheduleRequest(
                request_id=f"r{number}{slo_class}", model="m", prompt_tokens=100, max_new_tokens=4, slo_class=slo_class
            )
            reply = await c.schedule(request)
            said.append(reply.rejection.reason)
        await c.set(objectives)
    assert said == ["", "unknown_class", "ttft", "unknown_class", "", ""]
    joining.cancel()
    await start.end(c)
    (life,) = recorded_runs(tmp_path / "log")
    steps = list(replay(life))
    assert [step.event.version for step in steps if isinstance(step.event, ObjectivesChanged)] == [1, 2, 3, 4]
    assert all(step.made == step.logged for step in steps)
