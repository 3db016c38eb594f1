"""Grammars' processes as threads: in place of the template process that forks them (`worker.grammar_processes`).

The verdicts, the matchers and the masks are those of `worker.grammar_child`; what bounds a process's time and memory is
left out. A process may be ended from outside at any token.
"""

from __future__ import annotations

import contextlib
import json
import signal
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from llguidance import LLTokenizer

from tools.prove.world.local_sockets import receive_socket, socketpair
from tools.prove.world.scheduler import world
from tools.prove.world.sockets import socket
from tools.prove.world.threads import Thread
from worker import grammar_processes
from worker.grammar import _DEEP_THREAD
from worker.grammar_child import _judge, _next_mask
from worker.grammar_frames import receive_exactly, receive_frame, send_frame
from worker.grammar_processes import Exit, GrammarProcess

_ENDS = 0.002  # probability that a process is ended from outside before it answers; 0 at rest
_TOKEN_S = 300e-6  # to compute a mask
_KILLED = Exit(int(signal.SIGKILL), 0.0, 0)


_at_rest = False


def set_rest(at_rest: bool) -> None:
    """Let no process end from outside, or let them end again."""
    global _at_rest
    _at_rest = at_rest


def install() -> None:
    """Let the roles' grammars be handled by threads. Once per process."""
    grammar_processes._TemplateProcess = _Template  # type: ignore[assignment,misc]


@cache
def tokenizer_of(text: str) -> Any:
    """Return llguidance's form of a tokenizer, from what `GrammarVocabulary.read` returns as JSON."""
    vocabulary = json.loads(text)
    return LLTokenizer(vocabulary["json"], n_vocab=vocabulary["size"], eos_token=vocabulary["end_ids"])


class _Template:
    """In place of `worker.grammar_processes._TemplateProcess`."""

    def __init__(self, vocabulary: Mapping[str, Any] | None, total_nbytes: int) -> None:
        self.is_over = False
        self._tokenizer = None if vocabulary is None else tokenizer_of(json.dumps(vocabulary))
        self._children: list[_GrammarThreads] = []

    def take(self) -> GrammarProcess:
        """As _TemplateProcess.take."""
        child = _GrammarThreads(len(self._children), self._tokenizer)
        self._children.append(child)
        return child.process

    def fork_spare(self) -> None:
        """None is needed."""

    def close(self) -> None:
        """Kill all processes."""
        self.is_over = True
        for child in self._children:
            child.kill()


class _GrammarThreads:
    """One process: a thread for its job, and one for each sequence that it follows."""

    def __init__(self, job_id: int, tokenizer: Any) -> None:
        pair: tuple[Any, Any] = socketpair()
        self.process = GrammarProcess(job_id, pair[0], self.kill)
        self._tokenizer, self._sock = tokenizer, pair[1]
        self._open = [self._sock]
        _start(self._run)

    def kill(self) -> None:
        """End the process, as SIGKILL does."""
        if not self.process.ended.done():
            self.process.ended.set_result(_KILLED)
            for sock in list(self._open):
                with contextlib.suppress(OSError):  # the role may have closed its end
                    sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        frame = receive_frame(self._sock)
        if frame is None:
            return
        verdict, compiled = _judge(json.loads(frame), self._tokenizer)
        if self._answer(self._sock, json.dumps({**verdict, "grown_nbytes": 0}).encode()) and compiled is not None:
            while (sequence := receive_socket(self._sock)) is not None:
                self._open.append(sequence)
                _start(lambda sequence=sequence: self._follow(sequence, compiled.deep_copy()))  # type: ignore[misc]

    def _follow(self, sock: Any, matcher: Any) -> None:
        with contextlib.suppress(OSError):  # the role has closed its end
            ids = receive_frame(sock)
            for (token,) in struct.iter_unpack("<i", ids or b""):
                if not matcher.consume_token(token):
                    break
            while self._answer(sock, _next_mask(matcher)):
                taken = receive_exactly(sock, 4)
                if taken is None:
                    break
                matcher.consume_token(*struct.unpack("<i", taken))
        self._open.remove(sock)
        sock.close()

    def _answer(self, sock: Any, reply: bytes) -> bool:
        """Send a reply after the time that it takes. Returns False if the process has ended."""
        world().park(_TOKEN_S * world().chance.uniform(0.5, 2.0))
        if world().chance.random() < _ENDS and not _at_rest:
            self.kill()
        if self.process.ended.done():
            return False
        try:
            send_frame(sock, reply)
        except OSError:  # the role has closed its end
            return False
        return True


def _start(work: Callable[[], None]) -> None:
    Thread(target=work, name=_DEEP_THREAD, daemon=True).start()
