"""Thread that carries out or awaits copies in their order, and reports the end of each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)

Ended = Callable[[Exception | None], None]


class CopyThread:
    """Runs in order what is submitted."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, work: Callable[[], object], ended: Ended) -> None:
        """Run `work`, then call `ended` with its error, if it raised one. Does not block."""
        self._thread.submit(_run, work, ended)

    def drain(self) -> None:
        """Wait for what has been submitted."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Wait for what has been submitted, and end."""
        self._thread.shutdown()


def _run(work: Callable[[], object], ended: Ended) -> None:
    error: Exception | None = None
    try:
        work()
    except Exception as problem:
        log.exception("KV was not copied between vLLM's blocks and the worker's slots")
        error = problem
    try:
        ended(error)
    except Exception:
        log.exception("the end of a copy could not be reported")
