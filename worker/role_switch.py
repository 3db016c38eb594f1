"""Role changes of a running worker: accept no new work, finish the work of the old role, then take the new role.

Model, memory, pool and streams stay as they are: every worker can serve all roles, and its role only determines how
conductors use it. A prefill node changes only when no prompt is left: prompts hold pages here while they wait for pages
of decode nodes, and two nodes that did both could wait for each other. Answers of a decode node do not wait for other
nodes, so long ones continue beside the prompts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from moonpool_proto.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL, Role
from worker.jobs import RequestJobs

log = logging.getLogger(__name__)
_CHANGING = frozenset({ROLE_PREFILL, ROLE_DECODE})
_CHECK_S = 0.05  # new jobs may arrive from conductors that have not received the report yet


class RoleSwitch:
    """Role of one worker. While `is_switching`, conductors place nothing new on it; lives on the event loop."""

    def __init__(
        self,
        role: Role.ValueType,
        jobs: RequestJobs,
        *,
        grace_s: float,
        news: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        """`grace_s` bounds the wait for the old role's work. `news()` reports to conductors that the switch has begun,
        `done()` the resulting role."""
        self.role = role
        self._jobs = jobs
        self._grace_s = grace_s
        self._news = news
        self._done = done
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_switching(self) -> bool:
        """True while a switch is in progress."""
        return self._task is not None

    def begin(self, role: Role.ValueType) -> None:
        """Change to `role`, unless a switch is in progress or the change is impossible."""
        if self._closed or self._task is not None or role == self.role:
            return
        if not {role, self.role} <= _CHANGING:
            log.warning(
                "cannot switch to %s: only prefill and decode nodes switch, and this is %s",
                _name(role),
                _name(self.role),
            )
            return
        self._task = asyncio.create_task(self._change(role), name="role switch")

    async def close(self) -> None:
        """Cancel a switch in progress and ignore later commands."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _change(self, role: Role.ValueType) -> None:
        log.info("switching from %s to %s: accepting no new work", _name(self.role), _name(role))
        try:
            self._news()
            loop = asyncio.get_running_loop()
            until_s = loop.time() + self._grace_s
            while len(self._jobs) and loop.time() < until_s:
                await self._jobs.wait_idle(min(_CHECK_S, until_s - loop.time()))
            if len(self._jobs) and self.role == ROLE_PREFILL:
                log.warning(
                    "stays %s: %d requests have not ended after %g s", _name(self.role), len(self._jobs), self._grace_s
                )
                return
            self.role = role
        finally:
            self._task = None
            self._done()  # also after a failed switch, so that conductors stop waiting for it
        log.info("switched to %s; %d requests continue", _name(role), len(self._jobs))


def _name(role: Role.ValueType) -> str:
    return Role.Name(role).removeprefix("ROLE_").lower()
