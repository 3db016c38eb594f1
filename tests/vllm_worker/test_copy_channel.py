"""The socket between a worker and vLLM's ranks: real sockets and shared memory, ranks on threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from messenger import SharedMemory
from vllm_worker.block_layout import SlotLayout
from vllm_worker.copy_channel import CopyReporter, CopyReports

LAYOUT = SlotLayout(num_slots=4, num_layers=2, kv_heads=2, block_tokens=32, head_dim=8, value_nbytes=4)


class Worker:
    def __init__(self, path: Path, num_ranks: int) -> None:
        self.events: list[Any] = []
        self.came = asyncio.Event()
        self.path = path
        self.memory = SharedMemory.create(1 << 16, "slots", "transparent", returnable=True)
        self.reports = CopyReports(
            path,
            num_ranks=num_ranks,
            on_layer=lambda layer, spans: self.take("layer", layer, spans),
            on_end=lambda job, error: self.take("end", job, error),
        )
        self.reports.serve(LAYOUT, self.memory.nbytes, self.memory.writable_fd)

    def take(self, *event: Any) -> None:
        self.events.append(event)
        self.came.set()

    async def next_event(self) -> Any:
        async with asyncio.timeout(10):
            while not self.events:
                self.came.clear()
                await self.came.wait()
        return self.events.pop(0)

    async def rank(self, rank: int, num_ranks: int) -> CopyReporter:
        return await asyncio.to_thread(CopyReporter, str(self.path), rank, num_ranks)


@pytest.fixture
async def worker(short_path: Path) -> AsyncIterator[Worker]:
    made = Worker(short_path / "copies.sock", 2)
    yield made
    await made.reports.close()
    made.memory.close()
    assert not made.path.exists()


async def test_ranks_write_the_workers_slots_and_an_event_counts_once_all_have_reported_it(worker: Worker) -> None:
    one, two = await worker.rank(0, 2), await worker.rank(1, 2)
    assert one.layout == two.layout == LAYOUT
    one.slots[7] = 3
    two.slots[8] = 4
    assert worker.memory.array[7:9].tolist() == [3, 4]

    one.layer_saved(1, [(5, 0, 32), (6, 32, 40)])
    one.ended(5, "")
    one.ended(6, "no luck")
    two.ended(6, "")
    assert await worker.next_event() == ("end", 6, "no luck")
    assert worker.events == []
    two.layer_saved(1, [(5, 0, 32), (6, 32, 40)])
    assert await worker.next_event() == ("layer", 1, [(5, 0, 32), (6, 32, 40)])
    two.ended(5, "")
    assert await worker.next_event() == ("end", 5, "")
    one.close()
    two.close()


async def test_many_spans_and_long_errors_fit_into_packets(worker: Worker) -> None:
    ranks = [await worker.rank(0, 2), await worker.rank(1, 2)]
    spans = [(job, 0, 32) for job in range(2500)]
    found: list[Any] = []
    for each in ranks:
        await asyncio.to_thread(each.layer_saved, 0, spans)
        await asyncio.to_thread(each.ended, 1, "x" * 100_000)
    while len(found) < len(spans):
        kind, _, part = await worker.next_event()
        assert kind == "layer"
        found += part
    assert found == spans
    assert len((await worker.next_event())[2]) == 1000
    for each in ranks:
        each.close()


async def test_a_path_that_an_earlier_process_left_is_taken_over(short_path: Path) -> None:
    path = short_path / "copies.sock"
    first = Worker(path, 1)
    second = Worker(path, 1)
    rank = await second.rank(0, 1)
    rank.ended(3, "")
    assert await second.next_event() == ("end", 3, "")
    rank.close()
    await first.reports.close()
    await second.reports.close()
