"""Durations of vLLM's steps, of which the next may be scheduled before the last has ended."""

from __future__ import annotations

from vllm_worker.step_work import StepClock


def test_a_step_takes_the_time_since_it_began_or_since_the_one_before_it_ended() -> None:
    clock = StepClock()
    first, second = clock.begin(1.0), clock.begin(2.0)
    first.prompts.append((7, 100))
    second.batch, second.context_tokens = 3, 600
    assert clock.end(4.0) is first
    assert clock.end(5.0) is second
    assert first.to_fields() == [3.0, [(7, 100)], 0, 0]
    assert second.to_fields() == [1.0, [], 3, 600]
    assert clock.end(6.0) is None
    after_a_pause = clock.begin(20.0)
    assert clock.end(20.5) is after_a_pause
    assert after_a_pause.seconds == 0.5
