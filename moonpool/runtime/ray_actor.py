"""Ray actor that runs one role as a child process. Imports no ray: the runtime makes the class an actor.

The actor's death ends the role by the parent-death signal. After the role's end the actor is idle until a call starts
the role again. The role's output is kept until it is fetched. The caller may disappear, and another one may adopt the
running role. An actor without a caller drains its role after a while and leaves Ray (`watch`).

Threads: Ray calls the actor's methods on several threads; the loop's thread owns the child process; a watching thread
ends an orphan. `_starting` serialises starts; `_Life._new_events` guards a life's events.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moonpool.runtime.processes import child_plan
from moonpool.supervision.child import Child, ChildPlan
from moonpool.supervision.http_port import claim_port
from moonpool.supervision.run_dir import make_run_dir

_LOOK_S = 0.5
_KILLED_S = 30.0


@dataclass(frozen=True)
class Orphanhood:
    """Rule for an actor without a caller: after `after_s` of silence its role has `drain_s` to end.

    Then the actor of that name and its placement group ("" if it has none) are released.
    """

    after_s: float
    drain_s: float
    actor: str
    group: str


class Orphan(Protocol):
    """The watched actor."""

    def silent_s(self) -> float:
        """Return seconds since the last call."""
        ...

    def runs(self) -> bool:
        """Return True if its role runs."""
        ...

    def signal(self, *, kill: bool) -> None: ...


def watch(orphan: Orphan, rule: Orphanhood, leave: Callable[[Orphanhood], None] | None = None) -> threading.Thread:
    """Watch the actor on a new thread until it has left Ray."""
    thread = threading.Thread(target=_watch, args=(orphan, rule, leave or _leave), name="orphan", daemon=True)
    thread.start()
    return thread


def _watch(orphan: Orphan, rule: Orphanhood, leave: Callable[[Orphanhood], None]) -> None:
    while True:
        time.sleep(min(_LOOK_S, rule.after_s))
        if orphan.silent_s() < rule.after_s:
            continue
        print(f"No caller for {orphan.silent_s():.0f} s: the role is drained", flush=True)
        for kill, within_s in ((False, rule.drain_s), (True, _KILLED_S)):
            if orphan.runs() and orphan.silent_s() >= rule.after_s:
                orphan.signal(kill=kill)
                _wait_ended(orphan, rule, within_s)
        if orphan.silent_s() >= rule.after_s and _left(rule, leave):
            return


def _wait_ended(orphan: Orphan, rule: Orphanhood, within_s: float) -> None:
    """Wait until the role has ended, a caller has returned and will restart it, or `within_s` has passed."""
    until_s = time.monotonic() + within_s
    while orphan.runs() and orphan.silent_s() >= rule.after_s and time.monotonic() < until_s:
        time.sleep(min(0.1, rule.after_s / 4))


def _left(rule: Orphanhood, leave: Callable[[Orphanhood], None]) -> bool:
    try:
        leave(rule)
    except Exception as error:  # an actor that stayed would occupy its host forever
        print(f"Ray did not release the actor, trying again: {error}", flush=True)
        return False
    return True


def _leave(rule: Orphanhood) -> None:
    import ray
    from ray.util import get_placement_group, remove_placement_group

    try:
        if rule.group:
            remove_placement_group(get_placement_group(rule.group))
    except ValueError:
        pass  # it no longer exists
    ray.kill(ray.get_actor(rule.actor), no_restart=True)


_START_S = 60.0
_MOST_EVENTS = 20_000  # kept without a caller; the oldest are dropped first
LOST_EXIT_CODE = -int(signal.SIGKILL)  # of a life whose end was not observed

Event = tuple[str, Any]  # ("line", text), ("ready", announcement), ("drained", None), ("end", exit code)


@dataclass(frozen=True)
class ActorPlacement:
    """Placement of a role: Ray's id of its host, and this cluster's run directory there.

    `prints`: the actor prints the role's output, which Ray logs.
    """

    host: str
    folder: str
    prints: bool


@dataclass(frozen=True)
class StartedLife:
    """A running life of the role: its number, process id, first kept event, and announcement if it is ready."""

    number: int
    pid: int
    after: int
    ready: dict[str, Any] | None


class RoleActor:
    """Runs one role on its host; its methods may be called concurrently.

    None of them is a coroutine: in an asyncio actor one waiting call would block all others.
    """

    def __init__(self, orphanhood: Orphanhood | None = None) -> None:
        """`orphanhood`: rule for the time without a caller; None to wait forever."""
        # Ray's worker processes use uvloop, which cannot create process groups. The loop's thread lives as long as the
        # process, because the parent-death signal is bound to the thread that started the role.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="role", daemon=True).start()
        self._life = _Life()
        self._lives = 0
        self._start: tuple[Any, ...] = ()  # arguments of the present life
        self._host = ""
        self._heard_s = time.monotonic()
        self._starting = threading.Lock()
        if orphanhood is not None:
            watch(self, orphanhood)

    def free_port(self, host: str) -> int:
        """Return a TCP port that is free on this host now."""
        return claim_port(host, 0)

    def host(self) -> str:
        """Return Ray's id of the host on which the role was started; "" if it never was."""
        self._heard_s = time.monotonic()
        return self._host

    def listens(self) -> str:
        """Return the gRPC address on which the role listens; "" if it never started."""
        return str(self._start[0][2].get("listen", "")) if self._start else ""

    def silent_s(self) -> float:
        """Return seconds since the last call."""
        return time.monotonic() - self._heard_s

    def runs(self) -> bool:
        """Return True if the role runs."""
        return self._life.runs

    def start(
        self, plan: tuple[str, str, dict[str, Any], dict[str, str]], place: "ActorPlacement", *, adopt: bool
    ) -> "StartedLife":
        """Start a life of the role: `plan` is node id, role, settings and environment.

        With `adopt`, a running life with the same plan and place continues instead.
        """
        with self._starting:
            self._heard_s = time.monotonic()
            if not (adopt and self._life.runs and _same(self._start, (plan, place))):
                self._begin(plan, place)
            return self._life.started(self._lives)

    def _begin(self, plan: tuple[str, str, dict[str, Any], dict[str, str]], place: "ActorPlacement") -> None:
        node_id, role, settings, env = plan
        own = make_run_dir(Path(place.folder))
        child = child_plan(node_id, role, {**settings, "socket_dir": str(own)}, env, own)
        former, self._life = self._life, _Life(node_id if place.prints else "")
        self._lives, self._start, self._host = self._lives + 1, (plan, place), place.host
        asyncio.run_coroutine_threadsafe(_replace(former, self._life, child), self._loop).result(_START_S)

    def follow(self, number: int, after: int, wait_s: float) -> "tuple[int, list[Event]]":
        """Return the number of the next event, and the events of life `number` from the one numbered `after` on.

        Waits up to `wait_s` for the first event. A life that was replaced, or was another process's, has ended.
        """
        self._heard_s = time.monotonic()
        if number != self._lives:
            return after + 1, [("end", LOST_EXIT_CODE)]
        return self._life.follow(after, wait_s)

    def signal(self, *, kill: bool) -> None:
        """Send SIGTERM, or SIGKILL to all that the role started; does nothing if it has ended."""
        child = self._life.child
        if child is not None:
            self._loop.call_soon_threadsafe(child.kill if kill else child.terminate)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Compare starts without the worker's number, which matters only without Ray."""

    def comparable(start: tuple[Any, ...]) -> tuple[Any, ...]:
        (node_id, role, settings, env), place = start
        return node_id, role, {**settings, "worker_index": 0}, env, place

    return bool(one) and comparable(one) == comparable(other)


