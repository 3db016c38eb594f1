"""Detection of processes that hang instead of dying: they are killed, and thereby restarted.

Conductors report which nodes are silent; conductors and the frontend are also called directly.
"""

import asyncio
import time
from collections.abc import Mapping, Set

from moonpool.cluster_view.collector import ask_conductor
from moonpool.plan import RolePlan
from moonpool.supervision.http_port import is_alive
from moonpool.supervision.supervisor import NodeState, Supervisor
from rpc.control import ControlError


class HangWatch:
    """Measures each node's silence; a timeout of 0 disables it. Pure: time is an argument.

    Silence counts only between regular observations: after a pause longer than `longest_look_s`, this process or the
    whole machine was suspended.
    """

    def __init__(self, timeout_s: float, longest_look_s: float) -> None:
        self._timeout_s = timeout_s
        self._longest_look_s = longest_look_s
        self._silent_since_s: dict[str, float] = {}
        self._looked_s: float | None = None

    def look(self, now_s: float, silent: Set[str]) -> dict[str, float]:
        """Record the silent nodes at `now_s`, and return seconds of silence of those that hang, each once."""
        if self._looked_s is not None and now_s - self._looked_s > self._longest_look_s:
            self._silent_since_s.clear()
        self._looked_s = now_s
        self._silent_since_s = {node_id: self._silent_since_s.get(node_id, now_s) for node_id in sorted(silent)}
        if not self._timeout_s:
            return {}
        hung = {
            node_id: now_s - since_s
            for node_id, since_s in self._silent_since_s.items()
            if now_s - since_s >= self._timeout_s
        }
        for node_id in hung:
            del self._silent_since_s[node_id]
        return hung


_EVERY_S = 1.0
_ANSWER_S = 5.0
_LONGEST_LOOK_S = 3 * (_EVERY_S + _ANSWER_S)


async def guard(supervisor: Supervisor[RolePlan], *, conductors: Mapping[str, str], url: str, timeout_s: float) -> None:
    """Kill every process that is silent for `timeout_s`, until cancelled; a timeout of 0 disables it.

    `conductors`: targets by node id; `url`: the frontend's, "" if it is not ours.
    """
    watch = HangWatch(timeout_s, _LONGEST_LOOK_S)
    while True:
        await asyncio.sleep(_EVERY_S)
        silent = await _silent(supervisor.states(), conductors, url)
        serving = {state.node_id for state in supervisor.states() if _serves(state)}
        for node_id, seconds in watch.look(time.monotonic(), silent & serving).items():
            supervisor.restart(node_id, f"it hung: silent for {seconds:.0f} s")


def _serves(state: NodeState) -> bool:
    """Return True for a node that is ready and stays; starting and leaving nodes have their own time limits."""
    return state.announcement is not None and not state.leaving


async def _silent(states: list[NodeState], conductors: Mapping[str, str], url: str) -> set[str]:
    workers = {state.node_id for state in states if _serves(state) and state.role not in ("conductor", "frontend")}
    standing = {state.node_id: _stands_by(state) for state in states if state.role == "frontend" and _serves(state)}
    serving = {node_id for node_id, is_standby in standing.items() if not is_standby} or standing.keys()
    answers, frontend_lives = await asyncio.gather(
        asyncio.gather(*map(_reporting, conductors.values())), _frontend_lives(url)
    )
    joined = dict(zip(conductors, answers, strict=True))
    silent = {name for name, nodes in joined.items() if nodes is None} | (set() if frontend_lives else serving)
    if len(silent & joined.keys()) == len(joined):  # without a conductor, the state of the others is unknown
        return silent
    return silent | workers.difference(*(nodes for nodes in joined.values() if nodes is not None))


def _stands_by(state: NodeState) -> bool:
    """Return True for a frontend that waits to take the place of the one that serves."""
    return state.role == "frontend" and (state.announcement or {}).get("target") == ""


async def _frontend_lives(url: str) -> bool:
    return not url or await is_alive(url, _ANSWER_S)


async def _reporting(conductor: str) -> set[str] | None:
    """Return the nodes that report, and all that drain; None if the conductor does not answer."""
    try:
        cluster = await ask_conductor(conductor, deadline_s=_ANSWER_S)
    except ControlError:
        return None
    return {node.node.node_id for node in cluster.nodes if not node.suspect or node.report.draining}
