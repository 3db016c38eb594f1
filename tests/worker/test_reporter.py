"""Reports to the conductor: nothing piles up while it is away, and a new stream gets the news, not its forerunner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from messenger import InvalidArgument
from moonpool_proto.v1.conductor_pb2 import PHASE_ENDED, JoinAccepted, Node, NodeCommand, NodeReport
from moonpool_proto.v1.conductor_pb2_grpc import ConductorServicer, add_ConductorServicer_to_server
from rpc.control import ControlServer, admit_by, start_server
from rpc.join_tokens import JoinTokens
from worker.errors import StartupError
from worker.reporter import FIRST_DECODES, MAX_SAMPLES, ConductorReporter, JoinStream


class Conductor(ConductorServicer):
    """Keeps what it is told; ends each Join stream when `hang_up` is set."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.joins = 0
        self.told: list[str] = []
        self.heard = asyncio.Event()
        self.hang_up = asyncio.Event()

    async def Join(self, request_iterator: AsyncIterator[NodeReport], context: Any) -> AsyncIterator[NodeCommand]:
        await anext(request_iterator)
        if self.refuses:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuses)
        self.joins += 1
        reading = asyncio.ensure_future(self._read(request_iterator))
        yield NodeCommand(accepted=JoinAccepted(conductor_incarnation=self.joins))
        hang_up = asyncio.ensure_future(self.hang_up.wait())
        await asyncio.wait([hang_up, reading], return_when=asyncio.FIRST_COMPLETED)
        self.hang_up.clear()
        for task in (hang_up, reading):
            task.cancel()

    async def _read(self, reports: AsyncIterator[NodeReport]) -> None:
        async for report in reports:
            for progress in report.progress:
                self.told.append(progress.request_id)
                self.heard.set()


async def _serve(folder: Path, name: str = "conductor", refuses: str = "") -> tuple[Conductor, ControlServer]:
    conductor = Conductor(refuses)
    server = await start_server(f"unix:{folder}/{name}.sock", lambda s: add_ConductorServicer_to_server(conductor, s))
    return conductor, server


def _reporter(*targets: str) -> ConductorReporter:
    return ConductorReporter(Node(node_id="n"), targets, lambda report: None, lambda command: None)


def _stream(target: str) -> JoinStream:
    return JoinStream(Node(node_id="n"), target, lambda report: None, lambda command: None)


async def test_nothing_is_kept_for_a_conductor_that_is_away(tmp_path: Path) -> None:
    reporter = _stream(f"unix:{tmp_path}/nobody.sock")
    for i in range(2 * MAX_SAMPLES):
        reporter.progress(str(i), 0, PHASE_ENDED)
        reporter.prefill(1, 0, 0.1)
        reporter.decode(1, 1, 0.1)
        reporter.transfer("push", 1, 0.1)
    kept = reporter._pending
    assert len(kept.progress) == 0
    assert max(len(kept.prefills), len(kept.decodes), len(kept.transfers)) <= MAX_SAMPLES


async def test_news_after_a_broken_stream_go_to_the_next_one(tmp_path: Path) -> None:
    conductor, server = await _serve(tmp_path)
    reporter = _stream(server.target)
    running = asyncio.create_task(reporter.run())
    try:
        async with asyncio.timeout(20):
            for round_ in range(1, 6):
                await reporter.joined.wait()
                reporter.progress(f"request {round_}", 0, PHASE_ENDED)
                await conductor.heard.wait()
                conductor.heard.clear()
                conductor.hang_up.set()
                while conductor.joins == round_:
                    await asyncio.sleep(0.005)
        assert conductor.told == [f"request {i}" for i in range(1, 6)]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)


async def test_a_report_that_cannot_be_made_costs_one_stream_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conductor, server = await _serve(tmp_path)
    made = 0

    def fill(report: NodeReport) -> None:
        nonlocal made
        made += 1
        if made == 2:
            raise ValueError("not this one")

    stream = JoinStream(Node(node_id="n"), server.target, fill, lambda command: None)
    running = asyncio.create_task(stream.run())
    try:
        async with asyncio.timeout(60):
            await stream.joined.wait()
            stream.hurry()
            while not running.done() and conductor.joins < 2:
                await asyncio.sleep(0.005)
        assert not running.done()
        assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["not this one"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)


async def test_a_conductor_that_cannot_be_reached_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = f"unix:{tmp_path}/nobody.sock"
    running = asyncio.ensure_future(_reporter(target).run())
    async with asyncio.timeout(60):
        while not caplog.records:
            await asyncio.wait([running], timeout=0.05)
        await asyncio.wait([running], timeout=1.0)  # some more tries
    running.cancel()
    await asyncio.wait([running])
    (told,) = caplog.records
    assert told.getMessage().startswith(f"not joined to the conductor at {target}, retrying: failed to connect")


