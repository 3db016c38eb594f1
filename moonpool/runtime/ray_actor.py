"""An actor that nobody listens to any more: after a while its role is drained, and the actor leaves Ray for good.

A role under Ray: the actor is a thin wrapper around a child process, to whose life its own is tied.

The actor's death, however it comes, ends the role: the kernel kills it. The role's end leaves the actor idle, until it
is told to start it again. What the role says is kept until it was asked for. Who asks may go, and another come in its
place and take the role over as it runs. Imports no ray: the runtime makes it an actor.
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
    """After `after_s` of silence the role has `drain_s` to end. Then the actor of that name, and its placement group
    ("" = it has none), are given back.
    """

    after_s: float
    drain_s: float
    actor: str
    group: str


class Orphan(Protocol):
    """The actor, as it is watched."""

    def silent_s(self) -> float:
        """Since when nobody has asked it anything."""
        ...

    def runs(self) -> bool:
        """Its role does."""
        ...

    def signal(self, *, kill: bool) -> None: ...


def watch(orphan: Orphan, rule: Orphanhood, leave: Callable[[Orphanhood], None] | None = None) -> threading.Thread:
    """On a thread of its own, until the actor has left."""
    thread = threading.Thread(target=_watch, args=(orphan, rule, leave or _leave), name="orphan", daemon=True)
    thread.start()
    return thread


def _watch(orphan: Orphan, rule: Orphanhood, leave: Callable[[Orphanhood], None]) -> None:
    while True:
        time.sleep(min(_LOOK_S, rule.after_s))
        if orphan.silent_s() < rule.after_s:
            continue
        print(f"Nobody has asked for {orphan.silent_s():.0f} s: the role is drained", flush=True)
        for kill, within_s in ((False, rule.drain_s), (True, _KILLED_S)):
            if orphan.runs() and orphan.silent_s() >= rule.after_s:
                orphan.signal(kill=kill)
                _wait_ended(orphan, rule, within_s)
        if orphan.silent_s() >= rule.after_s and _left(rule, leave):
            return


def _wait_ended(orphan: Orphan, rule: Orphanhood, within_s: float) -> None:
    """Or until somebody has come, who will have the role started again: that life is not ours to end."""
    until_s = time.monotonic() + within_s
    while orphan.runs() and orphan.silent_s() >= rule.after_s and time.monotonic() < until_s:
        time.sleep(min(0.1, rule.after_s / 4))


def _left(rule: Orphanhood, leave: Callable[[Orphanhood], None]) -> bool:
    try:
        leave(rule)
    except Exception as error:  # whatever it is, an actor that stays would hold its host's place for ever
        print(f"Ray did not let it leave, again soon: {error}", flush=True)
        return False
    return True


def _leave(rule: Orphanhood) -> None:
    import ray
    from ray.util import get_placement_group, remove_placement_group

    try:
        if rule.group:
            remove_placement_group(get_placement_group(rule.group))
    except ValueError:
        pass  # there is none any more
    ray.kill(ray.get_actor(rule.actor), no_restart=True)


_START_S = 60.0
_MOST_EVENTS = 20_000  # kept of a role that nobody listens to; the oldest go first
LOST_EXIT_CODE = -int(signal.SIGKILL)  # of a life whose end nobody saw

Event = tuple[str, Any]  # ("line", text), ("ready", announcement), ("drained", None), ("end", exit code)


@dataclass(frozen=True)
class ActorPlacement:
    """Where a role runs: Ray's id of its host, this cluster's run directory there, and whether the actor prints what
    the role says, for Ray to keep.
    """

    host: str
    folder: str
    prints: bool


@dataclass(frozen=True)
class StartedLife:
    """A life of the role that runs: its number, its process, the first of its events that is still kept, and how it
    announced itself, if it did.
    """

    number: int
    pid: int
    after: int
    ready: dict[str, Any] | None


class RoleActor:
    """Runs one role on its host; its methods may be called at a time.

    None of them is a coroutine: that would make it an asyncio actor, in which one call that waits holds up all others.
    """

    def __init__(self, orphanhood: Orphanhood | None = None) -> None:
        """`orphanhood`: what becomes of it when nobody asks it anything any more; None: it waits."""
        # Ray's worker processes have uvloop's policy, whose loops make no process groups. The loop's thread lives as
        # long as the process: the role is tied to the thread that began it.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="role", daemon=True).start()
        self._life = _Life()
        self._lives = 0
        self._start: tuple[Any, ...] = ()  # what the present life was begun with
        self._host = ""
        self._heard_s = time.monotonic()
        self._starting = threading.Lock()
        if orphanhood is not None:
            watch(self, orphanhood)

    def free_port(self, host: str) -> int:
        """A TCP port that nobody listens at on this host now."""
        return claim_port(host, 0)

    def host(self) -> str:
        """Ray's id of the host on which this process was told to start its role; "" if it never was."""
        self._heard_s = time.monotonic()
        return self._host

    def listens(self) -> str:
        """The gRPC address that its role was told to listen at; "" if it never was told."""
        return str(self._start[0][2].get("listen", "")) if self._start else ""

    def silent_s(self) -> float:
        """Seconds since anybody asked it for anything."""
        return time.monotonic() - self._heard_s

    def runs(self) -> bool:
        """Whether its role does."""
        return self._life.runs

    def start(
        self, plan: tuple[str, str, dict[str, Any], dict[str, str]], place: "ActorPlacement", *, adopt: bool
    ) -> "StartedLife":
        """Begin a life of the role: `plan` is node id, role, settings and environment. With `adopt` one that runs,
        begun with the same plan in the same place, goes on instead.
        """
        with self._starting:
            self._heard_s = time.monotonic()
            if not (adopt and self._life.runs and _same(self._start, (plan, place))):
                self._begin(plan, place)
            return self._life.begun(self._lives)

    def _begin(self, plan: tuple[str, str, dict[str, Any], dict[str, str]], place: "ActorPlacement") -> None:
        node_id, role, settings, env = plan
        own = make_run_dir(Path(place.folder))
        child = child_plan(node_id, role, {**settings, "socket_dir": str(own)}, env, own)
        former, self._life = self._life, _Life(node_id if place.prints else "")
        self._lives, self._start, self._host = self._lives + 1, (plan, place), place.host
        asyncio.run_coroutine_threadsafe(_replace(former, self._life, child), self._loop).result(_START_S)

    def follow(self, number: int, after: int, wait_s: float) -> "tuple[int, list[Event]]":
        """Events of life `number` from the one numbered `after` on, and the number of the next; waits up to `wait_s`
        for the first. A life that has been replaced, or was another process's, has ended.
        """
        self._heard_s = time.monotonic()
        if number != self._lives:
            return after + 1, [("end", LOST_EXIT_CODE)]
        return self._life.follow(after, wait_s)

    def signal(self, *, kill: bool) -> None:
        """SIGTERM, or SIGKILL for all that the role started; without effect when it has ended."""
        child = self._life.child
        if child is not None:
            self._loop.call_soon_threadsafe(child.kill if kill else child.terminate)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """But for the worker's number, which counts only where workers share a host's GPUs without Ray."""

    def known(start: tuple[Any, ...]) -> tuple[Any, ...]:
        (node_id, role, settings, env), place = start
        return node_id, role, {**settings, "worker_index": 0}, env, place

    return bool(one) and known(one) == known(other)


