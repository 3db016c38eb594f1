"""A loop that does not come round is noticed, and forgotten after a while."""

import asyncio
import time

from telemetry import LoopWatch


async def test_work_that_keeps_the_loop_is_seen_as_long_as_it_took() -> None:
    watch = LoopWatch()
    watch.start()
    await asyncio.sleep(0.05)
    time.sleep(0.2)  # noqa: ASYNC251  # what is watched for
    await asyncio.sleep(0.05)
    await watch.close()
    assert watch.longest_s >= 0.15
    assert watch.num_stalls >= 1


def test_the_longest_lag_is_told_for_a_window_and_then_forgotten() -> None:
    now = [0.0]
    watch = LoopWatch(lambda: now[0])
    watch.note(0.2)
    watch.note(0.01)
    assert (watch.longest_s, watch.num_stalls) == (0.2, 1)
    now[0] = 31.0
    watch.note(0.03)
    assert watch.longest_s == 0.2
    now[0] = 62.0
    assert watch.longest_s == 0.03
    now[0] = 200.0
    assert (watch.longest_s, watch.num_stalls) == (0.0, 1)
