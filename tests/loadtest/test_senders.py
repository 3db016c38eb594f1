"""Several sending processes: one clock, no record lost, and a dead one named."""

from __future__ import annotations

import asyncio
import sys
import threading
from asyncio.subprocess import PIPE
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import SenderUnusable
from loadtest.record import SendOutcome
from loadtest.sender import LoadPlan, SendTally
from loadtest.senders import choose_senders, open_senders, send_watched, split, split_limit, start_soon
from loadtest.server import ServerInfo
from loadtest.validity import ValidityEvidence, invalid_reasons


@pytest.fixture
def send():
    async def start(
        server: Any, requests: list[Any], *, senders: int, stop: asyncio.Event | None = None, **options: Any
    ) -> tuple[ValidityEvidence, SendTally]:
        values: dict[str, Any] = {"timeout_s": 60.0, "speed": 1.0} | options
        load = LoadPlan(server=ServerInfo(server.url, "tiny"), requests=requests, **values)
        tally = SendTally(len(requests))
        async with open_senders(load, senders) as opened:
            evidence = await send_watched(opened, load, start=start_soon(), stop=stop or asyncio.Event(), tally=tally)
        assert not [p for p in psutil.Process().children() if "loadtest.sender_process" in " ".join(p.cmdline())]
        return evidence, tally

    return start


def sender_of(request: Any) -> psutil.Process:
    """The sending process at the other end of a request's connection."""
    senders = [p for p in psutil.Process().children() if "loadtest.sender_process" in " ".join(p.cmdline())]
    connected = {c.laddr.port: p for p in senders for c in p.net_connections("tcp")}
    return connected[request.transport.get_extra_info("peername")[1]]


async def test_two_senders_send_all_and_return_every_record_in_order(serve, send, make_request) -> None:
    requests = [make_request(i, arrival_s=0.02 * i) for i in range(40)]
    server = serve(token_delay_s=0.001)
    evidence, tally = await send(server, requests, senders=2)
    assert sorted(r.index for r in evidence.records) == list(range(40))
    assert [r.sent_s for r in evidence.records] == sorted(r.sent_s for r in evidence.records)
    for record in evidence.records:
        assert record.outcome is SendOutcome.COMPLETED
        assert record.due_s == pytest.approx(0.02 * record.index)
        assert record.due_s <= record.sent_s < record.token_times[0] <= record.end_s
        assert (record.token_ids, record.attempts) == ([7, 7, 7], 1)
    assert (tally.sent, tally.in_flight, tally.prompt_tokens) == (40, 0, 40 * 20)
    assert invalid_reasons(evidence, max_send_lag_s=60) == []


async def test_both_senders_keep_one_clock(serve, send, make_request) -> None:
    # The server sees the requests of both in the order in which they were due, far enough apart.
    server = serve()
    await send(server, [make_request(i, arrival_s=1.5 * i) for i in range(5)], senders=2)
    assert [body["seed"] for body in server.bodies] == list(range(5))


async def test_a_dead_sender_is_named_and_the_others_records_are_kept(serve, send, make_request) -> None:
    killed = threading.Event()

    async def behave(server: Any, request: Any, body: Any) -> None:
        if body["seed"] == 5 and not killed.is_set():
            killed.set()
            sender_of(request).kill()

    server = serve(behave=behave)
    evidence, _ = await send(server, [make_request(i, arrival_s=0.3 * i) for i in range(12)], senders=2)
    even = [r for r in evidence.records if r.index % 2 == 0]
    assert [r.outcome for r in even] == [SendOutcome.COMPLETED] * 6
    assert all(r.index < 5 for r in evidence.records if r.index % 2)
    (fate,) = evidence.lost
    assert fate.startswith("sender 2 of 2 (process ")
    assert "was killed by SIGKILL, with" in fate
    reasons = invalid_reasons(evidence, max_send_lag_s=60)
    assert reasons[0] == fate
    assert "requests have no record" in reasons[1]


