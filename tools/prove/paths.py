"""Options of a schedule that make it enter further paths of the roles' code: drawn from the seed, few at a time. Pure.

The options are drawn apart from the workload and the faults, which are those of the plain schedule unless an option
changes them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tools.prove.schedule import BLOCK_TOKENS, END_ID, RequestPlan, Schedule

# Layers, each with the number of tokens that it sees (0: all), and the slots of windowed groups (0: as many as blocks).
_WINDOWS = (
    ((0, 12, 12), 0),
    ((0, 8, 24), 26),
    ((16, 16, 16), 24),
    ((9, 0, 9), 0),
)
_GRAMMARS: tuple[Mapping[str, Any], ...] = (
    {"choice": ["the quick brown fox jumps over it", "the quick brown dog sleeps under it", "the end"]},
    {"regex": "(yes|no|perhaps)( [a-z]{2,8}){2,6}[.!]"},
    {"regex": "[0-9]{3}-[0-9]{4}-[a-f]{8,16}"},
    {
        "json": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
            "required": ["name", "size"],
            "additionalProperties": False,
        }
    },
)
_STOPS = ("er", "on", "ing", " the", "a", "\n")
URGENT, BATCH = "urgent", "batch"
_CLASS_SLOTS = 20  # of each worker: two answers of class BATCH do not fit with an urgent one
_OVERRUN_SLOTS = 16


@dataclass(frozen=True)
class Paths:
    """Options of one schedule. `windows`: of the model's layers; `overrun`: the conductor's `overrun_probability`."""

    conductors: int = 1
    frontends: int = 1
    windows: tuple[int, ...] = (0, 0, 0)
    window_slots: int = 0
    has_classes: bool = False
    overrun: float = 0.0
    has_grammars: bool = False
    has_stops: bool = False
    has_endless: bool = False


def draw_paths(seed: int) -> Paths:
    """Draw the options of a seed."""
    rng = random.Random(f"paths {seed}")
    paths = Paths(conductors=rng.choices((1, 2), (8, 1))[0], frontends=rng.choices((1, 2), (8, 1))[0])
    if rng.random() < 0.12:
        windows, slots = rng.choice(_WINDOWS)
        paths = replace(paths, windows=windows, window_slots=slots)
    if rng.random() < 0.16:
        paths = replace(paths, has_classes=True, overrun=rng.choice((0.0, 0.5)))
    if rng.random() < 0.12:
        paths = replace(paths, has_grammars=True)
    return replace(paths, has_stops=rng.random() < 0.1, has_endless=rng.random() < 0.1)


def with_paths(schedule: Schedule, paths: Paths) -> Schedule:
    """Return the schedule with a workload that enters the paths."""
    rng = random.Random(f"workload of paths {schedule.seed}")
    requests = schedule.requests
    if paths.overrun:  # the first answers teach the conductor how long answers are
        requests += tuple(_second(rng, plan, len(requests) + i) for i, plan in enumerate(requests))
    if paths.has_classes:
        requests = tuple(_in_class(rng, paths, plan) for plan in requests)
        step_s = rng.choice((10e-3, 40e-3))  # answers take long enough that others wait for their slots
        slots = _OVERRUN_SLOTS if paths.overrun else _CLASS_SLOTS
        pace = replace(schedule.pace, capacity_tokens=slots * BLOCK_TOKENS, step_s=step_s)
        schedule = replace(schedule, pace=pace)
    if paths.has_grammars:
        requests = tuple(_with_grammar(rng, plan) if rng.random() < 0.6 else plan for plan in requests)
        schedule = replace(schedule, at_rest=tuple({"structured_outputs": each} for each in _GRAMMARS))
    if paths.has_stops:
        requests = tuple(_with_stops(rng, plan) if rng.random() < 0.6 else plan for plan in requests)
    if paths.has_endless:
        chosen = rng.sample(range(len(requests)), 3)
        requests = tuple(_endless(rng, paths, plan) if i in chosen else plan for i, plan in enumerate(requests))
    return replace(schedule, requests=requests)


def _in_class(rng: random.Random, paths: Paths, plan: RequestPlan) -> RequestPlan:
    """Return the request in a class: long and early, so that it fills the slots, or urgent, short and later."""
    most = rng.randrange(16, 40) if paths.overrun else rng.randrange(24, 72)
    body = {**plan.body, "n": 1, "prompt": plan.body["prompt"][:most]}
    if rng.random() < 0.4:
        body |= {"slo_class": URGENT, "max_tokens": rng.choice((8, 16, 24))}
        at_s = 0.2 + 0.3 * plan.at_s
    else:
        body |= {"slo_class": BATCH, "max_tokens": rng.choice((40, 60, 80))}
        at_s = 0.15 * plan.at_s
    if paths.overrun:  # most answers end early, so that fewer slots than for all tokens are reserved
        body |= {"ignore_eos": False, "temperature": 0.0, "logit_bias": {str(END_ID): 0.6}}
    if body.get("min_tokens", 0) > body["max_tokens"]:
        del body["min_tokens"]
    follows = plan.follows if rng.random() < 0.3 else ""
    return replace(plan, body=body, at_s=at_s, follows=follows)


def _second(rng: random.Random, plan: RequestPlan, number: int) -> RequestPlan:
    """Return a later request with the second half of the same prompt."""
    prompt = plan.body["prompt"]
    body = {**plan.body, "prompt": [*prompt[len(prompt) // 2 :], rng.randrange(3, 2048)]}
    return replace(plan, name=f"r{number}", at_s=3.0 + 0.25 * plan.at_s, body=body, follows="", leaves_after_s=-1.0)


def _with_grammar(rng: random.Random, plan: RequestPlan) -> RequestPlan:
    body = {name: value for name, value in plan.body.items() if name not in ("ignore_eos", "min_tokens", "logit_bias")}
    body |= {"structured_outputs": rng.choice(_GRAMMARS), "max_tokens": rng.choice((12, 24, 40))}
    return replace(plan, body=body)


def _with_stops(rng: random.Random, plan: RequestPlan) -> RequestPlan:
    body = {**plan.body, "stop": rng.sample(_STOPS, rng.randrange(1, 3)), "max_tokens": rng.choice((12, 24, 40))}
    return replace(plan, body=body)


def _endless(rng: random.Random, paths: Paths, plan: RequestPlan) -> RequestPlan:
    """Return an endless request with a rolling window, whose client leaves after some tokens."""
    left_out = ("max_tokens", "min_tokens", "n", "structured_outputs", "logit_bias")
    body = {name: value for name, value in plan.body.items() if name not in left_out}
    has_sinks, least = 0 in paths.windows, BLOCK_TOKENS + max(paths.windows)
    window = {"sinks": rng.choice((0, 1, 4)) if has_sinks else 0, "window": least + rng.choice((8, 16, 31))}
    body |= {"stream": True, "endless": window, "ignore_eos": rng.random() < 0.9}
    return replace(plan, body=body, leaves_after=rng.randrange(10, 100))
