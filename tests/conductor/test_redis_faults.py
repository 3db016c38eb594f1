"""Redis under conductors that run: fails over, restarts, hangs, changes its mind about who may log in, speaks TLS."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from conductor.errors import SharedStoreRefused, SharedStoreUnavailable
from conductor.server import serve_conductor
from conductor.shared_store import RedisStore
from frontend.conductor import ConductorStream
from moonpool_proto.v1 import conductor_pb2
from tests.conductor.world import Conductor, World, until

CERTIFICATES = Path(__file__).parents[1] / "data" / "tls"
SECRET = "s3cret-word"


@contextlib.asynccontextmanager
async def at(server: Any, password: str = "") -> AsyncIterator[Redis]:
    """An administrator's connection."""
    async with Redis.from_url(server.url(password), protocol=2) as redis:
        yield redis


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


async def trouble(conductor: Conductor) -> str:
    """Why it cannot use Redis; "" when it can."""
    shared = (await conductor.state())["shared_store"]
    return "" if shared["state"] == "ok" else str(shared["reason"])


def all_well(*conductors: Conductor) -> Callable[[], Any]:
    async def so() -> bool:
        return not any([await trouble(each) for each in conductors])

    return so


async def change(conductor: Conductor, ttft: str) -> int:
    """The objectives' new version."""
    content = json.dumps({"cluster": {"ttft": ttft}})
    request = conductor_pb2.ChangeSloRequest(author="alice", reason="a test", content=content)
    return (await conductor.stub.ChangeSlo(request)).version.version


async def version(conductor: Conductor) -> int:
    return (await conductor.stub.ShowSlo(conductor_pb2.ShowSloRequest())).current.version


async def place(conductor: Conductor) -> str:
    """Return the answer to a request that no worker can serve."""
    line = ConductorStream(conductor.target)
    request = conductor_pb2.ScheduleRequest(request_id="r", model="m", prompt_tokens=8, max_new_tokens=8)
    try:
        return (await line.schedule(request, waits=False, deadline_s=60)).rejection.reason
    finally:
        await line.close()


async def test_conductors_follow_redis_to_the_promoted_replica_while_the_old_primary_lives_on(
    world: World, start_redis: Any
) -> None:
    """As behind a name or a virtual address that moves: connections to the old primary stay, and take no writes."""
    ports = free_port(), free_port()
    primary = start_redis("--port", ports[0])
    replica = start_redis("--port", ports[1], "--replicaof", "127.0.0.1", ports[0])
    address = world.folder / "redis"
    address.symlink_to(primary.socket)
    url = f"unix://{address}?db=0"
    first, second = await world.conductor("c", redis_url=url), await world.conductor("c2", redis_url=url)
    await world.pool()
    await world.store(0, 4)
    await until(second.knows("pool-0", 4))  # by the record in Redis
    newest = await change(first, "1s")
    async with at(primary) as old, at(replica) as new:

        async def copied() -> bool:
            return await new.hget("moonpool:slo", "last") == str(newest).encode()

        await until(copied)
        await new.execute_command("REPLICAOF", "NO", "ONE")
        await old.execute_command("REPLICAOF", "127.0.0.1", ports[1])
        moved = world.folder / "moved"
        moved.symlink_to(replica.socket)
        moved.replace(address)

        async def both_write_there() -> bool:
            await new.delete("moonpool:node:pool-0")
            await asyncio.sleep(0.2)
            return bool(await new.exists("moonpool:node:pool-0")) and await all_well(first, second)()

        await until(both_write_there)
    assert await change(second, "2s") == newest + 1

    async def told() -> bool:
        return await version(first) == newest + 1

    await until(told)


async def test_the_other_conductor_goes_on_and_the_successor_of_one_that_is_gone_goes_by_what_changed_meanwhile(
    world: World, start_redis: Any
) -> None:
    url = start_redis().url()
    first, second = await world.conductor("c", redis_url=url), await world.conductor("c2", redis_url=url)
    incarnations = [(await each.state())["incarnation"] for each in (first, second)]
    before = await change(first, "1s")
    await world.end(first)
    assert await place(second) == "no_nodes"
    assert await change(second, "2s") == before + 1
    successor = await world.conductor("c", redis_url=url)
    assert (await successor.state())["incarnation"] > max(incarnations)

    async def knows() -> bool:
        return await version(successor) == before + 1

    await until(knows)


