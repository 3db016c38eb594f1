"""Autoscaling of workers within bounds, by the number of nodes that the conductors report as needed."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.cluster_view.collector import ask_conductor
from moonpool.cluster_view.reply import desired_nodes
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.plan import WorkerGroup
from moonpool.scaling.counts import MAX_WORKERS
from rpc.control import ControlError

_FORM = re.compile(r"([^=]+)=(\d{1,4}):(\d{1,4})")
Desired = Mapping[str, Mapping[str, int]]  # by model and role


@dataclass(frozen=True)
class Bounds:
    """Minimum and maximum number of a group's workers."""

    least: int
    most: int


def parse_bounds(given: Sequence[str], groups: Mapping[str, WorkerGroup]) -> dict[str, Bounds]:
    """Parse texts such as `prefill=1:4` to bounds by group. Raises ConfigError."""
    found: dict[str, Bounds] = {}
    for text in given:
        form = _FORM.fullmatch(text)
        if form is None:
            raise ConfigError(f"--autoscale must be ROLE=MIN:MAX, for example decode=1:4, got {text!r}")
        name, least, most = form[1], int(form[2]), int(form[3])
        if name not in groups:
            raise ConfigError(f"--autoscale must have a role of {', '.join(groups)}, got {text!r}")
        if name in found:
            raise ConfigError(f"--autoscale names {name} twice")
        if not 1 <= least <= most <= MAX_WORKERS:
            raise ConfigError(f"--autoscale must have 1 <= MIN <= MAX <= {MAX_WORKERS}, got {text!r}")
        found[name] = Bounds(least, most)
    return found


def autoscaled(
    bounds: Mapping[str, Bounds],
    groups: Mapping[str, WorkerGroup],
    present: Mapping[str, int],
    reports: Sequence[Desired],
) -> dict[str, int]:
    """Return the number of workers that each bounded group should have.

    `reports`: the need that each answering conductor reports. Each sees a part of the demand, so the largest counts;
    without a report the present number stays.
    """
    wanted = {}
    for name, own in bounds.items():
        group = groups[name]
        needs = [desired.get(group.model.name, {}).get(group.role) for desired in reports]
        need = max((count for count in needs if count is not None), default=present.get(name, 0))
        wanted[name] = min(own.most, max(own.least, need))
    return wanted


EVERY_S = 2.0  # between two looks at the demand
_ANSWER_S = 5.0
_REST_S = 60.0  # after a failed change

Scale = Callable[[Mapping[str, int]], Any]  # returns an awaitable of the change


async def autoscale(
    bounds: Mapping[str, Bounds],
    groups: Mapping[str, WorkerGroup],
    *,
    conductors: Sequence[str],
    present: Callable[[], Mapping[str, int]],
    scale: Scale,
    say: Callable[[str], None],
) -> None:
    """Follow the demand until cancelled. `scale(counts)` returns, or raises MoonpoolError, when the change is done."""
    while True:
        reports = await asyncio.gather(*map(_desired, conductors))
        here = present()
        wanted = autoscaled(bounds, groups, here, [one for one in reports if one is not None])
        changes = {name: count for name, count in wanted.items() if count != here.get(name, 0)}
        if changes:
            say("Autoscaling: " + ", ".join(f"{name} {here.get(name, 0)} to {n}" for name, n in changes.items()))
            try:
                await scale(changes)
            except MoonpoolError as error:
                say(f"Autoscaling failed, again in {_REST_S:g} s: {error}")
                await asyncio.sleep(_REST_S)
        await asyncio.sleep(EVERY_S)


async def _desired(conductor: str) -> dict[str, dict[str, int]] | None:
    try:
        return desired_nodes(await ask_conductor(conductor, deadline_s=_ANSWER_S))
    except ControlError:
        return None
