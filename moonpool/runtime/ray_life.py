"""Ray's calls that wait for its head, which may be away for minutes: made on threads of their own. Knows nothing of
roles.

No pool of threads: one that waited for Ray would hold up the others, and the end of the process.

One life of a role under Ray, as supervision sees it: started in its actor, followed line by line, ended.
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


async def apart(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """The call's result; the event loop goes on meanwhile. A caller that is cancelled leaves the call to itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(put: Callable[[Any], None], what: Any) -> None:
        if not done.done():
            put(what)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_result, call(*arguments, **named))
        except BaseException as error:
            outcome = (done.set_exception, error)
        try:
            loop.call_soon_threadsafe(tell, *outcome)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass

    threading.Thread(target=work, name="ask-ray", daemon=True).start()
    return await done


class Errands:
    """Calls of whose outcome nobody depends; those under way can be waited for."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def run(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Begin it, and return."""

        def work() -> None:
            try:
                call(*arguments, **named)
            except Exception as error:  # Ray takes back by itself what belongs to an ended job
                print(f"Ray did not take something back: {error}", file=sys.stderr, flush=True)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name="tell-ray", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        """Until all are done."""
        for thread in self._threads:
            thread.join()


_FOLLOW_S = 10.0
_UNHEARD_S = 60.0
_AGAIN_S = 0.5
_KILL_S = 5.0


class Actor(Protocol):
    """The calls of a role's actor that a life needs; each may raise ActorLost."""

    async def follow(self, number: int, after: int, wait_s: float) -> tuple[int, list[tuple[str, Any]]]: ...
    async def signal(self, *, kill: bool) -> None: ...
    def kill(self) -> None:
        """End the actor's process, and with it the role. May block."""


class ActorLost(Exception):
    """The actor or its host died, or cannot be had now; the message says what Ray says."""


class ActorAway(ActorLost):
    """The same of an actor that Ray brings back, or that only cannot be reached now: its role may run well."""


class RayLife:
    """Begins by `begin()`, which places the actor and starts the role, or finds it running. `on_unheard` is told when
    it ends because the actor cannot be reached, though its role may run.
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
        """Ask for a clean stop; one that has not begun is over at once."""
        if self._actor is None:
            self._living.cancel()
        else:
            self._send(self._actor)

    def kill(self) -> None:
        """End it for certain: the role, else the actor, and at last without an answer."""
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
        begun = await self._begin(self._say)
        if begun is None:
            self.drained = True
            return 0
        self._actor, life = begun
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
        """The next events. An actor that cannot be reached is asked again for a while: its role may run well."""
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
                self._apart(apart(self._actor.kill))
                await asyncio.wait([self._living], timeout=_KILL_S)
        self._living.cancel()

    def _send(self, actor: Actor, *, kill: bool = False) -> None:
        async def send() -> None:
            try:
                await actor.signal(kill=kill)
            except ActorLost:
                pass  # so is the role

        self._apart(send())

    def _apart(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def _say(self, line: str) -> None:
        self.tail.append(line)
        self._log.write(line)
        self._on_line(line)
