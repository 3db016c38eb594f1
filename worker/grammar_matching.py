"""Grammars compiled for this model's tokenizer and followed token by token, in a process per grammar.

A sequence's matcher lives in that process (`grammar_child`). `take` sends it a token; the process computes the mask for
the next one meanwhile, and the engine leaves the sequence out of its steps until the mask is there. So neither the
engine thread nor the event loop ever runs a grammar, and a grammar that takes too long or too much memory ends only its
own process.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from engine import TokenizerMissing, find_tokenizer
from moonpool_proto.v1.common_pb2 import Grammar
from moonpool_proto.v1.worker_pb2 import FINISH_COMPLETE, FINISH_NONE, FINISH_STOP, Finish
from worker.errors import GrammarBusy, GrammarError, GrammarLost, RequestFailed, RequestRefused
from worker.fair_queue import Task
from worker.grammar_frames import FAILED, STOPPED, receive_frame, send_frame
from worker.grammar_processes import WORKER_LIMITS, GrammarProcess, GrammarProcesses, GrammarSource

MAX_COMPILED = 64
MAX_COMPILED_NBYTES = 1 << 30  # of all their processes together, beyond the tokenizer
_MASK_S = 30.0  # far above the limit on a token's CPU time

Bools = NDArray[np.bool_]


class GrammarVocabulary:
    """A model's tokens in the form required by llguidance."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._folder = folder
        self.size = vocab_size
        self.end_ids = frozenset(i for i in end_ids if i < vocab_size)

    def read(self) -> Mapping[str, Any]:
        """Return the tokenizer for the template process. Raises GrammarError if it cannot be used with grammars."""
        try:
            tokenizer = Tokenizer.from_file(str(find_tokenizer(self._folder)))
        except TokenizerMissing as error:
            raise GrammarError(str(error)) from error
        except Exception as error:  # the library raises no narrower type
            raise GrammarError(f"the tokenizer of {self._folder} cannot be read: {error}") from error
        ends = sorted(self.end_ids)
        if not ends:
            # llguidance requires an end token. A model without one gets an extra token that is never allowed.
            tokenizer.add_special_tokens([AddedToken("<|end of grammar|>", special=True)])
            ends = [tokenizer.get_vocab_size() - 1]
        return {"json": tokenizer.to_str(), "size": max(self.size, ends[-1] + 1), "end_ids": ends}


class GrammarMatcher:
    """Position of one sequence in its grammar. Created with the mask of the next token still to come."""

    def __init__(
        self,
        sock: socket.socket,
        vocabulary: GrammarVocabulary,
        lost: Callable[[], GrammarLost],
    ) -> None:
        """`lost` returns the error to raise once the process has ended."""
        self._sock = sock
        self._vocabulary = vocabulary
        self._lost = lost
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._allowed: Bools | None = None  # None while the process computes it
        self._error: Exception | None = None
        self.asked_at = time.monotonic()  # of the mask
        self.finish: Finish.ValueType = FINISH_NONE
        # It holds the socket, so that the socket is closed by it also if both are in a garbage cycle.
        weakref.finalize(self, sock.close).atexit = False

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end any grammar."""
        return self._vocabulary.end_ids

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Return True if `allowed` does not have to wait, after waiting for at most `wait_s` seconds."""
        return self._allowed is not None or self._error is not None or bool(self._poll.poll(wait_s * 1000))

    def allowed(self) -> Bools:
        """Return bool [V]: the ids that may come next; at the end of the grammar, end tokens only.

        Waits for it. Raises GrammarError, and GrammarLost if the process has ended.
        """
        self.receive()
        assert self._allowed is not None
        if not self._allowed.any():
            raise GrammarError("the grammar has reached a state in which no token of this model is allowed")
        return self._allowed

    def take(self, token: int) -> None:
        """Advance by one token. Raises GrammarError for a token that is not allowed."""
        self.receive()
        assert self._allowed is not None
        if not self._allowed[token]:
            self._error = GrammarError(f"token {token} is not allowed by the grammar")
            raise self._error
        if token in self._vocabulary.end_ids:
            self.finish = FINISH_STOP
            return
        self._allowed = None
        self.asked_at = time.monotonic()
        try:
            self._sock.sendall(int(token).to_bytes(4, "little", signed=True))
        except OSError as error:
            raise self._ended() from error
        if not self._vocabulary.end_ids:
            self.receive()  # its end is the grammar's, which only the process detects

    def receive(self) -> None:
        """Wait for the mask of the next token. Raises GrammarError and GrammarLost."""
        if self._error is not None:
            raise self._error
        if self._allowed is not None:
            return
        try:
            self._sock.settimeout(_MASK_S)
            reply = receive_frame(self._sock)
        except OSError:
            reply = None
        if reply is None:
            raise self._ended()
        kind, packed = reply[:1], np.frombuffer(reply, np.uint8, offset=1)
        if kind == FAILED:
            self._error = GrammarError(packed.tobytes().decode(errors="replace"))
            raise self._error
        # A row may be longer than the vocabulary: an extra end token is never allowed.
        self._allowed = np.unpackbits(packed, count=self._vocabulary.size, bitorder="little").view(np.bool_)
        if kind == STOPPED and not self._vocabulary.end_ids:
            self.finish = FINISH_COMPLETE

    def _ended(self) -> Exception:
        self._error = self._lost()
        return self._error


