"""Processes that check and follow grammars, and may be killed at any time (`worker.grammar_processes` starts them).

The template process loads llguidance and, in a worker, the model's tokenizer once. It forks a process per grammar, so
that none of them waits for the other, a new one costs milliseconds, and the kernel bounds its CPU time and memory:

    role ──control──▶ template ──fork──▶ process of one grammar (address space and CPU time bounded, lower priority)
      └───────job's socket───────────────┘   └── one socket per sequence in a worker

Each process dies with the one that forked it. The template is single-threaded, as forking requires.

The messages are described in `worker.grammar_frames`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from rpc.parent_death import die_with_parent
from worker.errors import GrammarError
from worker.grammar import LIMITS, STACK_NBYTES, check_grammar, on_deep_stack, shortened, to_llguidance
from worker.grammar_frames import (
    COMMAND,
    ENDED_FOR_MEMORY,
    EXIT,
    FAILED,
    OPEN,
    OUT_OF_MEMORY,
    START,
    STOPPED,
    receive_exactly,
    receive_frame,
    send_frame,
)

NICENESS = 5  # below the role that serves requests
COSTLY_NICENESS = 12  # of a grammar that has used much CPU time
_LOOK_S = 0.25  # how often the CPU time and memory of the processes are read
_USUAL_CPU_S, _USUAL_CPU_SHARE = 0.1, 0.05  # CPU time of a grammar that is not costly: to compile, and while followed


def main(control_fd: int, parent_pid: int, total_nbytes: int) -> None:
    """Serve as the template until the role closes the control socket.

    `total_nbytes` bounds the memory that all forked processes together use beyond the template's.
    """
    if not die_with_parent(parent_pid):
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # the role ends it; a terminal's Ctrl-C must not
        signal.signal(number, signal.SIG_IGN)
    signal.signal(ENDED_FOR_MEMORY, signal.SIG_DFL)
    control = socket.socket(fileno=control_fd)
    request = receive_frame(control)
    if request is None:
        return
    vocabulary, problem = json.loads(request), ""
    tokenizer: Any = None
    if vocabulary is not None:
        try:
            tokenizer = LLTokenizer(vocabulary["json"], n_vocab=vocabulary["size"], eos_token=vocabulary["end_ids"])
        except Exception as error:
            problem = shortened(str(error)) or type(error).__name__
    send_frame(control, problem.encode())
    del request, vocabulary
    gc.collect()
    gc.freeze()  # the collector of a forked process must not write to the shared pages
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the role has ended
        _Forker(control, tokenizer, total_nbytes).run()


@dataclass
class _Job:
    """A forked process: the job's id, and the resident memory and the time at its fork."""

    job_id: int
    resident_nbytes: int
    forked_s: float
    is_costly: bool = False


class _Forker:
    """Loop that forks processes, watches their CPU time and memory, kills them on request and reports their ends."""

    def __init__(self, control: socket.socket, tokenizer: Any, total_nbytes: int) -> None:
        self._control, self._tokenizer = control, tokenizer
        self._total_nbytes = total_nbytes
        self._look_at = 0.0
        self._jobs: dict[int, _Job] = {}  # by pid

    def run(self) -> None:
        """Run until the role closes the control socket; the processes die with this one."""
        ended, ends = os.pipe()
        os.set_blocking(ended, False)
        os.set_blocking(ends, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ends, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(_LOOK_S if self._jobs else None)}
                if ended in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(ended, 4096)
                self._reap()
                self._look()
                if self._control in ready and not self._obey():
                    return

    def _obey(self) -> bool:
        """Take one command; returns False at the end of the control socket."""
        data, fds, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        if len(data) < COMMAND.size:
            return False
        command, job_id = COMMAND.unpack(data)
        if command == START:
            self._fork(job_id, fds[0])
        else:
            for pid, job in self._jobs.items():
                if job.job_id == job_id:
                    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is not another process's
        return True

    def _fork(self, job_id: int, fd: int) -> None:
        template_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(fd)
            self._control.sendall(EXIT.pack(job_id, signal.SIGKILL, 0.0, 0))
            return
        if pid:
            os.close(fd)
            self._jobs[pid] = _Job(job_id, _memory_nbytes("self")[1], time.monotonic())
            return
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            self._control.close()
            if die_with_parent(template_pid):
                _run_job(socket.socket(fileno=fd), self._tokenizer)
            status = 0
        except MemoryError:
            status = OUT_OF_MEMORY
        finally:
            os._exit(status)

    def _reap(self) -> None:
        while self._jobs:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if not pid:
                return
            job = self._jobs.pop(pid)
            grown = max(0, used.ru_maxrss * _RSS_UNIT - job.resident_nbytes)
            self._control.sendall(EXIT.pack(job.job_id, status, used.ru_utime + used.ru_stime, grown))

    def _look(self) -> None:
        """Lower the priority of costly processes; end the largest while all have grown by more than the limit."""
        now_s = time.monotonic()
        if now_s < self._look_at:
            return
        self._look_at = now_s + _LOOK_S
        for pid, job in self._jobs.items():
            most_s = _USUAL_CPU_S + _USUAL_CPU_SHARE * (now_s - job.forked_s)
            if not job.is_costly and _cpu_s(pid) > most_s:
                job.is_costly = True
                _lower_priority(pid)
        grown = {pid: max(0, _memory_nbytes(str(pid))[1] - job.resident_nbytes) for pid, job in self._jobs.items()}
        total = sum(grown.values())
        while total > self._total_nbytes:
            largest = max(grown, key=grown.__getitem__)
            total -= grown.pop(largest)
            os.kill(largest, ENDED_FOR_MEMORY)


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def _cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used; 0 where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            user, system = file.read().rpartition(b")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _lower_priority(pid: int) -> None:
    """Lower the priority of all threads of a process, each of which has its own."""
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), COSTLY_NICENESS)


