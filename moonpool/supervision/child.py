"""Child process of one node, in its own process group, and its log file of bounded size.

`Child.ended` is the task that reads stdout and stderr until the process has ended; its result is the exit code.
"""

import asyncio
import errno
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from moonpool import python_path
from moonpool.supervision.http_port import LISTENER_VARIABLE
from moonpool.supervision.parent_death import SUPERVISOR_VARIABLE
from rpc.private_folder import create_private


class LogFile:
    """Log of at most two files of `limit_nbytes`: the current one, and PATH.1 before it."""

    def __init__(self, path: Path, *, limit_nbytes: int = 32 << 20) -> None:
        self.path = path
        self._limit_nbytes = limit_nbytes
        self._file: BinaryIO = os.fdopen(create_private(path), "wb", buffering=0)

    def write(self, line: str) -> None:
        """Append one line; it is lost on a full disk, which must not stop the cluster."""
        try:
            self._file.write(line.encode(errors="replace") + b"\n")
            if self._file.tell() >= self._limit_nbytes:
                self._turn_over()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _turn_over(self) -> None:
        self.path.replace(self.path.with_name(self.path.name + ".1"))
        successor = os.fdopen(create_private(self.path), "wb", buffering=0)
        self._file.close()
        self._file = successor

    def close(self) -> None:
        """Close the file; further lines are an error."""
        self._file.close()


INTERNAL_VARIABLES = (SUPERVISOR_VARIABLE, LISTENER_VARIABLE)  # of the environment; they are no settings
READY_PREFIX = "MOONPOOL_READY "
DRAINED_LINE = "MOONPOOL_DRAINED"
TAIL_LINES = 20
_LINE_LIMIT_NBYTES = 1 << 20
_DRAIN_S = 1.0


@dataclass(frozen=True)
class ChildPlan:
    """Command and environment of one node's process."""

    node_id: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # overrides the supervisor's own environment
    descriptors: tuple[int, ...] = ()  # files that it inherits, under the same numbers


class Child:
    """Running process of a plan, and the task that reads its output; the task's result is the exit code."""

    def __init__(self, process: asyncio.subprocess.Process, log: LogFile | None) -> None:
        self.pid = process.pid
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.drained = False  # it announced that it ends because it was drained
        self.ended: asyncio.Task[int]
        self._process = process
        self._exited = _exit_of(process)
        self._log = log

    @classmethod
    async def start(
        cls,
        plan: ChildPlan,
        log: LogFile | None,
        *,
        on_ready: Callable[[dict[str, Any]], None],
        on_line: Callable[[str], None],
    ) -> "Child":
        """Start the process. Raises OSError if it cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *plan.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT_NBYTES,
            env=child_environment(os.environ, plan.env),
            process_group=0,  # the terminal's Ctrl-C reaches only the supervisor
            pass_fds=plan.descriptors,
        )
        child = cls(process, log)
        child.ended = asyncio.create_task(child._follow(on_ready, on_line), name=f"follow-{plan.node_id}")
        return child

    def terminate(self) -> None:
        """Request a clean stop."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and every process that it started."""
        self._signal(signal.SIGKILL)

    async def _follow(self, on_ready: Callable[[dict[str, Any]], None], on_line: Callable[[str], None]) -> int:
        assert self._process.stdout is not None
        assert self._process.stderr is not None

        def take(line: str) -> None:
            announcement = parse_ready(line)
            if announcement is not None:
                on_ready(announcement)
                return
            if line == DRAINED_LINE:
                self.drained = True
                return
            self.tail.append(line)
            if self._log is not None:
                self._log.write(line)
            on_line(line)

        readers = [
            asyncio.create_task(_read_lines(stream, take)) for stream in (self._process.stdout, self._process.stderr)
        ]
        await self._exited
        # Its own children are in its group: they must not outlive it. They may hold its pipes open, and asyncio's
        # `wait` returns only once these are closed.
        self._kill_group()
        exit_code = await self._process.wait()
        await asyncio.wait(readers, timeout=_DRAIN_S)
        for reader in readers:
            reader.cancel()
        results = await asyncio.gather(*readers, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return exit_code

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is not None:
            return
        if number == signal.SIGKILL:
            self._kill_group()
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            pass

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def parse_ready(line: str) -> dict[str, Any] | None:
    """Return the JSON object of a MOONPOOL_READY line; None for any other line."""
    if not line.startswith(READY_PREFIX):
        return None
    try:
        announcement = json.loads(line.removeprefix(READY_PREFIX))
    except ValueError:
        return None
    return announcement if isinstance(announcement, dict) else None


def child_environment(base: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the supervisor's environment without its MOONPOOL_* settings, which the plan's file already contains."""
    kept = {name: value for name, value in base.items() if not name.startswith("MOONPOOL_")}
    return python_path.child_environment(
        {**kept, "PYTHONUNBUFFERED": "1", **extra, SUPERVISOR_VARIABLE: str(os.getpid())}
    )


def _exit_of(process: asyncio.subprocess.Process) -> asyncio.Future[Any]:
    """Return a future that is done when the process has exited, whoever else holds its pipes."""
    if not sys.platform.startswith("linux"):
        return asyncio.ensure_future(process.wait())
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[Any] = loop.create_future()
    try:
        watched = os.pidfd_open(process.pid)
    except ProcessLookupError:  # it has exited and was reaped
        exited.set_result(None)
        return exited

    def has_exited() -> None:
        if not exited.done():
            exited.set_result(None)

    def end(_: object) -> None:
        loop.remove_reader(watched)
        os.close(watched)

    loop.add_reader(watched, has_exited)
    exited.add_done_callback(end)
    return exited


async def _read_lines(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    while True:
        try:
            raw = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as end:
            if end.partial:
                take(end.partial.decode(errors="replace"))
            return
        except asyncio.LimitOverrunError as overrun:
            raw = await stream.readexactly(overrun.consumed)
        take(raw.decode(errors="replace").rstrip("\r\n"))
