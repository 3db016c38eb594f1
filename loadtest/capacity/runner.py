"""Capacity search against a live server: each step is a separate benchmark that runs to its last answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from loadtest.bench.config import BenchConfig
from loadtest.bench.runner import Target, find_target, load_tokenizer, measure, plan, prepare
from loadtest.capacity.search import CapacityFinding, CapacityObjective, CapacitySearch, CapacityStep, judge_step
from loadtest.http import allow_many_connections
from loadtest.progress import ProgressDisplay, interrupts
from loadtest.tokens import ModelTokens


@dataclass(frozen=True)
class CapacityResult:
    """Result of a capacity search, with all steps."""

    model: str
    finding: CapacityFinding
    steps: Sequence[CapacityStep]
    objective: CapacityObjective
    interrupted: bool
    notices: Sequence[str]

    @property
    def invalid_reasons(self) -> list[str]:
        """Reasons why the result is invalid; empty for a valid one."""
        if self.finding.sender_limited:
            return ["the sender was the bottleneck, not the server: higher rates could not be sent (--senders)"]
        return []

    def as_json(self) -> dict[str, Any]:
        """Return the result for capacity.json and the last line of output."""
        return {
            "valid": not self.invalid_reasons,
            "invalid_reasons": self.invalid_reasons,
            "interrupted": self.interrupted,
            "model_id": self.model,
            "capacity_rps": self.finding.rate,
            "bounded": self.finding.bounded,
            "objectives_ms": dict(self.objective.bounds_ms),
            "percentile": self.objective.percentile,
            "max_lost_share": self.objective.max_lost_share,
            "step_s": self.objective.step_s,
            "steps": [step.as_json() for step in self.steps],
        }


def find_capacity(
    config: BenchConfig,
    objective: CapacityObjective,
    search: CapacitySearch,
    tokenizer: Path,
    *,
    on_step: Callable[[int, CapacityStep], None],
    console: Console | None = None,
) -> CapacityResult:
    """Run the search and return its result; after Ctrl-C, with the steps so far. Raises ReplayError.

    `tokenizer`: as for `run_bench`. `on_step(number, step)` is called after each step. Generated prompts differ between
    steps, so that no step reuses KV of another.
    """
    allow_many_connections()
    tokens = load_tokenizer(tokenizer)
    with ProgressDisplay(console) as display, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(config, objective, search, tokens, display, on_step))


async def _run(
    config: BenchConfig,
    objective: CapacityObjective,
    search: CapacitySearch,
    tokens: ModelTokens,
    display: ProgressDisplay,
    on_step: Callable[[int, CapacityStep], None],
) -> CapacityResult:
    stop, steps = asyncio.Event(), list[CapacityStep]()
    with interrupts(stop):
        target = await find_target(config, tokens)
        await prepare(config, target, plan(replace(config, num_prompts=1), target), stop)
        while not stop.is_set() and (rate := search.next_rate()) is not None:
            step = await _step(config, objective, target, rate, len(steps), stop, display)
            if stop.is_set():
                break
            steps.append(step)
            on_step(len(steps), step)
            search.record(step.verdict)
        search.validate()
    return CapacityResult(target.server.model, search.finding, steps, objective, stop.is_set(), target.notices)


async def _step(
    config: BenchConfig,
    objective: CapacityObjective,
    target: Target,
    rate: float,
    number: int,
    stop: asyncio.Event,
    display: ProgressDisplay,
) -> CapacityStep:
    step_config = replace(
        config, request_rate=rate, num_prompts=objective.requests_at(rate), seed=config.seed + 1 + number
    )
    requests = plan(step_config, target)
    result = await measure(step_config, target, requests, stop, display, f"step {number + 1}, {rate:.3g}/s")
    return judge_step(rate, result.records, objective, result.invalid_reasons)