class _Life:
    """One process of the role and its output, written on the loop and read from any thread."""

    def __init__(self, prints_as: str = "") -> None:
        self.child: Child | None = None
        self._prints_as = prints_as
        self._ready: Any = None
        self._new_events = threading.Condition()
        self._events: list[Event] = []
        self._num_dropped = 0  # events before those that are kept

    @property
    def runs(self) -> bool:
        return self.child is not None and not self.child.ended.done()

    def started(self, number: int) -> "StartedLife":
        """Return what a new caller needs to follow this life."""
        assert self.child is not None
        with self._new_events:
            return StartedLife(number, self.child.pid, self._num_dropped, self._ready)

    def add_event(self, kind: str, what: Any) -> None:
        if kind == "line" and self._prints_as:  # Ray logs its workers' output
            print(f"[{self._prints_as}] {what}", flush=True)
        with self._new_events:
            if kind == "ready":
                self._ready = what
            self._events.append((kind, what))
            if len(self._events) > _MOST_EVENTS:
                del self._events[0]
                self._num_dropped += 1
            self._new_events.notify_all()

    def follow(self, after: int, wait_s: float) -> tuple[int, list[Event]]:
        with self._new_events:
            # The caller has all earlier events: a role may run for months.
            del self._events[: max(0, after - self._num_dropped)]
            self._num_dropped = max(after, self._num_dropped)
            self._new_events.wait_for(lambda: bool(self._events), wait_s)
            return self._num_dropped + len(self._events), list(self._events)

    def on_end(self, ended: "asyncio.Task[int]") -> None:
        if self.child is not None and self.child.drained:
            self.add_event("drained", None)
        self.add_event("end", ended.result() if ended.exception() is None else 1)


async def _replace(former: _Life, life: _Life, plan: ChildPlan) -> int:
    """Start `life` and return its pid; a `former` life that a broken call left behind is ended first."""
    if former.child is not None and not former.child.ended.done():
        former.child.kill()
        await former.child.ended
    life.child = await Child.start(
        plan,
        None,
        on_ready=lambda announcement: life.add_event("ready", announcement),
        on_line=lambda line: life.add_event("line", line),
    )
    life.child.ended.add_done_callback(life.on_end)
    return life.child.pid
