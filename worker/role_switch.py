"""A worker changes its role: takes no new work, finishes what the old role asked for, then is the other one. Warm.

Model, memory, pool and streams stay as they are: a worker can do all that workers do, and its role says no more than
what conductors ask of it. A prefill node changes only once no prompt is left: those wait for pages of decode nodes
while they hold pages here, and two nodes that did both could wait for each other. A decode node's answers wait for
nobody: those that are long go on here beside the prompts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from moonpool_proto.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL, Role
from worker.jobs import RequestJobs

log = logging.getLogger(__name__)
_CHANGING = frozenset({ROLE_PREFILL, ROLE_DECODE})
_CHECK_S = 0.05  # jobs may still come in, of conductors that have not heard yet


class RoleSwitch:
    """One worker's role. While `is_switching`, conductors give it nothing new; lives on the event loop."""

    def __init__(
        self,
        role: Role.ValueType,
        jobs: RequestJobs,
        *,
        grace_s: float,
        news: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        """`grace_s`: for what the old role asked for. `news()`: tell conductors that it switches; `done()`: what it
        is from now on."""
        self.role = role
        self._jobs = jobs
        self._grace_s = grace_s
        self._news = news
        self._done = done
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_switching(self) -> bool:
        return self._task is not None

    def begin(self, role: Role.ValueType) -> None:
        """Change to `role`, unless that is under way or cannot be."""
        if self._closed or self._task is not None or role == self.role:
            return
        if not {role, self.role} <= _CHANGING:
            log.warning("asked to be %s, but a node that is %s stays so", _name(role), _name(self.role))
            return
        self._task = asyncio.create_task(self._change(role), name="role switch")

    async def close(self) -> None:
        """Stay what it is: commands may still come."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _change(self, role: Role.ValueType) -> None:
        log.info("changing from %s to %s: no new work is taken", _name(self.role), _name(role))
        try:
            self._news()
            loop = asyncio.get_running_loop()
            until_s = loop.time() + self._grace_s
            while len(self._jobs) and loop.time() < until_s:
                await self._jobs.wait_idle(min(_CHECK_S, until_s - loop.time()))
            if len(self._jobs) and self.role == ROLE_PREFILL:
                log.warning(
                    "stays %s: %d requests are not over after %g s", _name(self.role), len(self._jobs), self._grace_s
                )
                return
            self.role = role
        finally:
            self._task = None
            self._done()  # also of a role that it keeps: whoever asked must not wait for another one
        log.info("is %s from now on; %d requests go on", _name(role), len(self._jobs))


def _name(role: Role.ValueType) -> str:
    return Role.Name(role).removeprefix("ROLE_").lower()
