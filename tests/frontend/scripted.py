"""A scripted conductor and scripted workers that speak the real protocol over unix sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moonpool_proto.v1 import conductor_pb2, conductor_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.control import ControlServer, start_server
from rpc.versions import own_software

WAIT_S = 10.0


async def answer_calls(
    messages: AsyncIterator[conductor_pb2.FrontendCalls],
    context: Any,
    schedule: Callable[[conductor_pb2.ScheduleRequest], Awaitable[conductor_pb2.ScheduleReply]],
    complete: Callable[[conductor_pb2.CompleteRequest], None],
) -> None:
    """A frontend's stream as a conductor serves it, but that calls may be answered in any order."""
    await context.write(conductor_pb2.ConductorAnswers())
    one_at_a_time, tasks = asyncio.Lock(), set()

    async def answered(call: conductor_pb2.FrontendCall) -> None:
        answer = conductor_pb2.ConductorAnswer(number=call.number)
        if call.HasField("schedule"):
            answer.schedule.CopyFrom(await schedule(call.schedule))
        else:
            complete(call.complete)
            answer.complete.SetInParent()
        async with one_at_a_time:
            await context.write(conductor_pb2.ConductorAnswers(answers=[answer]))

    try:
        async for message in messages:
            tasks |= {asyncio.create_task(answered(call)) for call in message.calls}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ScriptedConductor(conductor_pb2_grpc.ConductorServicer):
    """Places where `place` says; keeps what it was asked and told."""

    def __init__(self, place: Callable[[conductor_pb2.ScheduleRequest], conductor_pb2.ScheduleReply]) -> None:
        self.place = place
        self.scheduled: list[conductor_pb2.ScheduleRequest] = []
        self.completed: asyncio.Queue[conductor_pb2.CompleteRequest] = asyncio.Queue()
        self.cluster = conductor_pb2.ClusterReply(ready_models=["tiny"])
        self.tenants: list[str] = []  # that the frontend says it knows

    async def Schedule(self, request_iterator: Any, context: Any) -> None:
        await answer_calls(request_iterator, context, self.schedule, self.completed.put_nowait)

    async def schedule(self, request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        self.scheduled.append(request)
        return self.place(request)

    async def Cluster(self, request: Any, context: Any) -> conductor_pb2.ClusterReply:
        self.tenants = list(request.tenants)
        return self.cluster

    async def completion(self) -> conductor_pb2.CompleteRequest:
        """The next Complete."""
        return await within(self.completed.get())


def logprob_of(token_id: int, rank: int) -> float:
    """Return the scripted log-probability of a token: a number exact in float32."""
    return -(token_id % 8) / 8 - rank


def add_logprobs(token: worker_pb2.Token, submit: worker_pb2.Submit) -> None:
    """As far as they were asked for: every token is the second likeliest, after its successor."""
    sampling = submit.sampling
    if sampling.HasField("logprobs"):
        ids = [token.token_id + offset for offset in (1, 0, 2, 3, 4)][: sampling.logprobs]
        token.logprobs.logprob, token.logprobs.rank = logprob_of(token.token_id, 2), 2
        token.logprobs.top_ids.extend(ids)
        token.logprobs.top_logprobs.extend(logprob_of(top, rank) for rank, top in enumerate(ids, start=1))
    if sampling.HasField("prompt_logprobs") and token.index == 0:
        prompt = np.frombuffer(submit.prompt_ids, "<i4")[1:]
        num_top = sampling.prompt_logprobs
        top = prompt[:, None] + np.arange(1, num_top + 1, dtype="<i4")
        token.prompt_logprobs.num_top = num_top
        token.prompt_logprobs.logprobs = np.array([logprob_of(row, 9) for row in prompt.tolist()], "<f4").tobytes()
        token.prompt_logprobs.ranks = np.full(len(prompt), 9, "<u4").tobytes()
        token.prompt_logprobs.top_ids = top.tobytes()
        token.prompt_logprobs.top_logprobs = np.tile(-np.arange(1, num_top + 1, dtype="<f4"), len(prompt)).tobytes()


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Answers submits with `on_submit`, or leaves them to the test, which then sends tokens itself."""

    def __init__(self, node_id: str, target: str, incarnation: int) -> None:
        self.ref = conductor_pb2.NodeRef(node_id=node_id, incarnation=incarnation, target=target)
        self.on_submit: Callable[[worker_pb2.Submit], Awaitable[None]] | None = None
        self.hellos: list[worker_pb2.Hello] = []
        self.submits: asyncio.Queue[worker_pb2.Submit] = asyncio.Queue()
        self.cancels: asyncio.Queue[worker_pb2.Cancel] = asyncio.Queue()
        self._outbox: asyncio.Queue[worker_pb2.WorkerMessage | None] = asyncio.Queue()
        self.software = own_software()
        self._server: ControlServer | None = None

    async def start(self) -> None:
        self._server = await start_server(
            self.ref.target, lambda server: worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        )

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerMessage]:
        first = await anext(aiter(request_iterator))
        self.hellos.append(first.hello)
        self._outbox = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            yield worker_pb2.WorkerMessage(software=self.software)
            while (message := await self._outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, messages: AsyncIterator[worker_pb2.FrontendMessage]) -> None:
        async for message in messages:
            if message.HasField("cancel"):
                self.cancels.put_nowait(message.cancel)
            elif self.on_submit is not None:
                await self.on_submit(message.submit)
            else:
                self.submits.put_nowait(message.submit)

    async def submitted(self) -> worker_pb2.Submit:
        """The next Submit."""
        return await within(self.submits.get())

    async def cancelled(self, attempt: int = 0) -> str:
        """The request of the next Cancel, which must be of this attempt."""
        cancel = await within(self.cancels.get())
        assert cancel.attempt == attempt
        return str(cancel.request_id)

    def send(
        self,
        submit: worker_pb2.Submit,
        first: int,
        ids: Sequence[int],
        *,
        finish: int = 0,
        cached: int | None = None,
        approximate: int = 0,
    ) -> None:
        """Tokens `ids` from index `first` on, in one message; `finish` goes with the last, `cached` with the first."""
        message = worker_pb2.WorkerMessage()
        for index, token_id in enumerate(ids, start=first):
            token = message.tokens.add(
                request_id=submit.request_id, attempt=submit.attempt, index=index, token_id=token_id
            )
            if cached is not None and index == first:
                timing = worker_pb2.Timing(cached_tokens=cached, queue_s=0.5, load_s=0.25, prefill_s=0.125)
                timing.approximate_tokens = approximate
                timing.cached_dram_tokens, timing.cached_ssd_tokens, timing.cached_remote_tokens = 4, 2, 1
                token.timing.CopyFrom(timing)
            add_logprobs(token, submit)
        if finish:
            message.tokens[-1].finish = finish  # type: ignore[assignment]
        self._outbox.put_nowait(message)

    def fail(self, submit: worker_pb2.Submit, code: str, *, retryable: bool, suspect: str = "") -> None:
        self._outbox.put_nowait(
            worker_pb2.WorkerMessage(
                failures=[
                    worker_pb2.Failure(
                        request_id=submit.request_id,
                        attempt=submit.attempt,
                        code=code,
                        message=f"scripted {code}",
                        retryable=retryable,
                        suspect_node_id=suspect,
                    )
                ]
            )
        )

    def end_stream(self) -> None:
        """As a worker's death looks from outside."""
        self._outbox.put_nowait(None)


class ScriptedCluster:
    """A conductor and workers; by default p0 prefills, d0 decodes and `answer` tells the tokens."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.workers: dict[str, ScriptedWorker] = {}
        self.conductor_target = f"unix:{run_dir}/c.sock"
        self.conductor = ScriptedConductor(lambda request: self.placement("p0", "d0"))
        self._server: ControlServer | None = None

    async def add(self, node_id: str, incarnation: int = 1) -> ScriptedWorker:
        worker = ScriptedWorker(node_id, f"unix:{self.run_dir}/{node_id}.sock", incarnation)
        await worker.start()
        self.workers[node_id] = worker
        return worker

    async def start_conductor(self) -> None:
        self._server = await start_server(
            self.conductor_target,
            lambda server: conductor_pb2_grpc.add_ConductorServicer_to_server(self.conductor, server),
        )

    async def stop_conductor(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def stop(self) -> None:
        await self.stop_conductor()
        for worker in self.workers.values():
            await worker.stop()

    def placement(self, prefill: str, decode: str | None = None) -> conductor_pb2.ScheduleReply:
        reply = conductor_pb2.ScheduleReply()
        reply.placement.prefill.CopyFrom(self.workers[prefill].ref)
        if decode is not None:
            reply.placement.decode.CopyFrom(self.workers[decode].ref)
        return reply

    def answer_with(self, answer: Callable[[worker_pb2.Submit], tuple[list[int], int]]) -> None:
        """From now on p0 and d0 answer each submit with (tokens, finish of the last)."""
        prefill, decode = self.workers["p0"], self.workers["d0"]

        async def on_submit(submit: worker_pb2.Submit) -> None:
            ids, finish = answer(submit)
            start = submit.generated
            last = start + 1 == len(ids)
            prefill.send(submit, start, ids[start : start + 1], finish=finish if last else 0, cached=8)
            for index in range(start + 1, len(ids)):
                decode.send(submit, index, [ids[index]], finish=finish if index == len(ids) - 1 else 0)

        prefill.on_submit = on_submit


async def within(work: Awaitable[Any]) -> Any:
    """`work`'s result, soon; else the test fails."""
    async with asyncio.timeout(WAIT_S):
        return await work
