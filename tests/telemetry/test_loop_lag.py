"""A loop that does not come round is noticed, and forgotten after a while."""

import asyncio
import time

from telemetry import LoopWatch


async def test_work_that_keeps_the_loop_is_seen_as_long_as_it_took() -> None:
    watch = LoopWatch()
    watch.start()
    await asyncio.sleep(0.05)
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    await asyncio.sleep(0.05)
    await watch.close()
    assert watch.lag_s >= 0.15
    assert watch.own_s >= 0.15
    assert watch.num_stalls >= 1


async def test_time_that_others_had_is_no_stall_of_its_own() -> None:
    watch = LoopWatch()
    watch.start()
    await asyncio.sleep(0.05)
    time.sleep(0.3)  # noqa: ASYNC251  # as if the machine had been busy with something else
    await asyncio.sleep(0.05)
    await watch.close()
    assert watch.lag_s >= 0.2
    assert watch.own_s < 0.2


def test_the_longest_lag_is_told_for_a_window_and_then_forgotten() -> None:
    now = [0.0]
    watch = LoopWatch(lambda: now[0])
    watch.note(0.2, 0.06)
    watch.note(0.01, 5.0)
    assert (watch.lag_s, watch.own_s, watch.num_stalls) == (0.2, 0.06, 1)
    now[0] = 31.0
    watch.note(0.03, 0.01)
    assert (watch.lag_s, watch.own_s) == (0.2, 0.06)
    now[0] = 62.0
    assert (watch.lag_s, watch.own_s) == (0.03, 0.01)
    now[0] = 200.0
    assert (watch.lag_s, watch.own_s, watch.num_stalls) == (0.0, 0.0, 1)