class _Life:
    """One process of the role, and what it has said. Told on the loop, asked from any thread."""

    def __init__(self, prints_as: str = "") -> None:
        self.child: Child | None = None
        self._prints_as = prints_as
        self._ready: Any = None
        self._news = threading.Condition()
        self._events: list[Event] = []
        self._num_heard = 0  # events before those that are kept

    @property
    def runs(self) -> bool:
        return self.child is not None and not self.child.ended.done()

    def begun(self, number: int) -> "StartedLife":
        """How to go on with this life for one who knows nothing of it."""
        assert self.child is not None
        with self._news:
            return StartedLife(number, self.child.pid, self._num_heard, self._ready)

    def tell(self, kind: str, what: Any) -> None:
        if kind == "line" and self._prints_as:  # to where Ray keeps what its workers say
            print(f"[{self._prints_as}] {what}", flush=True)
        with self._news:
            if kind == "ready":
                self._ready = what
            self._events.append((kind, what))
            if len(self._events) > _MOST_EVENTS:
                del self._events[0]
                self._num_heard += 1
            self._news.notify_all()

    def follow(self, after: int, wait_s: float) -> tuple[int, list[Event]]:
        with self._news:
            # Whoever asks for what comes after them has them: a role may talk for months.
            del self._events[: max(0, after - self._num_heard)]
            self._num_heard = max(after, self._num_heard)
            self._news.wait_for(lambda: bool(self._events), wait_s)
            return self._num_heard + len(self._events), list(self._events)

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
