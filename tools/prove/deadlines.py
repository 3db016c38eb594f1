"""Invariant of calls over the control plane: none lasts longer than its deadline."""

from __future__ import annotations

import sys
from collections.abc import Awaitable
from typing import Any

from rpc import control
from rpc.errors import ControlError
from tools.prove.instances import running_process
from tools.prove.world.scheduler import SECOND_NS, world

SLACK_S = 5.0  # a slow event loop runs other handles first


def watch() -> None:
    """Watch `rpc.control.call` in all modules that have imported it. Once per process."""
    call = control.call

    async def watched(rpc: Awaitable[Any], *, what: str, target: str, deadline_s: float | None) -> Any:
        process, began_ns = running_process(), world().now_ns
        num_pauses = process.num_pauses

        def check() -> None:
            lasted_s = (world().now_ns - began_ns) / SECOND_NS
            if deadline_s is not None and lasted_s > deadline_s + SLACK_S and process.num_pauses == num_pauses:
                world().problem(f"late call: {what} of {process.name} lasts {lasted_s:.1f} s, of {deadline_s:.1f} s")

        try:
            answer = await call(rpc, what=what, target=target, deadline_s=deadline_s)
        except ControlError:
            check()
            raise
        check()
        return answer

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("call") is call:
            vars(module)["call"] = watched