async def test_a_redis_that_kept_its_data_over_a_restart_is_gone_on_with(world: World, start_redis: Any) -> None:
    server = start_redis("--appendonly", "yes", "--appendfsync", "always")
    conductor = await world.conductor(redis_url=server.url())
    newest = await change(conductor, "1s")
    server.kill()

    async def is_away() -> bool:
        return bool(await trouble(conductor))

    await until(is_away)
    assert await place(conductor) == "no_nodes"
    server.start()
    async with at(server) as redis:
        assert await redis.hget("moonpool:slo", "last") == str(newest).encode()
    await until(all_well(conductor))
    assert await change(conductor, "2s") == newest + 1


async def test_requests_events_and_starts_wait_for_no_redis_that_hangs(world: World, start_redis: Any) -> None:
    server = start_redis()
    conductor = await world.conductor(redis_url=server.url())
    await world.pool()
    server.pause()
    try:
        assert await place(conductor) == "no_nodes"
        await world.store(0, 4)
        await until(conductor.knows("pool-0", 4))

        async def is_away() -> bool:
            return "does not answer in time" in await trouble(conductor)

        await until(is_away)
        other = await world.conductor("c2", redis_url=server.url())
        assert "does not answer in time" in await trouble(other)
        assert await place(other) == "no_nodes"
        await world.end(other)
    finally:
        server.resume()
    await until(all_well(conductor))


async def test_a_password_that_is_changed_under_a_conductor_costs_it_nothing_but_redis(
    world: World, start_redis: Any
) -> None:
    server = start_redis("--requirepass", SECRET)
    conductor = await world.conductor(redis_url=server.url(SECRET))
    async with at(server, SECRET) as redis:
        await redis.config_set("requirepass", "another")
        await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        async def is_refused() -> bool:
            return "rejects the login" in await trouble(conductor)

        await until(is_refused)
        assert SECRET not in json.dumps(await conductor.state())
        assert await place(conductor) == "no_nodes"
        await redis.config_set("requirepass", SECRET)
    await until(all_well(conductor))


async def test_a_user_without_the_rights_is_refused_by_name_and_one_with_just_those_that_are_needed_is_not(
    world: World, start_redis: Any
) -> None:
    server = start_redis()
    async with at(server) as redis:
        await redis.execute_command("ACL", "SETUSER", "stranger", "on", f">{SECRET}", "~other:*", "+@all")
        needed = ("+@read", "+@write", "+@scripting", "+@connection", "-@dangerous")
        await redis.execute_command("ACL", "SETUSER", "moonpool", "on", f">{SECRET}", "~moonpool:*", *needed)
    urls = {name: f"unix://{name}:{SECRET}@{server.socket}?db=0" for name in ("stranger", "moonpool")}
    config = world.conductor_config(redis_url=urls["stranger"])
    with pytest.raises(SharedStoreRefused, match="check user and password") as refused:
        await serve_conductor(config, asyncio.Event(), lambda target: None)
    assert SECRET not in str(refused.value)
    conductor = await world.conductor("c2", redis_url=urls["moonpool"])
    await world.pool(conductor="c2")
    assert await change(conductor, "1s")
    await until(all_well(conductor))


@contextlib.asynccontextmanager
async def encrypted(server: Any) -> AsyncIterator[int]:
    """A port at which the server speaks TLS, as one does that was built for it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "node.pem", CERTIFICATES / "node.key")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(server.socket)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as listener:
        yield listener.sockets[0].getsockname()[1]


async def test_redis_is_spoken_with_over_tls_if_its_certificate_is_of_our_ca(start_redis: Any) -> None:
    server = start_redis("--requirepass", SECRET)
    async with encrypted(server) as port:
        for ca, is_ours in (("ca.pem", True), ("other_ca.pem", False)):
            options = f"ssl_ca_certs={CERTIFICATES / ca}&ssl_check_hostname=false"
            store = RedisStore(f"rediss://:{SECRET}@127.0.0.1:{port}/0?{options}", "blue", deadline_s=20)
            try:
                if is_ours:
                    await store.claim()
                else:
                    with pytest.raises(SharedStoreUnavailable, match="certificate verify failed"):
                        await store.claim()
            finally:
                await store.close()
