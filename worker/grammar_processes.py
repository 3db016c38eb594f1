"""Checks of grammars in processes that can be killed: limits, fair order among tenants, memory of costly grammars.

Used by the frontend, which checks, and by workers, which also follow grammars token by token (`grammar_matching`).

Threads: `submit` may be called from any thread or event loop. Up to `max_running` threads each wait for one process;
they belong to this module, so that other work never waits for a grammar. One more thread reads the template's reports.

A process ends by its own kernel limits (CPU time, address space), by `kill` at the wall-clock limit or when the caller
cancels, as the largest when all together take too much memory, and with the template or the role. Whatever ends it, the
role continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from worker.errors import GrammarBusy, GrammarError, GrammarTooCostly, WorkerError
from worker.fair_queue import FairQueue, Task
from worker.grammar_frames import (
    COMMAND,
    ENDED_FOR_MEMORY,
    EXIT,
    KILL,
    OUT_OF_MEMORY,
    START,
    receive_exactly,
    receive_frame,
    send_frame,
)

T = TypeVar("T")

MAX_REMEMBERED: Final = 4096
_COMPILING: Final = "compiling"
_CANCELLED: Final = "a cancelled check"
_START_S: Final = 60.0  # for the template; a large tokenizer takes seconds
_END_S: Final = 5.0  # for the report of a process that has ended
_BOOT: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); sys.path.append(sys.argv[2]); "
    "from worker.grammar_child import main; main(*map(int, sys.argv[3:]))"
)


@dataclass(frozen=True)
class JobLimits:
    """Bounds of one process. `wall_s` only ends what the machine is too busy to run; the grammar is not blamed then."""

    cpu_s: float
    wall_s: float
    memory_nbytes: int
    step_cpu_s: float = 0.0  # per token, in a worker
    total_nbytes: int = 1 << 30  # of all processes together, beyond the template's; the largest is ended


FRONTEND_LIMITS: Final = JobLimits(cpu_s=1.0, wall_s=5.0, memory_nbytes=256 << 20)
WORKER_LIMITS: Final = JobLimits(cpu_s=2.0, wall_s=10.0, memory_nbytes=256 << 20, step_cpu_s=0.25)


@dataclass(frozen=True)
class GrammarSource:
    """Grammar to check. `parts`, of kind `part_kind`, are what it was made of: an error names the invalid one."""

    kind: int
    source: str
    parts: tuple[str, ...] = ()
    part_kind: int = 0

    @property
    def key(self) -> bytes:
        """Hash that identifies the grammar."""
        return hashlib.sha256(b"%d\0" % self.kind + self.source.encode("utf-8", "surrogatepass")).digest()


class InvalidPart(GrammarError):
    """The grammar is invalid because its part number `index` is."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True)
class Exit:
    """End of a process: its status as of wait(), CPU seconds, and how much its memory has grown."""

    status: int
    cpu_s: float
    grown_nbytes: int


_LOST: Final = Exit(int(signal.SIGKILL), 0.0, 0)  # the template ended, and the process with it


class GrammarProcess:
    """One running process: its socket, and its end."""

    def __init__(self, job_id: int, sock: socket.socket, kill: Callable[[], None]) -> None:
        self.job_id = job_id
        self.sock = sock
        self.kill = kill
        self.ended: Future[Exit] = Future()
        self.grown_nbytes = 0
        self.judging = threading.Lock()
        self.judgement: WorkerError | None = None  # guarded by `judging`
        # It holds the socket, so that the socket is closed by it also if both are in a garbage cycle.
        weakref.finalize(self, sock.close).atexit = False


