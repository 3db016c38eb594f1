"""Ray's calls that wait for its head, which may be away for minutes: made on threads of their own. Knows nothing of
roles.

No pool of threads: one that waited for Ray would hold up the others, and the end of the process.
"""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

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
