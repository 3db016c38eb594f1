"""Serving of requests in one process, or with the host's stages in another one.

The host's stages are the frontend's: tokenising prompts, and detokenising and sending tokens.
"""

import multiprocessing
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.techniques.batch_server import BatchServer, Tokens
from benchmarks.techniques.workload import AnsweredRequest, Technique, TimedRequest
from engine import load_model
from frontend.tokenizer import Detokenizer, Tokenizer
from moonpool_proto.v1.worker_pb2 import Token, WorkerMessage
from worker.engine_loop import StepResult
from worker.node import SWITCH_INTERVAL_S


@dataclass(frozen=True)
class ServerSetting:
    """Model, KV cache and threads of a server, the same for all techniques."""

    model: Path
    capacity_tokens: int
    threads: int


@dataclass
class ServerRun:
    """Result of serving all requests with one technique."""

    served: list[AnsweredRequest]
    seconds: float
    max_running: int = 0
    num_waits: int = 0  # for pages, of growing answers
    host_s: float = 0.0  # time of the host's stages


class HostStages:
    """Tokenising and detokenising of a run's requests, with their times."""

    def __init__(self, tokenizer: Tokenizer, requests: Sequence[TimedRequest]) -> None:
        self._tokenizer = tokenizer
        self._requests = requests
        self._detokenizers: dict[int, Detokenizer] = {}
        self._next = self._num_ended = 0
        self.host_s = 0.0
        self.served = [AnsweredRequest() for _ in requests]
        self.began = time.monotonic()

    @property
    def have_ended(self) -> bool:
        """True once every request has all of its tokens."""
        return self._num_ended == len(self._requests)

    @property
    def next_at(self) -> float | None:
        """Instant at which the next request is sent; None after the last one."""
        return self.began + self._requests[self._next].at_s if self._next < len(self._requests) else None

    def arrive(self, submit: Callable[[int, list[int], int], None]) -> None:
        """Tokenise and submit the requests that are due."""
        while (at := self.next_at) is not None and at <= time.monotonic():
            began, number, request = time.monotonic(), self._next, self._requests[self._next]
            self._next += 1
            ids = self._tokenizer.encode(request.text, add_special_tokens=True)
            self._detokenizers[number] = self._tokenizer.detokenizer(ids)
            self.host_s += time.monotonic() - began
            submit(number, ids, request.answer_tokens)

    def take(self, tokens: Tokens) -> bytes:
        """Detokenise a step's tokens; return the message that goes to the client."""
        message = WorkerMessage()
        began = time.monotonic()
        now_s = began - self.began
        for number, token in tokens:
            one = self.served[number]
            one.text += self._detokenizers[number].feed(token)
            one.first_token_s = one.first_token_s or now_s
            one.tokens += (token,)
            message.tokens.append(Token(request_id=str(number), token_id=token))
            if len(one.tokens) == self._requests[number].answer_tokens:
                one.end_s = now_s
                self._num_ended += 1
        sent = message.SerializeToString()
        self.host_s += time.monotonic() - began
        return sent


def serve(technique: Technique, requests: Sequence[TimedRequest], setting: ServerSetting) -> ServerRun:
    """Serve the requests and return when all have ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    body = _serve_alone if technique.stages == "serial" else _compute
    process = context.Process(target=body, args=(theirs, technique, requests, setting), daemon=True)
    process.start()
    try:
        ours.recv()  # the model is loaded
        return ours.recv() if technique.stages == "serial" else _serve_beside(ours, requests, setting)
    finally:
        process.kill()
        process.join()


def _serve_beside(worker: Connection, requests: Sequence[TimedRequest], setting: ServerSetting) -> ServerRun:
    """Run the host's stages here; the engine runs in the process behind `worker`."""
    stages = HostStages(Tokenizer(setting.model), requests)

    def submit(number: int, ids: list[int], answer_tokens: int) -> None:
        worker.send((number, ids, answer_tokens))

    while not stages.have_ended:
        stages.arrive(submit)
        wait_s = None if stages.next_at is None else max(0.0, stages.next_at - time.monotonic())
        if worker.poll(wait_s):
            stages.take(worker.recv())
    worker.send(None)
    max_running, num_waits = worker.recv()
    return _run(stages, max_running, num_waits)


def _compute(
    frontend: Connection, technique: Technique, requests: Sequence[TimedRequest], setting: ServerSetting
) -> None:
    """Run the engine, and its admission on a thread of its own, for stages in the process behind `frontend`."""
    inbox: queue.SimpleQueue[StepResult | tuple[int, list[int], int] | None] = queue.SimpleQueue()
    server = _server(technique, setting, inbox.put)

    def receive() -> None:
        while (told := frontend.recv()) is not None:
            inbox.put(told)
        inbox.put(None)

    threading.Thread(target=receive, daemon=True).start()
    frontend.send(None)
    while (told := inbox.get()) is not None:
        if isinstance(told, StepResult):
            if tokens := server.step_ended(told):
                frontend.send(tokens)
        else:
            server.submit(*told)
    frontend.send((server.max_running, server.num_waits))
    server.loop.close()


def _serve_alone(
    parent: Connection, technique: Technique, requests: Sequence[TimedRequest], setting: ServerSetting
) -> None:
    """Run all stages one after the other on the engine's thread."""
    stages: HostStages | None = None
    ended = threading.Event()

    def step(result: StepResult) -> None:
        assert stages is not None
        stages.take(server.step_ended(result))
        stages.arrive(server.submit)
        if stages.have_ended:
            ended.set()

    server = _server(technique, setting, step)
    tokenizer = Tokenizer(setting.model)
    parent.send(None)
    stages = HostStages(tokenizer, requests)
    while (at := stages.next_at) is not None:
        time.sleep(max(0.0, at - time.monotonic()))
        server.loop.between_steps(lambda: stages.arrive(server.submit)).result()
    ended.wait()
    parent.send(_run(stages, server.max_running, server.num_waits))
    server.loop.close()


def _run(stages: HostStages, max_running: int, num_waits: int) -> ServerRun:
    return ServerRun(stages.served, max(one.end_s for one in stages.served), max_running, num_waits, stages.host_s)


def _server(technique: Technique, setting: ServerSetting, on_step: Callable[[StepResult], None]) -> BatchServer:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    model = load_model(setting.model, device="cpu", dtype="float32", threads=setting.threads)
    model.warm_up()
    return BatchServer(model, technique, setting.capacity_tokens, on_step)