class GrammarCompiler:
    """Cache of a node's compiled grammars, each in its process. `begin` and `matcher` are called on the event loop."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        end_ids: Sequence[int],
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`count` is called with "refused" and "killed", as by GrammarProcesses."""
        self._vocabulary = GrammarVocabulary(folder, vocab_size, end_ids)
        self._processes = GrammarProcesses(WORKER_LIMITS, count, self._vocabulary.read)
        self._compiled: OrderedDict[bytes, _Compiled] = OrderedDict()

    def warm_up(self) -> None:
        """Read the tokenizer now instead of with the first grammar. Blocks."""
        self._processes.warm_up().future.result()

    def close(self) -> None:
        """End all processes. Blocks."""
        self._compiled.clear()
        self._processes.close()

    async def begin(self, grammar: Grammar | None, tenant: str = "") -> None:
        """Compile a grammar for a later call of `matcher`, until cancelled. Does nothing for None; raises nothing."""
        if grammar is not None:
            try:
                await self._process(GrammarSource(grammar.kind, grammar.source), tenant)
            except (GrammarError, GrammarBusy):
                pass  # raised by `matcher`

    async def matcher(
        self, grammar: Grammar | None, generated: NDArray[np.int32], tenant: str = ""
    ) -> GrammarMatcher | None:
        """Return a matcher advanced by the `generated` ids; None without a grammar.

        Raises RequestRefused, and RequestFailed if another node may succeed.
        """
        if grammar is None:
            return None
        source = GrammarSource(grammar.kind, grammar.source)
        try:
            process = await self._process(source, tenant)
            opening = self._processes.submit(tenant, lambda _: self._open(source, process, generated))
            return await opening.result()
        except GrammarError as error:
            raise RequestRefused("bad_grammar", str(error)) from error
        except GrammarBusy as error:
            raise RequestFailed("grammar_busy", str(error)) from error

    async def _process(self, grammar: GrammarSource, tenant: str) -> GrammarProcess:
        """Return the grammar's process. Compiling ends when nobody waits for it any more."""
        key = grammar.key
        found = self._compiled.get(key)
        if found is None or found.is_useless:
            self._make_room()
            found = self._compiled[key] = _Compiled(self._processes.check(tenant, grammar))
        self._compiled.move_to_end(key)
        return await found.process()

    def _make_room(self) -> None:
        """Drop the least recently used grammars. Their sequences go on; the processes end after them."""
        for key in [key for key, each in self._compiled.items() if each.is_useless]:
            del self._compiled[key]
        while self._compiled and (
            len(self._compiled) >= MAX_COMPILED
            or sum(each.grown_nbytes for each in self._compiled.values()) > MAX_COMPILED_NBYTES
        ):
            self._compiled.popitem(last=False)

    # The following methods run on threads of `GrammarProcesses`.

    def _open(self, grammar: GrammarSource, process: GrammarProcess, generated: NDArray[np.int32]) -> GrammarMatcher:
        limits = self._processes.limits
        ours, theirs = socket.socketpair()

        def lost() -> GrammarLost:  # the engine thread must not wait for the cause
            return GrammarLost(lambda: self._processes.judge_end(grammar, process, limits.step_cpu_s, "one token"))

        matcher = GrammarMatcher(ours, self._vocabulary, lost)
        try:
            with theirs:
                ours.settimeout(limits.wall_s)
                socket.send_fds(process.sock, [b"+"], [theirs.fileno()])
            send_frame(ours, generated.astype("<i4").tobytes())
            matcher.receive()
        except GrammarError as error:
            if not len(generated):
                raise
            raise GrammarError(f"the tokens generated so far do not match the grammar: {error}") from error
        except (GrammarLost, OSError):
            raise self._processes.judge_end(grammar, process, limits.cpu_s, "the answer so far") from None
        return matcher


class _Compiled:
    """A grammar that is being compiled or has been, and the number of those who wait for it."""

    def __init__(self, task: Task[GrammarProcess]) -> None:
        self._task = task
        self._num_waiting = 0

    async def process(self) -> GrammarProcess:
        """Wait for the process; the last one to be cancelled cancels the compilation."""
        waiting = asyncio.wrap_future(self._task.future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else may retrieve it
        self._num_waiting += 1
        try:
            return await asyncio.shield(waiting)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting and not self._task.future.done():
                self._task.cancel()

    @property
    def is_useless(self) -> bool:
        """True if it was cancelled, its process has ended, or it failed for a reason that may pass."""
        future = self._task.future
        if self._task.is_cancelled:
            return True
        if not future.done():
            return False
        error = future.exception()
        return not isinstance(error, GrammarError) if error is not None else future.result().ended.done()

    @property
    def grown_nbytes(self) -> int:
        """Memory of its process."""
        future = self._task.future
        done = future.done() and not future.cancelled() and future.exception() is None
        return future.result().grown_nbytes if done else 0
