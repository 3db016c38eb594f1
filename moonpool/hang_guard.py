"""Has processes that hang, instead of dying, started again: asks the conductor who is silent, and the two front ends of
the cluster, conductor and frontend, for a sign of life.
"""

import asyncio
import time

from messenger.control import ControlError
from moonpool.hang_watch import HangWatch
from moonpool.http_port import is_alive
from moonpool.kept_node import NodeState
from moonpool.plan import RolePlan
from moonpool.questions import ask_conductor
from moonpool.supervisor import Supervisor

_EVERY_S = 1.0
_ANSWER_S = 5.0
_LONGEST_LOOK_S = 3 * (_EVERY_S + _ANSWER_S)


async def guard(supervisor: Supervisor[RolePlan], *, conductor: str, url: str, timeout_s: float) -> None:
    """Until cancelled. A process that was silent for `timeout_s` (0: however long) is killed, and so comes back."""
    watch = HangWatch(timeout_s, _LONGEST_LOOK_S)
    while True:
        await asyncio.sleep(_EVERY_S)
        silent = await _silent(supervisor.states(), conductor, url)
        serving = {state.node_id for state in supervisor.states() if _serves(state)}
        for node_id, seconds in watch.look(time.monotonic(), silent & serving).items():
            supervisor.restart(node_id, f"it hung: silent for {seconds:.0f} s")


def _serves(state: NodeState) -> bool:
    """Ready, and wanted: one that starts or leaves has its own time limits."""
    return state.announcement is not None and not state.leaving


async def _silent(states: list[NodeState], conductor: str, url: str) -> set[str]:
    workers = {state.node_id for state in states if _serves(state) and state.role not in ("conductor", "frontend")}
    joined, frontend_lives = await asyncio.gather(_heard(conductor), is_alive(url, _ANSWER_S))
    silent = set() if frontend_lives else {"frontend"}
    if joined is None:  # what became of the others, nobody knows
        return silent | {"conductor"}
    return silent | (workers - joined)


async def _heard(conductor: str) -> set[str] | None:
    """The nodes that report, and those that drain, however quietly; None when the conductor does not answer."""
    try:
        cluster = await ask_conductor(conductor, deadline_s=_ANSWER_S)
    except ControlError:
        return None
    return {node.node.node_id for node in cluster.nodes if not node.suspect or node.report.draining}
