"""Has a cluster follow its demand: asks the conductors what is needed, and scales as if somebody had asked for it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moonpool.autoscaling import Bounds, autoscaled
from moonpool.errors import MoonpoolError
from moonpool.plan import Group
from moonpool.questions import ask_conductor
from moonpool.status import desired_nodes
from rpc.control import ControlError

_EVERY_S = 2.0
_ANSWER_S = 5.0
_REST_S = 60.0  # after a change that failed

Scale = Callable[[Mapping[str, int]], Any]  # an awaitable of the change


async def autoscale(
    bounds: Mapping[str, Bounds],
    groups: Mapping[str, Group],
    *,
    conductors: Sequence[str],
    present: Callable[[], Mapping[str, int]],
    scale: Scale,
    say: Callable[[str], None],
) -> None:
    """Until cancelled. `scale(counts)` returns, or raises MoonpoolError, once the change is made."""
    while True:
        told = await asyncio.gather(*map(_desired, conductors))
        here = present()
        wanted = autoscaled(bounds, groups, here, [one for one in told if one is not None])
        changes = {name: count for name, count in wanted.items() if count != here.get(name, 0)}
        if changes:
            say("Autoscaling: " + ", ".join(f"{name} {here.get(name, 0)} to {n}" for name, n in changes.items()))
            try:
                await scale(changes)
            except MoonpoolError as error:
                say(f"Autoscaling failed, again in {_REST_S:g} s: {error}")
                await asyncio.sleep(_REST_S)
        await asyncio.sleep(_EVERY_S)


async def _desired(conductor: str) -> dict[str, dict[str, int]] | None:
    try:
        return desired_nodes(await ask_conductor(conductor, deadline_s=_ANSWER_S))
    except ControlError:
        return None
