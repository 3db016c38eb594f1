"""One life of a role under Ray, as supervision sees it, and blocking calls of Ray on threads of their own.

Ray's head may be unreachable for minutes. Blocking calls therefore run on daemon threads rather than in a pool, in
which one waiting call would delay the others and the end of the process.
"""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from moonpool.runtime.ray_actor import LOST_EXIT_CODE, StartedLife
from moonpool.supervision.child import TAIL_LINES, LogFile

T = TypeVar("T")


async def on_thread(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Run a blocking call on a thread and await its result; it continues if the caller is cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def resolve(put: Callable[[Any], None], what: Any) -> None:
        if not done.done():
            put(what)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_result, call(*arguments, **named))
        except BaseException as error:
            outcome = (done.set_exception, error)
        try:
            loop.call_soon_threadsafe(resolve, *outcome)
        except RuntimeError:  # the loop is closed, so no caller waits
            pass

    threading.Thread(target=work, name="ask-ray", daemon=True).start()
    return await done


class BackgroundCalls:
    """Background calls whose outcome does not matter; `wait` joins those in progress."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def run(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Start a call, and return at once."""

        def work() -> None:
            try:
                call(*arguments, **named)
            except Exception as error:  # Ray releases the resources of an ended job by itself
                print(f"Ray did not release a resource: {error}", file=sys.stderr, flush=True)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name="tell-ray", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        """Wait until all calls are done."""
        for thread in self._threads:
            thread.join()


_FOLLOW_S = 10.0
_UNHEARD_S = 60.0
_AGAIN_S = 0.5
_KILL_S = 5.0


class Actor(Protocol):
    """Calls of a role's actor; each may raise ActorLost."""

    async def follow(self, number: int, after: int, wait_s: float) -> tuple[int, list[tuple[str, Any]]]: ...
    async def signal(self, *, kill: bool) -> None: ...
    def kill(self) -> None:
        """End the actor's process, and with it the role. May block."""


class ActorLost(Exception):
    """The actor or its host died, or is unavailable; the message is Ray's."""


class ActorAway(ActorLost):
    """The actor is unreachable or being restarted by Ray; its role may still run."""


class RayLife:
    """Follows one life of a role, from `begin()`, which places the actor and starts or finds the role, to its end.

    `on_unheard` is called if the life ends because the actor is unreachable, although its role may run.
    """

    def __init__(
        self,
        begin: Callable[[Callable[[str], None]], Awaitable[tuple[Actor, StartedLife] | None]],
        log: LogFile,
        *,
        on_ready: Callable[[dict[str, Any]], None],
        on_line: Callable[[str], None],
        on_unheard: Callable[[], None],
        name: str,
    ) -> None:
        self.pid: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.drained = False
        self._begin = begin
        self._log = log
        self._on_ready = on_ready
        self._on_line = on_line
        self._on_unheard = on_unheard
        self._actor: Actor | None = None
        self._killing: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._living = asyncio.create_task(self._live(), name=f"live-{name}")
        self.ended = asyncio.create_task(self._end(), name=f"follow-{name}")

    def terminate(self) -> None:
        """Request a clean stop; a life that has not started ends at once."""
        if self._actor is None:
            self._living.cancel()
        else:
            self._send(self._actor)

    def kill(self) -> None:
        """Kill the role, then if necessary the actor, and finally give up on an answer."""
        if self._killing is None and not self.ended.done():
            self._killing = asyncio.create_task(self._kill())

    async def _end(self) -> int:
        try:
            return await self._living
        except asyncio.CancelledError:
            return LOST_EXIT_CODE
        except ActorLost as lost:
            self._say(str(lost))
            return LOST_EXIT_CODE

    async def _live(self) -> int:
        started = await self._begin(self._say)
        if started is None:
            self.drained = True
            return 0
        self._actor, life = started
        self.pid, after = life.pid, life.after
        if life.ready is not None:
            self._on_ready(life.ready)
        while True:
            after, events = await self._follow(self._actor, life.number, after)
            for kind, what in events:
                if kind == "line":
                    self._say(what)
                elif kind == "ready":
                    self._on_ready(what)
                elif kind == "drained":
                    self.drained = True
                elif kind == "end":
                    return int(what)

    async def _follow(self, actor: Actor, number: int, after: int) -> tuple[int, list[tuple[str, Any]]]:
        """Return the next events; an unreachable actor is retried for a while, since its role may run."""
        why = "it has not answered"
        try:
            async with asyncio.timeout(_UNHEARD_S):
                while True:
                    try:
                        return await actor.follow(number, after, _FOLLOW_S)
                    except ActorAway as away:
                        why = str(away)
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            if self._killing is None:
                self._on_unheard()
            raise ActorLost(f"its Ray actor cannot be reached for {_UNHEARD_S:g} s: {why}") from None

    async def _kill(self) -> None:
        if self._actor is not None:
            self._send(self._actor, kill=True)
            await asyncio.wait([self._living], timeout=_KILL_S)
            if not self._living.done():
                self._in_background(on_thread(self._actor.kill))
                await asyncio.wait([self._living], timeout=_KILL_S)
        self._living.cancel()

    def _send(self, actor: Actor, *, kill: bool = False) -> None:
        async def send() -> None:
            try:
                await actor.signal(kill=kill)
            except ActorLost:
                pass  # then the role is lost, too

        self._in_background(send())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def _say(self, line: str) -> None:
        self.tail.append(line)
        self._log.write(line)
        self._on_line(line)