def _memory_nbytes(process: str) -> tuple[int, int]:
    """Return a process's address space and resident memory; zeros where the kernel does not tell."""
    try:
        with open(f"/proc/{process}/statm", "rb") as file:
            size, resident = file.read().split()[:2]
    except OSError:
        return 0, 0
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _run_job(sock: socket.socket, tokenizer: Any) -> None:
    """Answer one job and, if it asks for it, follow sequences until the role closes all their sockets."""
    os.nice(NICENESS)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # the library's panics would write the client's text to the role's log
    frame = receive_frame(sock)
    if frame is None:
        return
    job = json.loads(frame)
    used, before = _memory_nbytes("self")
    if used:
        most = used + STACK_NBYTES + job["memory_nbytes"]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with cpu_limit(job["cpu_s"]):
        # One thread for all of it: the address space has room for one such stack.
        verdict, matcher = on_deep_stack(lambda: _judge(job, tokenizer))
    grown = max(0, _memory_nbytes("self")[1] - before)
    send_frame(sock, json.dumps({**verdict, "grown_nbytes": grown}).encode())
    if matcher is not None:
        _Follower(sock, matcher, job["cpu_s"], job["step_cpu_s"]).run()


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Let the kernel end the process by SIGPROF once the block has used that much CPU time."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _judge(job: dict[str, Any], tokenizer: Any) -> tuple[dict[str, Any], Any]:
    """Return the verdict on the job's grammar and, for a tokenizer, its matcher.

    If the grammar is invalid and has named parts, the verdict names the first invalid part.
    """
    if (found := _invalid_part(job, to_llguidance)) is not None:
        return found, None
    try:
        if tokenizer is None:
            check_grammar(job["kind"], job["source"])
            return {"error": ""}, None
        return {"error": ""}, _compile(job["kind"], job["source"], tokenizer)
    except GrammarError as error:
        found = _invalid_part(job, check_grammar)
        return found or {"error": str(error) or "the grammar cannot be compiled"}, None


def _invalid_part(job: dict[str, Any], check: Callable[[int, str], object]) -> dict[str, Any] | None:
    """Return the verdict for the first part that `check` refuses; None if there is none."""
    for index, source in enumerate(job["parts"]):
        try:
            check(job["part_kind"], source)
        except GrammarError as error:
            return {"error": str(error), "part": index}
    return None


def _compile(kind: int, source: str, tokenizer: Any) -> Any:
    form = to_llguidance(kind, source)
    matcher = on_deep_stack(lambda: LLMatcher(tokenizer, form, log_level=0, limits=LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()  # copies inherit the automata of the first token
    if matcher.is_error():
        raise GrammarError(shortened(matcher.get_error()))
    return matcher


class _Follower:
    """Matchers of all sequences under one grammar."""

    def __init__(self, sock: socket.socket, compiled: Any, cpu_s: float, step_cpu_s: float) -> None:
        self._sock, self._compiled = sock, compiled
        self._cpu_s, self._step_cpu_s = cpu_s, step_cpu_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    def run(self) -> None:
        """Run until the role has closed the job's socket and those of all sequences."""
        while self._selector.get_map():
            for key, _ in self._selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                try:
                    stays = self._open() if sock is self._sock else self._advance(sock, key.data)
                except (BrokenPipeError, ConnectionResetError):  # the role has closed its end
                    stays = False
                if not stays:
                    self._selector.unregister(sock)
                    sock.close()

    def _open(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
        if not data:
            return False
        sock = socket.socket(fileno=fds[0])
        ids = receive_frame(sock)
        if ids is None:
            sock.close()
            return True
        matcher = self._compiled.deep_copy()
        with cpu_limit(self._cpu_s):
            for (token,) in struct.iter_unpack("<i", ids):
                if not matcher.consume_token(token):
                    break
            reply = _next_mask(matcher)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_frame(sock, reply)
        self._selector.register(sock, selectors.EVENT_READ, matcher)
        return True

    def _advance(self, sock: socket.socket, matcher: Any) -> bool:
        data = receive_exactly(sock, 4)
        if data is None:
            return False
        with cpu_limit(self._step_cpu_s):
            matcher.consume_token(*struct.unpack("<i", data))
            reply = _next_mask(matcher)
        send_frame(sock, reply)
        return True


def _next_mask(matcher: Any) -> bytes:
    mask: bytes = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        return FAILED + shortened(matcher.get_error()).encode()
    return (STOPPED if matcher.is_stopped() else OPEN) + mask