async def test_a_sender_that_falls_silent_is_killed_and_named(
    serve, send, make_request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtest.senders._SILENT_S", 5.0)
    stopped = threading.Event()

    async def behave(server: Any, request: Any, body: Any) -> None:
        if body["seed"] == 1 and not stopped.is_set():
            stopped.set()
            sender_of(request).suspend()

    server = serve(behave=behave)
    evidence, _ = await send(server, [make_request(i, arrival_s=0.05 * i) for i in range(8)], senders=2)
    assert [r.outcome for r in evidence.records if r.index % 2 == 0] == [SendOutcome.COMPLETED] * 4
    (fate,) = evidence.lost
    assert fate.startswith("sender 2 of 2 sent no message for 5 s and was killed, with ")


async def test_a_sender_that_does_not_come_up_is_named(
    serve, send, make_request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SenderUnusable, match=r"did not start: \(process \d+\) ended with exit code 1; try --senders 1"):
        await send(serve(), [make_request(i) for i in range(4)], senders=2)


async def test_a_stop_reaches_every_sender_and_their_records_come_back(serve, send, make_request) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    async def behave(server: Any, request: Any, body: Any) -> None:
        if len(server.bodies) == 4:
            loop.call_soon_threadsafe(stop.set)
        if body["seed"] >= 2:
            await asyncio.sleep(30)

    requests = [make_request(i, arrival_s=0.0 if i < 4 else 1000.0) for i in range(8)]
    evidence, _ = await send(serve(behave=behave), requests, senders=2, stop=stop)
    assert evidence.interrupted
    assert {r.index: r.outcome for r in evidence.records if r.index in (2, 3)} == {
        2: SendOutcome.UNFINISHED,
        3: SendOutcome.UNFINISHED,
    }
    assert {r.index for r in evidence.records} == {0, 1, 2, 3}
    assert invalid_reasons(evidence, max_send_lag_s=60) == []


@pytest.mark.parametrize("senders", [1, 2])
async def test_a_limit_of_concurrency_holds_for_all_senders_together(serve, send, make_request, senders: int) -> None:
    most = 0

    async def behave(server: Any, request: Any, body: Any) -> None:
        nonlocal most
        server.counters["here"] += 1
        most = max(most, server.counters["here"])
        await asyncio.sleep(0.01)
        server.counters["here"] -= 1

    evidence, _ = await send(serve(behave=behave), [make_request(i) for i in range(30)], senders=senders, limit=3)
    assert len(evidence.records) == 30
    assert most <= 3
    assert max(r.held_s for r in evidence.records) > 0.01
    assert min(r.held_s for r in evidence.records) < 0.01


async def test_senders_end_with_the_process_that_started_them(serve, make_request) -> None:
    server = serve()
    script = f"""
import asyncio, uvloop, numpy as np
from loadtest.errors import SenderUnusable
from loadtest.sender import LoadPlan, SendTally
from loadtest.plan import PlannedRequest
from loadtest.senders import open_senders
from loadtest.server import ServerInfo
requests = [PlannedRequest(i, 1000.0, np.zeros(4, np.int32), (), 1, 0.0, i, False) for i in range(4)]
async def main():
    async with open_senders(LoadPlan(ServerInfo({server.url!r}, "tiny"), requests, 60.0), 2) as opened:
        print(*(child.process.pid for child in opened.children), flush=True)
        await opened.send(0.0, asyncio.Event(), SendTally(4))
asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=PIPE)
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in (await parent.stdout.readline()).split()]
    assert len(children) == 2
    parent.kill()
    await parent.wait()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=60)
    assert not alive
    assert len(gone) == 2


@given(st.integers(1, 60), st.integers(1, 12))
def test_shares_hold_every_request_once_and_are_never_empty(count: int, senders: int) -> None:
    requests: Any = list(range(count))
    shares = split(requests, senders)
    assert sorted(r for share in shares for r in share) == requests
    assert all(shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 500), st.integers(1, 12))
def test_a_limit_is_divided_without_remainder(limit: int, senders: int) -> None:
    parts = split_limit(limit, senders)
    assert sum(part or 0 for part in parts) == limit
    assert split_limit(None, senders) == [None] * senders


def test_the_number_of_senders_follows_the_load_and_the_cores(make_request) -> None:
    slow = [make_request(i, arrival_s=float(i)) for i in range(50)]
    assert choose_senders(slow, speed=1.0, cores=64) == 1
    assert choose_senders(slow, speed=2000.0, cores=64) == 1
    many = [make_request(i, arrival_s=0.001 * i, max_tokens=200) for i in range(5000)]
    assert choose_senders(many, speed=1.0, cores=2) == 1
    assert choose_senders(many, speed=1.0, cores=8) == 4
    assert 1 < choose_senders(many, speed=0.1, cores=64) < choose_senders(many, speed=1.0, cores=64) <= 32
    assert choose_senders([], speed=1.0, cores=8) == 1
