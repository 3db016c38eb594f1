"""A worker's change of role: prompts hold it up, answers only for a while, and whoever leaves changes no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from moonpool_proto.v1.common_pb2 import ROLE_AGGREGATED, ROLE_DECODE, ROLE_PREFILL, Role, Sampling
from moonpool_proto.v1.worker_pb2 import Submit
from worker.jobs import RequestJobs
from worker.request import Request
from worker.role_switch import RoleSwitch


class Worker:
    """One that changes, its work, and what it told conductors."""

    def __init__(self, role: Role.ValueType, grace_s: float) -> None:
        self.told: list[tuple[bool, Role.ValueType]] = []  # whether it switches, its role
        self.announced: list[Role.ValueType] = []
        self.news = asyncio.Event()
        self.jobs = RequestJobs(lambda *_: None, lambda _: None)
        self.work = asyncio.Event()
        self.role = RoleSwitch(role, self.jobs, grace_s=grace_s, news=self._tell, done=self._announce)

    def _announce(self) -> None:
        self.announced.append(self.role.role)
        self._tell()

    def _tell(self) -> None:
        self.told.append((self.role.is_switching, self.role.role))
        self.news.set()

    def take(self) -> None:
        submit = Submit(request_id="r", prompt_ids=b"\x05\0\0\0", chain_seed=bytes(16), timeout_s=60.0)
        submit.sampling.CopyFrom(Sampling(max_tokens=9, top_p=1.0))
        request = Request.from_proto(submit, vocab_size=64, max_model_len=64, block_tokens=8)
        self.jobs.run(request, self._serve())

    async def _serve(self) -> None:
        await self.work.wait()

    async def finished(self) -> None:
        async with asyncio.timeout(60):
            while self.role.is_switching:
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def worker() -> AsyncIterator[Callable[[Role.ValueType, float], Worker]]:
    made: list[Worker] = []

    def make(role: Role.ValueType, grace_s: float) -> Worker:
        made.append(Worker(role, grace_s))
        return made[-1]

    yield make
    for one in made:
        await one.role.close()
        await one.jobs.cancel_all()


Make = Callable[[Role.ValueType, float], Worker]


async def test_it_changes_once_its_work_is_done_and_tells_so_before_and_after(worker: Make) -> None:
    one = worker(ROLE_PREFILL, 60.0)
    one.take()
    one.role.begin(ROLE_DECODE)
    one.role.begin(ROLE_DECODE)  # asked by a second conductor
    await one.news.wait()
    assert (one.told, one.role.role) == ([(True, ROLE_PREFILL)], ROLE_PREFILL)
    one.work.set()
    await one.finished()
    assert (one.told[-1], one.announced) == ((False, ROLE_DECODE), [ROLE_DECODE])


@pytest.mark.parametrize("grace_s", [0.1, 0.0])
@pytest.mark.parametrize(
    ("was", "asked", "becomes"),
    [(ROLE_PREFILL, ROLE_DECODE, ROLE_PREFILL), (ROLE_DECODE, ROLE_PREFILL, ROLE_PREFILL)],
)
async def test_prompts_that_do_not_end_keep_it_what_it_is_and_answers_do_not(
    was: Role.ValueType, asked: Role.ValueType, becomes: Role.ValueType, grace_s: float, worker: Make
) -> None:
    one = worker(was, grace_s)
    one.take()
    one.role.begin(asked)
    await one.finished()
    assert (one.role.role, len(one.jobs)) == (becomes, 1)
    assert one.announced == [becomes]  # whoever asked learns that it is over


@pytest.mark.parametrize("role", [ROLE_DECODE, ROLE_AGGREGATED])
async def test_nothing_begins_for_what_it_is_already_or_cannot_become(role: Role.ValueType, worker: Make) -> None:
    one = worker(ROLE_DECODE, 60.0)
    one.role.begin(role)
    assert (one.role.is_switching, one.told) == (False, [])


async def test_one_that_was_closed_changes_no_more(worker: Make) -> None:
    one = worker(ROLE_PREFILL, 60.0)
    one.take()
    one.role.begin(ROLE_DECODE)
    await one.news.wait()
    await one.role.close()
    one.work.set()
    one.role.begin(ROLE_DECODE)
    assert (one.role.is_switching, one.role.role) == (False, ROLE_PREFILL)