class GrammarProcesses:
    """Template process, and the queue of work for the processes that it forks."""

    def __init__(
        self,
        limits: JobLimits,
        count: Callable[[str], None],
        vocabulary: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        """`count` is called with "refused" for each grammar refused for its cost, and with "killed" for each process
        that ended by a limit or from outside; from any thread, but never twice at once. `vocabulary` returns a worker's
        tokenizer; it may raise GrammarError."""
        self.limits = limits
        self._count = count
        self._vocabulary = vocabulary
        self._queue = FairQueue()
        self._starting = threading.Lock()
        self._template: _TemplateProcess | None = None
        self._unusable: GrammarError | None = None  # the tokenizer's
        self._costly: OrderedDict[bytes, str] = OrderedDict()  # reason by the grammar's key
        self._remembering = threading.Lock()

    def warm_up(self) -> Task[None]:
        """Start the template now instead of with the first grammar, which reports an unusable tokenizer."""

        def start(_: Task[None]) -> None:
            with contextlib.suppress(GrammarError, GrammarBusy):
                self._started()

        # On a thread that lives as long as this object: the template dies with the thread that started it.
        return self.submit("", start)

    def close(self) -> None:
        """Kill all processes; work that waits fails with GrammarBusy."""
        self._queue.close()
        with self._starting:
            template, self._template = self._template, None
        if template is not None:
            template.close()
        self._queue.join()

    def submit(self, tenant: str, work: Callable[[Task[T]], T]) -> Task[T]:
        """Run `work` on a thread of this module when it is the tenant's turn. Raises GrammarBusy if too much waits."""
        return self._queue.submit(tenant, work)

    def check(self, tenant: str, grammar: GrammarSource) -> Task[GrammarProcess]:
        """Check a grammar.

        The task's result is its process, which in a worker remains to follow the grammar. It raises GrammarError,
        InvalidPart, GrammarTooCostly, and GrammarBusy.
        """
        self.raise_if_costly(grammar)
        return self.submit(tenant, lambda task: self._check(task, grammar))

    def raise_if_costly(self, grammar: GrammarSource) -> None:
        """Raise GrammarTooCostly for a grammar that has cost a process."""
        with self._remembering:
            reason = self._costly.get(grammar.key)
            if reason is None:
                return
            self._costly.move_to_end(grammar.key)
            self._count("refused")
        raise GrammarTooCostly(f"{reason}. It was refused without another attempt")

    def judge_end(self, grammar: GrammarSource, process: GrammarProcess, cpu_s: float, work: str) -> WorkerError:
        """Return the error for a process that ended, or did not answer in time, during `work` limited to `cpu_s`.

        Kills it and waits for its end. If it ended by a limit, the grammar is remembered.
        """
        process.kill()
        with process.judging:
            if process.judgement is None:
                process.judgement = self._judge_end(grammar, process, cpu_s, work)
            return process.judgement

    def _judge_end(self, grammar: GrammarSource, process: GrammarProcess, cpu_s: float, work: str) -> WorkerError:
        try:
            end = process.ended.result(_END_S)
        except TimeoutError:
            end = _LOST
        reason = self._reason(end, cpu_s, work)
        with self._remembering:
            self._count("killed")
            if reason is None:
                most = self.limits.total_nbytes >> 20
                return GrammarBusy(
                    f"all grammars together take more than {most} MiB of memory, and this one takes most of it: "
                    "try again later"
                    if end.status == ENDED_FOR_MEMORY
                    else "the process that handled the grammar was ended from outside, or the machine is too busy"
                )
            self._count("refused")
            self._costly[grammar.key] = reason
            if len(self._costly) > MAX_REMEMBERED:
                self._costly.popitem(last=False)
        return GrammarTooCostly(reason)

    def _reason(self, end: Exit, cpu_s: float, work: str) -> str | None:
        """Return why the grammar is refused; None if it did not cause the end."""
        advice = "Simplify it: conjoin fewer patterns, use smaller repetitions and fewer alternatives"
        number = os.WTERMSIG(end.status) if os.WIFSIGNALED(end.status) else 0
        code = 0 if number else os.WEXITSTATUS(end.status)
        # Half of it within the wall-clock limit: the machine is busy, and the grammar not innocent.
        if number == signal.SIGPROF or (number == signal.SIGKILL and work == _COMPILING and end.cpu_s >= cpu_s / 2):
            return f"the grammar takes more than {cpu_s:g} s of CPU time for {work}, which is the limit. {advice}"
        if number == signal.SIGKILL or (not number and not code):
            return None
        if number == ENDED_FOR_MEMORY and end.grown_nbytes <= self.limits.memory_nbytes // 2:
            return None
        if code == OUT_OF_MEMORY or end.grown_nbytes > self.limits.memory_nbytes // 2:
            most = self.limits.memory_nbytes >> 20
            return f"the grammar takes more than {most} MiB of memory, which is the limit. {advice}"
        return "the grammar makes its compiler fail"

    def _check(self, task: Task[GrammarProcess], grammar: GrammarSource) -> GrammarProcess:
        self.raise_if_costly(grammar)  # the same one may have run while this one waited
        limits = self.limits
        template = self._started()
        process = template.take()
        task.on_cancel(process.kill)
        request = {
            "kind": grammar.kind,
            "source": grammar.source,
            "parts": grammar.parts,
            "part_kind": grammar.part_kind,
            "cpu_s": limits.cpu_s,
            "step_cpu_s": limits.step_cpu_s,
            "memory_nbytes": limits.memory_nbytes,
        }
        try:
            process.sock.settimeout(limits.wall_s)
            send_frame(process.sock, json.dumps(request).encode())
            reply = receive_frame(process.sock)
        except OSError:  # TimeoutError, too
            reply = None
        template.fork_spare()
        if reply is None:
            work = _CANCELLED if task.is_cancelled else _COMPILING
            raise self.judge_end(grammar, process, limits.cpu_s, work)
        verdict = json.loads(reply)
        if verdict["error"]:
            if "part" in verdict:
                raise InvalidPart(verdict["error"], verdict["part"])
            raise GrammarError(verdict["error"])
        process.sock.settimeout(None)
        process.grown_nbytes = verdict["grown_nbytes"]
        return process

    def _started(self) -> _TemplateProcess:
        """Return the running template; start one if there is none."""
        with self._starting:
            if self._queue.is_closed:
                raise GrammarBusy("the process is shutting down")
            if self._template is None or self._template.is_over:
                if self._template is not None:
                    self._template.close()
                self._template = None
                if self._unusable is not None:
                    raise self._unusable
                try:
                    self._template = _TemplateProcess(self._vocabulary(), self.limits.total_nbytes)
                    self._template.fork_spare()
                except GrammarError as error:
                    self._unusable = error
                    raise
            return self._template


class _TemplateProcess:
    """The template process as seen by the role. Raises GrammarError at creation if the tokenizer cannot be used."""

    def __init__(self, vocabulary: Mapping[str, Any] | None, total_nbytes: int) -> None:
        self.is_over = False
        self._sending = threading.Lock()  # guards the control socket's sending side and the jobs
        self._jobs: dict[int, Future[Exit]] = {}
        self._next_id = 0
        self._taking = threading.Lock()
        self._spare: GrammarProcess | None = None  # guarded by `_taking`
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-c",
                    _BOOT,
                    *_IMPORT_FROM,
                    *map(str, (theirs.fileno(), os.getpid(), total_nbytes)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                env={name: os.environ[name] for name in _VARIABLES if name in os.environ} | {"MALLOC_ARENA_MAX": "1"},
            )
        self._reader = threading.Thread(target=self._read_exits, name="grammar-exits", daemon=True)
        try:
            self._control.settimeout(_START_S)
            send_frame(self._control, json.dumps(vocabulary).encode())
            problem = receive_frame(self._control)
            self._control.settimeout(None)
        except OSError:
            problem = None
        if problem:
            self.close()
            raise GrammarError(f"this model's tokenizer cannot be used with grammars: {problem.decode()}")
        if problem is None:
            self.close()
            raise GrammarBusy(f"the process for grammars did not start (status {self._process.returncode})")
        self._reader.start()

    def take(self) -> GrammarProcess:
        """Return a process without work. Raises GrammarBusy if the template has ended."""
        with self._taking:
            process, self._spare = self._spare or self._fork(), None
        return process

    def fork_spare(self) -> None:
        """Start a process for the next call of `take`, which then need not wait for it."""
        with self._taking, contextlib.suppress(GrammarBusy):
            self._spare = self._spare or self._fork()

    def _fork(self) -> GrammarProcess:
        ours, theirs = socket.socketpair()
        with theirs, self._sending:
            job_id, self._next_id = self._next_id, self._next_id + 1
            process = GrammarProcess(job_id, ours, lambda: self._kill(job_id))
            try:
                if self.is_over:
                    raise BrokenPipeError
                socket.send_fds(self._control, [COMMAND.pack(START, job_id)], [theirs.fileno()])
            except OSError as error:
                raise GrammarBusy("the process for grammars has ended") from error
            self._jobs[job_id] = process.ended
        return process

    def close(self) -> None:
        """End the template, and with it all its processes."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader.ident is not None:
            self._reader.join()
        self._control.close()

    def _kill(self, job_id: int) -> None:
        with self._sending, contextlib.suppress(OSError):
            if job_id in self._jobs:
                self._control.sendall(COMMAND.pack(KILL, job_id))

    def _read_exits(self) -> None:
        with contextlib.suppress(OSError):
            while (data := receive_exactly(self._control, EXIT.size)) is not None:
                job_id, *values = EXIT.unpack(data)
                with self._sending:
                    ended = self._jobs.pop(job_id)
                ended.set_result(Exit(*values))
        with self._sending:
            self.is_over = True
            jobs, self._jobs = self._jobs, {}
        for ended in jobs.values():
            ended.set_result(_LOST)


# Only what the interpreter needs to run: no secrets, and `-I` keeps it from importing out of the working directory.
_VARIABLES: Final = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")


def _import_from() -> tuple[str, str]:
    """Return the folders of this project and of llguidance, which `-I` may leave out of the path."""
    found = importlib.util.find_spec("llguidance")
    if found is None or found.origin is None:
        raise ImportError("llguidance is not installed: install moonpool's dependencies")
    return str(Path(__file__).parents[1]), str(Path(found.origin).parents[1])


_IMPORT_FROM: Final = _import_from()
