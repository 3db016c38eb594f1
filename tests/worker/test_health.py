"""An engine past hope is told from one that failed a while, and its process ends so that another one may serve."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import worker.transformer
from conductor.config import ConductorConfig
from conductor.server import serve_conductor
from engine import load_model
from messenger import MessengerConfig
from moonpool.role_process.worker import serve_worker
from moonpool_proto.v1.conductor_pb2 import ClusterRequest
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from moonpool_proto.v1.worker_pb2 import FrontendMessage, Hello, Submit
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc.control import open_channel
from settings.keys import assemble
from worker.config import WorkerConfig
from worker.errors import EngineBroken
from worker.policy import MAX_FAILED_STEPS, EngineHealth, StepWatch


def test_failures_count_in_a_row_only() -> None:
    health = EngineHealth(3)
    for _ in range(5):
        health.failed()
        health.failed()
        assert not health.is_broken
        health.succeeded()
    for _ in range(3):
        health.failed()
    assert health.is_broken


def test_a_step_never_ends_if_all_looks_within_the_longest_one_have_seen_it() -> None:
    watch = StepWatch()
    for step in (1, 0, 2):  # each for as long as a step may last
        assert not any(watch.look(step) for _ in range(StepWatch.LOOKS))
    for _ in range(3 * StepWatch.LOOKS):  # nothing to compute
        assert not watch.look(0)
    for _ in range(StepWatch.LOOKS):
        assert not watch.look(3)
    assert watch.look(3)


def test_the_attempts_of_one_request_do_not_end_a_node() -> None:
    from frontend.config import FrontendConfig

    max_attempts = FrontendConfig.__dataclass_fields__["max_attempts"].default
    assert max_attempts < MAX_FAILED_STEPS


class Engine:
    """Says whether the model of the worker under test raises."""

    fails = False


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The worker's model raises in `run` as long as `fails`."""
    switch = Engine()

    def load(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        real = model.run

        def run(*args: Any) -> Any:
            if switch.fails:
                raise RuntimeError("device-side assert")
            return real(*args)

        model.run = run  # type: ignore[method-assign]
        return model

    monkeypatch.setattr(worker.transformer, "load_model", load)
    return switch


def worker_settings(folder: Path, model_path: Path, conductor: str, **options: Any) -> WorkerConfig:
    return assemble(
        WorkerConfig,
        device="cpu",
        threads=1,
        node_id="w",
        listen=f"unix:{folder}/w.sock",
        conductor_targets=(conductor,),
        pool_target="",
        model=model_path,
        served_model_name=("m",),
        block_tokens=8,
        capacity_tokens=1024,
        messenger=assemble(MessengerConfig, shm_dir=folder),
        **options,
    )


@pytest.fixture
async def start(tmp_path: Path, model_path: Path, engine: Engine) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """Starts an aggregated worker that has joined a conductor: (its task, its target, the conductor's)."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []

    async def begin() -> tuple[asyncio.Task[bool], str, str]:
        conductor: asyncio.Future[str] = loop.create_future()
        config = assemble(ConductorConfig, listen=f"unix:{tmp_path}/c.sock")
        tasks.append(asyncio.create_task(serve_conductor(config, stop, conductor.set_result)))
        ready: asyncio.Future[str] = loop.create_future()
        settings = worker_settings(tmp_path, model_path, await conductor)
        serving = asyncio.create_task(serve_worker(settings, "aggregated", stop, ready.set_result))
        tasks.append(serving)
        async with asyncio.timeout(60):
            return serving, await ready, await conductor

    yield begin
    stop.set()
    await asyncio.gather(*tasks, return_exceptions=True)


def submit(number: int) -> FrontendMessage:
    prompt = np.arange(number, number + 5, dtype="<i4")
    message = Submit(request_id=f"r{number}", attempt=0, frontend_id="f", model="m", prompt_ids=prompt.tobytes())
    message.chain_seed, message.timeout_s = bytes(16), 60
    message.sampling.max_tokens, message.sampling.top_p = 2, 1.0
    return FrontendMessage(submit=message)


async def ended(stream: Any, number: int) -> str:
    """Return the outcome of a request: "finished", or its failure's code."""
    while True:
        message = await stream.read()
        for failure in message.failures:
            if failure.request_id == f"r{number}":
                assert failure.retryable
                return str(failure.code)
        if any(token.request_id == f"r{number}" and token.finish for token in message.tokens):
            return "finished"


async def test_a_worker_whose_every_step_fails_leaves_with_an_error(start: Any, engine: Engine) -> None:
    serving, target, conductor = await start()
    async with asyncio.timeout(60), open_channel(target) as channel, open_channel(conductor) as conductor_channel:
        stream = WorkerStub(channel).Attach()
        await stream.write(FrontendMessage(hello=Hello(frontend_id="f", incarnation=1)))
        await stream.read()
        outcomes = []
        for number in range(2 * MAX_FAILED_STEPS - 1):
            engine.fails = number != MAX_FAILED_STEPS - 2  # one success among them: it does not count from the start
            await stream.write(submit(number))
            outcomes.append(await ended(stream, number))
        assert outcomes == [*["engine"] * (MAX_FAILED_STEPS - 2), "finished", *["engine"] * MAX_FAILED_STEPS]
        with pytest.raises(EngineBroken, match=f"{MAX_FAILED_STEPS} consecutive steps failed.*device-side assert"):
            await serving
        cluster = await ConductorStub(conductor_channel).Cluster(ClusterRequest())
        assert list(cluster.nodes) == []


def serve_until_a_step_stalls(folder: Path, model_path: Path, conductor: str) -> None:
    """Be a worker; steps never end once `folder`/stall exists."""

    def load(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        real = model.run

        def run(*args: Any) -> Any:
            if (folder / "stall").exists():
                threading.Event().wait()
            return real(*args)

        model.run = run  # type: ignore[method-assign]
        return model

    worker.transformer.load_model = load
    settings = worker_settings(folder, model_path, conductor, step_timeout_s=0.5)
    ready = (folder / "ready").write_text
    asyncio.run(serve_worker(settings, "aggregated", asyncio.Event(), ready))


async def test_a_worker_whose_step_never_ends_leaves_at_once(tmp_path: Path, model_path: Path) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    listening: asyncio.Future[str] = loop.create_future()
    config = assemble(ConductorConfig, listen=f"unix:{tmp_path}/c.sock")
    serving = asyncio.create_task(serve_conductor(config, stop, listening.set_result))
    spawned = multiprocessing.get_context("spawn").Process(
        target=serve_until_a_step_stalls, args=(tmp_path, model_path, await listening), daemon=True
    )
    spawned.start()
    try:
        async with asyncio.timeout(120):
            while not (tmp_path / "ready").exists():
                assert spawned.exitcode is None
                await asyncio.sleep(0.05)
            async with open_channel(f"unix:{tmp_path}/w.sock") as channel:
                stream = WorkerStub(channel).Attach()
                await stream.write(FrontendMessage(hello=Hello(frontend_id="f", incarnation=1)))
                await stream.read()
                await stream.write(submit(1))
                assert await ended(stream, 1) == "finished"  # steps that end are left alone
                (tmp_path / "stall").touch()
                await stream.write(submit(2))
                with pytest.raises(grpc.aio.AioRpcError):
                    await ended(stream, 2)
            await asyncio.to_thread(spawned.join)
        assert spawned.exitcode == 1
        async with open_channel(config.listen.listen) as channel, asyncio.timeout(60):
            while (await ConductorStub(channel).Cluster(ClusterRequest())).nodes:
                await asyncio.sleep(0.05)
    finally:
        spawned.kill()
        stop.set()
        await serving
