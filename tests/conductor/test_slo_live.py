"""The record of objectives through live conductors: gRPC, real files, a real Redis that goes away and comes back."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from conductor.decision_log import DecisionLogConfig, lives, replay
from conductor.errors import SharedStoreRefused
from conductor.policy.events import ObjectivesChanged
from conductor.policy.objectives import Objective, Scope, SloRecord
from conductor.server import ConductorConfig, serve_conductor
from messenger.control import open_channel
from moonpool_proto.v1 import common_pb2, conductor_pb2, conductor_pb2_grpc

CONFIGURED = SloRecord(cluster=Scope(ttft=Objective(2.0)))


class Operator:
    """A running conductor, and the calls of one who operates it."""

    def __init__(self, config: ConductorConfig) -> None:
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(serve_conductor(config, self._stop, self._ready.set_result))
        self._channel = open_channel(config.listen)
        self.stub = conductor_pb2_grpc.ConductorStub(self._channel)

    async def up(self) -> "Operator":
        await asyncio.wait([self._ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._channel.close()
            await self._task
        return self

    async def show(self, history: int = 0) -> conductor_pb2.ShowSloReply:
        return await self.stub.ShowSlo(conductor_pb2.ShowSloRequest(history=history))

    async def version(self) -> int:
        return (await self.show()).current.version

    async def set(self, objectives: dict[str, Any], **fields: Any) -> conductor_pb2.ChangeSloReply:
        fields = {"author": "alice", "reason": "a test", **fields}
        return await self.stub.ChangeSlo(conductor_pb2.ChangeSloRequest(content=json.dumps(objectives), **fields))

    async def rollback(self, version: int, **fields: Any) -> conductor_pb2.ChangeSloReply:
        fields = {"author": "bob", "reason": "it was better", **fields}
        return await self.stub.ChangeSlo(conductor_pb2.ChangeSloRequest(rollback_to=version, **fields))

    async def refusal(self, asked: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked
        return caught.value.code(), caught.value.details() or ""

    async def numbers(self, frontend_id: str = "", tenants: tuple[str, ...] = ()) -> dict[str, float]:
        request = conductor_pb2.ClusterRequest(frontend_id=frontend_id, tenants=tenants)
        return {sample.name: sample.value for sample in (await self.stub.Cluster(request)).samples}

    async def end(self) -> None:
        await self._channel.close()
        self._stop.set()
        async with asyncio.timeout(60):
            await self._task


Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    running: list[Operator] = []

    async def begin(name: str = "c", **fields: Any) -> Operator:
        fields = {"node_id": name, "shared_refresh_s": 0.05, **fields}
        operator = Operator(ConductorConfig(listen=f"unix:{tmp_path}/{name}.sock", **fields))
        await operator.up()
        running.append(operator)
        return operator

    async def end(operator: Operator) -> None:
        running.remove(operator)
        await operator.end()

    begin.end = end  # type: ignore[attr-defined]
    yield begin
    for operator in reversed(running):
        await operator.end()


async def until(so: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not await so():
            await asyncio.sleep(0.02)


async def acknowledged(operator: Operator) -> dict[str, int]:
    return {each.node_id: each.version for each in (await operator.show()).acknowledged}


async def test_the_configuration_gives_the_first_version_and_a_call_the_next(start: Start) -> None:
    c = await start(objectives=CONFIGURED)
    first = await c.show()
    assert (first.current.version, first.current.author, first.current.origin) == (1, "configuration", "configuration")
    assert json.loads(first.current.content) == {"cluster": {"ttft": "2s"}}
    assert "lost when it ends" in first.kept
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
    nothing = await c.set({})
    assert list(nothing.differences) == []
    assert await c.version() == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"content": '{"cluster": {"ttft": "-1s"}}'}, "cluster.ttft is '-1s'"),
        ({"content": "{"}, "no JSON"),
        ({"content": "[1]"}, "the record is [1]"),
        ({"content": "[" * 200_000}, "no JSON"),
        ({"content": '{"cluster": {"ttft": 1' + 400 * "0" + "}}"}, "cluster.ttft is 1000"),
        ({"content": "{}", "author": ""}, "author"),
        ({"content": "{}", "reason": " "}, "reason"),
        ({"content": "{}", "reason": "two\nlines"}, "one line"),
        ({"rollback_to": 9}, "no version 9"),
    ],
)
async def test_what_cannot_be_is_refused_and_changes_nothing(start: Start, fields: dict[str, Any], said: str) -> None:
    c = await start(objectives=CONFIGURED)
    request = conductor_pb2.ChangeSloRequest(**{"author": "alice", "reason": "a test", **fields})
    code, told = await c.refusal(c.stub.ChangeSlo(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said in told
    assert await c.version() == 1


async def test_new_tenants_that_no_front_door_knows_are_refused_unless_forced(start: Start) -> None:
    c = await start()
    acme = {"tenants": {"acme": {"ttft": "1s"}}}
    await c.set(acme)
    assert await c.version() == 2, "no front door has told its tenants: nothing is known"
    await c.numbers("front-0", ("globex",))
    code, said = await c.refusal(c.set({"tenants": {"acme": {}, "initech": {}}}))
    assert (code, "tenant 'initech'" in said, "globex" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True, True)
    reply = await c.set({"tenants": {"acme": {}, "initech": {}}}, force=True)
    assert reply.version.version == 3
    assert "initech" in reply.warnings[0]
    await c.numbers("front-0", ("",))
    code, said = await c.refusal(c.set({"tenants": {"umbrella": {}}}))
    assert "front-0 ask for no API key" in said


async def test_versions_outlive_the_conductor_and_go_before_the_configuration(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"objectives": CONFIGURED, "objectives_dir": tmp_path / "slo"}
    c = await start(**fields)
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)  # type: ignore[attr-defined]
    c = await start(**fields)
    seen = await c.show()
    assert json.loads(seen.current.content) == {"cluster": {"ttft": "1s"}}
    assert list(seen.drift) == ["cluster.ttft: 1s -> 2s"]
    assert (await c.numbers())["slo_drift"] == 1
    assert "the configured objectives are not in force: version 2 by alice" in caplog.text


async def test_a_configuration_that_is_forced_becomes_a_new_version_once(start: Start, tmp_path: Path) -> None:
    c = await start(objectives_dir=tmp_path / "slo")
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)  # type: ignore[attr-defined]
    for _ in range(2):
        c = await start(objectives_dir=tmp_path / "slo", objectives=CONFIGURED, objectives_forced=True)
        seen = await c.show()
        assert (seen.current.version, seen.current.reason) == (3, "forced by --slo-force")
        assert list(seen.drift) == []
        await start.end(c)  # type: ignore[attr-defined]


async def test_conductors_that_share_a_folder_follow_each_other(start: Start, tmp_path: Path) -> None:
    one = await start("one", objectives_dir=tmp_path / "slo")
    two = await start("two", objectives_dir=tmp_path / "slo")
    await two.set({"cluster": {"ttft": "1s"}})
    await until(lambda: _is(acknowledged(one), {"one": 2, "two": 2}))
    assert await one.version() == 2
    await start.end(two)  # type: ignore[attr-defined]
    assert await acknowledged(one) == {"one": 2}, "one that has ended is waited for no more"


async def test_a_damaged_or_foreign_file_is_refused_at_the_start(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "slo"
    c = await start(objectives_dir=folder)
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)  # type: ignore[attr-defined]
    with pytest.raises(SharedStoreRefused, match="'moonpool', and this one is 'other'"):
        await start(objectives_dir=folder, cluster_name="other")
    text = (folder / "objectives.json").read_text()
    (folder / "objectives.json").write_text(text.replace("1s", "9s"))
    with pytest.raises(SharedStoreRefused, match="mend it or move it away"):
        await start(objectives_dir=folder)


async def test_conductors_go_by_one_record_in_redis_and_say_so(start: Start, start_redis: Any) -> None:
    url = start_redis().url()
    one = await start("one", redis_url=url, objectives=CONFIGURED)
    two = await start("two", redis_url=url)
    assert json.loads((await two.show()).current.content) == {"cluster": {"ttft": "2s"}}
    await one.set({"cluster": {"ttft": "1s"}}, expect_version=1)
    await until(lambda: _is(acknowledged(two), {"one": 2, "two": 2}))
    assert await two.version() == 2
    await asyncio.gather(
        *(c.set({"cluster": {"ttft": f"{n}s"}}) for n, c in ((3, one), (4, two))), return_exceptions=True
    )
    await until(lambda: _agree(one, two))
    assert len({each.version for each in (await one.show(history=9)).history}) == await one.version()


async def test_of_changes_made_for_one_version_one_alone_succeeds(start: Start, start_redis: Any) -> None:
    url = start_redis().url()
    conductors = [await start(f"c{n}", redis_url=url) for n in range(3)]
    changes = [c.set({"cluster": {"ttft": f"{n + 1}s"}}, expect_version=1) for n, c in enumerate(conductors)]
    results = await asyncio.gather(*changes, return_exceptions=True)
    refused = [one for one in results if isinstance(one, grpc.aio.AioRpcError)]
    assert [one.code() for one in refused] == [grpc.StatusCode.FAILED_PRECONDITION] * 2
    await until(lambda: _agree(*conductors))
    assert await conductors[0].version() == 2


async def test_a_redis_that_lost_everything_is_given_the_versions_again(start: Start, start_redis: Any) -> None:
    server = start_redis()
    one = await start("one", redis_url=server.url())
    two = await start("two", redis_url=server.url())
    for seconds in (1, 2, 3):
        await one.set({"cluster": {"ttft": f"{seconds}s"}})
    await until(lambda: _is(two.version(), 4))
    server.kill()
    await until(lambda: _troubled(one))
    code, said = await one.refusal(one.set({}))
    assert (code, "Redis" in said) == (grpc.StatusCode.ABORTED, True)
    assert await one.version() == 4, "what was in force stays so"
    server.start()
    async with contextlib.aclosing(Redis.from_url(server.url(), protocol=2)) as redis:
        await until(lambda: _is(redis.hget("moonpool:slo", "last"), b"4"))
        assert await redis.hlen("moonpool:slo") == 5
    await until(lambda: _is(acknowledged(one), {"one": 4, "two": 4}))
    await two.set({})
    await until(lambda: _is(one.version(), 5))


async def test_a_start_without_redis_goes_by_the_copy_or_the_configuration(
    start: Start, start_redis: Any, tmp_path: Path
) -> None:
    server = start_redis()
    c = await start(redis_url=server.url(), objectives_dir=tmp_path / "copy")
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)  # type: ignore[attr-defined]
    server.kill()
    fields = {"redis_url": server.url(), "objectives": CONFIGURED}
    with_copy = await start("with", objectives_dir=tmp_path / "copy", **fields)
    without = await start("without", **fields)
    assert json.loads((await with_copy.show()).current.content) == {"cluster": {"ttft": "1s"}}
    seen = await without.show()
    assert (seen.current.version, json.loads(seen.current.content)) == (0, {"cluster": {"ttft": "2s"}})
    assert "cannot be reached" in seen.trouble
    server.start()
    await until(lambda: _agree(with_copy, without))
    assert await without.version() == 2, "the copy's, which the other one gave back"


async def test_what_a_redis_tells_that_takes_nothing_in_holds_all_the_same(
    start: Start, start_redis: Any, tmp_path: Path
) -> None:
    server = start_redis()
    c = await start(redis_url=server.url())
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)  # type: ignore[attr-defined]
    log = DecisionLogConfig(tmp_path / "log")
    async with contextlib.aclosing(Redis.from_url(server.url(), protocol=2)) as redis:
        await redis.config_set("maxmemory", "1")
        c = await start(redis_url=server.url(), objectives=CONFIGURED, decision_log=log)
        seen = await c.show()
        assert "out of memory" in seen.trouble
        assert (seen.current.version, json.loads(seen.current.content)) == (2, {"cluster": {"ttft": "1s"}})
        assert (await c.numbers())["slo_version"] == 2, "what the policy goes by is what is shown"
        await redis.config_set("maxmemory", "0")
    await until(lambda: _is(acknowledged(c), {"c": 2}))
    assert (await c.numbers())["slo_version"] == 2
    await start.end(c)  # type: ignore[attr-defined]
    (life,) = lives(tmp_path / "log")
    assert [step.event.version for step in replay(life) if isinstance(step.event, ObjectivesChanged)] == [2]


async def test_a_forced_configuration_is_forced_as_soon_as_the_store_takes_it(start: Start, start_redis: Any) -> None:
    server = start_redis()
    c = await start(redis_url=server.url())
    await start.end(c)  # type: ignore[attr-defined]
    async with contextlib.aclosing(Redis.from_url(server.url(), protocol=2)) as redis:
        await redis.config_set("maxmemory", "1")
        c = await start(redis_url=server.url(), objectives=CONFIGURED, objectives_forced=True)
        assert await c.version() == 1
        await redis.config_set("maxmemory", "0")
    await until(lambda: _is(c.version(), 2))
    assert json.loads((await c.show()).current.content) == {"cluster": {"ttft": "2s"}}


async def test_a_redis_that_lost_everything_while_no_conductor_ran_is_given_the_copy(
    start: Start, start_redis: Any, tmp_path: Path
) -> None:
    server = start_redis()
    fields = {"redis_url": server.url(), "objectives": CONFIGURED, "objectives_dir": tmp_path / "copy"}
    c = await start(**fields)
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)  # type: ignore[attr-defined]
    async with contextlib.aclosing(Redis.from_url(server.url(), protocol=2)) as redis:
        await redis.flushall()
    after = await start(**fields)
    seen = (await after.show(history=9)).history
    assert [each.version for each in seen] == [2, 1]
    assert json.loads(seen[0].content) == {"cluster": {"ttft": "1s"}}


async def test_what_nothing_can_meet_is_told_in_the_reply_the_log_and_the_numbers(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    c = await start()
    joining = await join(c)
    samples = [conductor_pb2.PrefillSample(new_tokens=n, seconds=n * 0.01) for n in (10, 100, 1000)] * 20
    await joining.write(conductor_pb2.NodeReport(prefills=samples))
    tight = {"cluster": {"ttft": "1ms"}}
    await until(lambda: _warns(c, tight))
    reply = await c.set(tight)
    assert reply.warnings[0].startswith("cluster.ttft is 0.001s, and no node of model 'm' takes less than")
    assert "nothing can meet an objective: cluster.ttft is 0.001s" in caplog.text
    assert (await c.numbers())["slo_unmeetable"] == 1
    assert len((await c.show()).unmeetable) == 1
    joining.cancel()


async def test_a_log_with_changes_of_objectives_replays_to_the_same_decisions(start: Start, tmp_path: Path) -> None:
    c = await start(decision_log=DecisionLogConfig(tmp_path / "log"), objectives=CONFIGURED)
    joining = await join(c)
    said = []
    for number, objectives in enumerate([{"cluster": {"ttft": "1ms"}}, {"classes": {"chat": {"ttft": "9x"}}}, {}]):
        for slo_class in ("", "chat"):
            request = conductor_pb2.ScheduleRequest(
                request_id=f"r{number}{slo_class}", model="m", prompt_tokens=100, max_new_tokens=4, slo_class=slo_class
            )
            reply = await c.stub.Schedule(request)
            said.append(reply.rejection.reason)
        await c.set(objectives)
    assert said == ["", "unknown_class", "ttft", "unknown_class", "", ""]
    joining.cancel()
    await start.end(c)  # type: ignore[attr-defined]
    (life,) = lives(tmp_path / "log")
    steps = list(replay(life))
    assert [step.event.version for step in steps if isinstance(step.event, ObjectivesChanged)] == [1, 2, 3, 4]
    assert all(step.made == step.logged for step in steps)


async def join(operator: Operator) -> Any:
    """A worker that does both phases."""
    node = conductor_pb2.Node(
        node_id="w", role=common_pb2.ROLE_AGGREGATED, incarnation=1, target="unix:/w", host_id="h", model="m",
        kv_namespace=bytes(16), capacity_tokens=4096, max_model_len=4096, max_batch=8,
    )  # fmt: skip
    node.spec.block_tokens = 16
    joining = operator.stub.Join()
    await joining.write(conductor_pb2.NodeReport(node=node))
    await joining.read()
    return joining


async def _is(asked: Any, wanted: Any) -> bool:
    return bool(await asked == wanted)


async def _agree(*conductors: Operator) -> bool:
    """All go by one version, and know of each other that they do."""
    seen = [await c.show() for c in conductors]
    told = {(each.version, each.digest) for reply in seen for each in (reply.current, *reply.acknowledged)}
    return len(told) == 1 and all(len(reply.acknowledged) == len(conductors) for reply in seen)


async def _troubled(operator: Operator) -> bool:
    return bool((await operator.show()).trouble)


async def _warns(operator: Operator, objectives: dict[str, Any]) -> bool:
    return bool((await operator.set(objectives, trial=True)).warnings)
