"""Objectives that conductors share over a real Redis, which goes away and comes back."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from redis.asyncio import Redis

from conductor.decision_log import recorded_runs, replay
from conductor.policy.events import ObjectivesChanged
from conductor.policy.objectives import Objective, Scope, SloRecord

CONFIGURED = SloRecord(cluster=Scope(ttft=Objective(2.0)))
Start = Any  # the Conductors of conftest.py
Until = Callable[..., Awaitable[None]]


async def test_conductors_go_by_one_record_in_redis_and_say_so(start: Start, until: Until, start_redis: Any) -> None:
    url = start_redis().url()
    one = await start("one", redis_url=url, objectives=CONFIGURED)
    two = await start("two", redis_url=url)
    assert json.loads((await two.show()).current.content) == {"cluster": {"ttft": "2s"}}
    await one.set({"cluster": {"ttft": "1s"}}, expect_version=1)
    await until(two.acknowledged, {"one": 2, "two": 2})
    assert await two.version() == 2
    await asyncio.gather(
        *(c.set({"cluster": {"ttft": f"{n}s"}}) for n, c in ((3, one), (4, two))), return_exceptions=True
    )
    await until(lambda: one.agrees_with(two))
    assert len({each.version for each in (await one.show(history=9)).history}) == await one.version()


async def test_of_changes_made_for_one_version_one_alone_succeeds(start: Start, until: Until, start_redis: Any) -> None:
    url = start_redis().url()
    conductors = [await start(f"c{n}", redis_url=url) for n in range(3)]
    changes = [c.set({"cluster": {"ttft": f"{n + 1}s"}}, expect_version=1) for n, c in enumerate(conductors)]
    results = await asyncio.gather(*changes, return_exceptions=True)
    refused = [one for one in results if isinstance(one, grpc.aio.AioRpcError)]
    assert [one.code() for one in refused] == [grpc.StatusCode.FAILED_PRECONDITION] * 2
    await until(lambda: conductors[0].agrees_with(*conductors[1:]))
    assert await conductors[0].version() == 2


async def test_a_redis_that_lost_everything_is_given_the_versions_again(
    start: Start, until: Until, start_redis: Any
) -> None:
    server = start_redis()
    one = await start("one", redis_url=server.url())
    two = await start("two", redis_url=server.url())
    for seconds in (1, 2, 3):
        await one.set({"cluster": {"ttft": f"{seconds}s"}})
    await until(two.version, 4)
    server.kill()
    await until(one.is_troubled)
    code, said = await one.refusal(one.set({}))
    assert (code, "Redis" in said) == (grpc.StatusCode.ABORTED, True)
    assert await one.version() == 4, "what was in force stays so"
    server.start()
    async with contextlib.aclosing(Redis.from_url(server.url(), protocol=2)) as redis:
        await until(lambda: redis.hget("moonpool:slo", "last"), b"4")
        assert await redis.hlen("moonpool:slo") == 5
    await until(one.acknowledged, {"one": 4, "two": 4})
    await two.set({})
    await until(one.version, 5)


async def test_a_start_without_redis_goes_by_the_copy_or_the_configuration(
    start: Start, until: Until, start_redis: Any, tmp_path: Path
) -> None:
    server = start_redis()
    c = await start(redis_url=server.url(), slo_dir=tmp_path / "copy")
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)
    server.kill()
    fields = {"redis_url": server.url(), "objectives": CONFIGURED}
    with_copy = await start("with", slo_dir=tmp_path / "copy", **fields)
    without = await start("without", **fields)
    assert json.loads((await with_copy.show()).current.content) == {"cluster": {"ttft": "1s"}}
    seen = await without.show()
    assert (seen.current.version, json.loads(seen.current.content)) == (0, {"cluster": {"ttft": "2s"}})
    assert "cannot be reached" in seen.trouble
    server.start()
    await until(lambda: with_copy.agrees_with(without))
    assert await without.version() == 2, "the copy's, which the other one gave back"


async def test_what_a_redis_tells_that_takes_nothing_in_holds_all_the_same(
    start: Start, until: Until, start_redis: Any, tmp_path: Path
) -> None:
    server = start_redis()
    c = await start(redis_url=server.url())
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)
    log = tmp_path / "log"
    async with contextlib.aclosing(Redis.from_url(server.url(), protocol=2)) as redis:
        await redis.config_set("maxmemory", "1")
        c = await start(redis_url=server.url(), objectives=CONFIGURED, decision_log=log)
        seen = await c.show()
        assert "out of memory" in seen.trouble
        assert (seen.current.version, json.loads(seen.current.content)) == (2, {"cluster": {"ttft": "1s"}})
        assert (await c.numbers())["slo_version"] == 2, "what the policy goes by is what is shown"
        await redis.config_set("maxmemory", "0")
    await until(c.acknowledged, {"c": 2})
    assert (await c.numbers())["slo_version"] == 2
    await start.end(c)
    (life,) = recorded_runs(tmp_path / "log")
    assert [step.event.version for step in replay(life) if isinstance(step.event, ObjectivesChanged)] == [2]


async def test_a_forced_configuration_is_forced_as_soon_as_the_store_takes_it(
    start: Start, until: Until, start_redis: Any
) -> None:
    server = start_redis()
    c = await start(redis_url=server.url())
    await start.end(c)
    async with contextlib.aclosing(Redis.from_url(server.url(), protocol=2)) as redis:
        await redis.config_set("maxmemory", "1")
        c = await start(redis_url=server.url(), objectives=CONFIGURED, slo_force=True)
        assert await c.version() == 1
        await redis.config_set("maxmemory", "0")
    await until(c.version, 2)
    assert json.loads((await c.show()).current.content) == {"cluster": {"ttft": "2s"}}


async def test_a_redis_that_lost_everything_while_no_conductor_ran_is_given_the_copy(
    start: Start, start_redis: Any, tmp_path: Path
) -> None:
    server = start_redis()
    fields = {"redis_url": server.url(), "objectives": CONFIGURED, "slo_dir": tmp_path / "copy"}
    c = await start(**fields)
    await c.set({"cluster": {"ttft": "1s"}})
    await start.end(c)
    async with contextlib.aclosing(Redis.from_url(server.url(), protocol=2)) as redis:
        await redis.flushall()
    after = await start(**fields)
    seen = (await after.show(history=9)).history
    assert [each.version for each in seen] == [2, 1]
    assert json.loads(seen[0].content) == {"cluster": {"ttft": "1s"}}
