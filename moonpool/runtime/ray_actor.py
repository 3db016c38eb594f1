"""A role under Ray: the actor is a thin wrapper around a child process, to whose life its own is tied.

The actor's death, however it comes, ends the role: the kernel kills it. The role's end leaves the actor idle, until it
is told to start it again. What the role says is kept until it was asked for. Imports no ray: the runtime makes it an
actor.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

from moonpool.child import Child, ChildPlan
from moonpool.http_port import claim_port
from moonpool.run_dir import make_run_dir
from moonpool.runtime.processes import child_plan

_START_S = 60.0

Event = tuple[str, Any]  # ("line", text), ("ready", announcement), ("drained", None), ("end", exit code)


class RoleActor:
    """Runs one role on its host; its methods may be called at a time.

    None of them is a coroutine: that would make it an asyncio actor, in which one call that waits holds up all others.
    """

    def __init__(self) -> None:
        # Ray's worker processes have uvloop's policy, whose loops make no process groups. The loop's thread lives as
        # long as the process: the role is tied to the thread that began it.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="role", daemon=True).start()
        self._life = _Life()

    def free_port(self, host: str) -> int:
        """A TCP port that nobody listens at on this host now."""
        return claim_port(host, 0)

    def start(self, node_id: str, role: str, settings: dict[str, Any], env: dict[str, str], folder: str) -> int:
        """Begin one life of the role; its pid. `folder`: this cluster's run directory on this host."""
        own = make_run_dir(Path(folder))
        plan = child_plan(node_id, role, {**settings, "socket_dir": str(own)}, env, own)
        former, self._life = self._life, _Life()
        work = _replace(former, self._life, plan)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    def follow(self, after: int, wait_s: float) -> list[Event]:
        """This life's events from number `after` on; waits up to `wait_s` for the first."""
        return self._life.follow(after, wait_s)

    def signal(self, *, kill: bool) -> None:
        """SIGTERM, or SIGKILL for all that the role started; without effect when it has ended."""
        child = self._life.child
        if child is not None:
            self._loop.call_soon_threadsafe(child.kill if kill else child.terminate)


class _Life:
    """One process of the role, and what it has said. Told on the loop, asked from any thread."""

    def __init__(self) -> None:
        self.child: Child | None = None
        self._news = threading.Condition()
        self._events: list[Event] = []
        self._num_heard = 0  # events before those that are kept

    def tell(self, kind: str, what: Any) -> None:
        with self._news:
            self._events.append((kind, what))
            self._news.notify_all()

    def follow(self, after: int, wait_s: float) -> list[Event]:
        with self._news:
            # Whoever asks for what comes after them has them: a role may talk for months.
            del self._events[: max(0, after - self._num_heard)]
            self._num_heard = max(after, self._num_heard)
            self._news.wait_for(lambda: bool(self._events), wait_s)
            return list(self._events)

    def over(self, ended: "asyncio.Task[int]") -> None:
        if self.child is not None and self.child.drained:
            self.tell("drained", None)
        self.tell("end", ended.result() if ended.exception() is None else 1)


async def _replace(former: _Life, life: _Life, plan: ChildPlan) -> int:
    """Begin `life`; a `former` one that a broken call has left behind is ended first. The pid."""
    if former.child is not None and not former.child.ended.done():
        former.child.kill()
        await former.child.ended
    life.child = await Child.start(
        plan,
        None,
        on_ready=lambda announcement: life.tell("ready", announcement),
        on_line=lambda line: life.tell("line", line),
    )
    life.child.ended.add_done_callback(life.over)
    return life.child.pid