async def test_every_conductor_is_told_the_same_also_while_another_is_away(tmp_path: Path) -> None:
    served = [await _serve(tmp_path, name) for name in ("a", "b")]
    away = f"unix:{tmp_path}/nobody.sock"
    reporter = _reporter(served[0][1].target, away, served[1][1].target)
    running = asyncio.create_task(reporter.run())
    try:
        async with asyncio.timeout(60):
            await reporter.first_join()
            while not all(conductor.joins for conductor, _ in served):
                await asyncio.sleep(0.005)
            reporter.progress("r", 0, PHASE_ENDED)
            for conductor, _ in served:
                await conductor.heard.wait()
        assert [conductor.told for conductor, _ in served] == [["r"], ["r"]]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for _, server in served:
            await server.stop(0)


async def test_accepted_requests_are_reported_to_several_conductors_without_waiting_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.reporter.COALESCE_S", 3600.0)  # the other events of a report would be awaited so long
    served = [await _serve(tmp_path, name) for name in ("a", "b")]
    reporter = _reporter(*(server.target for _, server in served))
    running = asyncio.create_task(reporter.run())
    try:
        async with asyncio.timeout(20):
            await asyncio.gather(*(stream.joined.wait() for stream in reporter._streams))
            reporter.progress("one", 0, PHASE_ENDED)
            reporter.request_accepted()
            for conductor, _ in served:
                await conductor.heard.wait()
        assert [conductor.told for conductor, _ in served] == [["one"], ["one"]]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for _, server in served:
            await server.stop(0)


async def test_many_accepted_requests_share_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.reporter.COALESCE_S", 0.5)
    conductor, server = await _serve(tmp_path)
    reports = 0

    def fill(report: NodeReport) -> None:
        nonlocal reports
        reports += 1

    stream = JoinStream(Node(node_id="n"), server.target, fill, lambda command: None)
    running = asyncio.create_task(stream.run())
    try:
        async with asyncio.timeout(20):
            await stream.joined.wait()
            for _ in range(40):
                stream.request_accepted()
                await asyncio.sleep(0.001)
            stream.progress("last", 0, PHASE_ENDED)
            await conductor.heard.wait()
        assert reports <= 4  # that of the join, the first request's, and what came within half a second
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)


async def test_a_node_goes_on_with_the_conductors_that_take_it_in_and_gives_up_when_none_does(tmp_path: Path) -> None:
    _, willing = await _serve(tmp_path, "willing")
    _, first = await _serve(tmp_path, "first", refuses="another KvSpec")
    _, second = await _serve(tmp_path, "second", refuses="another block size")
    try:
        for targets, is_welcome in (((first, willing), True), ((first, second), False)):
            reporter = _reporter(*(server.target for server in targets))
            running = asyncio.create_task(reporter.run())
            async with asyncio.timeout(60):
                if is_welcome:
                    await reporter.first_join()
                else:
                    with pytest.raises(StartupError, match=r"another KvSpec; .* another block size"):
                        await reporter.first_join()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        for server in (willing, first, second):
            await server.stop(0)


async def test_of_many_decode_steps_the_usual_ones_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("worker.reporter.time.monotonic", lambda: clock[0])
    stream = _stream(f"unix:{tmp_path}/nobody.sock")
    for i in range(FIRST_DECODES):
        stream.decode(1, i, 0.01)
    told = stream._pending.decodes
    assert [sample.context_tokens for sample in told] == list(range(FIRST_DECODES))
    for i in range(100):
        clock[0] += 0.02
        stream.decode(8, 1000 + i, 5.0 if i % 5 == 0 else 0.02 + i * 1e-6)
    later = told[FIRST_DECODES:]
    assert len(later) == 7  # of 2 seconds
    assert all(sample.seconds < 1 for sample in later)


def test_a_conductor_that_cannot_be_one_is_named_at_once() -> None:
    with pytest.raises(InvalidArgument, match=r"must be unix:/dir/name\.sock or host:port, got 'head'"):
        _reporter("127.0.0.1:7000", "head")


async def test_one_that_is_told_to_end_while_nobody_answers_ends(short_path: Path) -> None:
    """Also where a stream breaks in the same moment: then gRPC tells of that alone."""
    for moment in range(400):
        stream = JoinStream(Node(node_id="n"), f"unix:{short_path}/nobody.sock", lambda _: None, lambda _: None)
        running = asyncio.create_task(stream.run())
        for _ in range(moment % 10):
            await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=10)
        if not done:
            running.cancel()
            pytest.fail(f"told to end after {moment % 10} steps of the loop, it goes on")


async def test_a_node_with_another_join_token_is_told_so_at_its_start(tmp_path: Path) -> None:
    def tokens(name: str) -> JoinTokens:
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(f"token-of-{name}-0123456789abcdef")
        return JoinTokens(tmp_path / name)

    admit_by(tokens("cluster"))
    conductor, server = await _serve(tmp_path)
    admit_by(tokens("stranger"))
    reporter = _reporter(server.target)
    running = asyncio.create_task(reporter.run())
    try:
        with pytest.raises(StartupError, match=r"refused this node: the join token .* set join_token_file"):
            await asyncio.wait_for(reporter.first_join(), 20)
        assert conductor.joins == 0
    finally:
        admit_by(None)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)
