"""Scripted nodes: a prefill and a decode node that implement the real protocol and compute nothing, in one process.

    python -m benchmarks.frontend.nodes CONDUCTOR_TARGET RUN_DIR MODEL MAX_LEN BLOCK_TOKENS STEP_SECONDS

They join the conductor and report to it like workers. The prefill node sends each request's first token at once; the
decode node sends the others, in one message per step for all decoding requests.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from moonpool_proto.v1 import common_pb2, conductor_pb2, worker_pb2
from moonpool_proto.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from rpc.control import run, start_server
from worker.reporter import JoinStream

_FIRST_ID, _IDS = 500, 100
_CAPACITY_TOKENS = 1 << 30


class ScriptedNode(WorkerServicer):  # other calls remain unimplemented
    """Attach streams of one node and its stream to the conductor."""

    def __init__(self, node: conductor_pb2.Node, conductor: str) -> None:
        self.node = node
        self.joining = JoinStream(node, conductor, self._fill, lambda command: None)
        self.decoding: dict[str, list[int]] = {}  # by request: [index of the next token, number of tokens, attempt]
        self.decoder = self  # the node that decodes requests after their first token
        self._outbox: asyncio.Queue[worker_pb2.WorkerMessage] = asyncio.Queue()

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        reading: asyncio.Task[None] | None = None
        try:
            await anext(aiter(request_iterator))
            self._outbox = asyncio.Queue()
            await context.write(worker_pb2.WorkerMessage())
            reading = asyncio.create_task(self._read(request_iterator))
            while True:
                await context.write(await self._outbox.get())
        finally:
            if reading is not None:
                reading.cancel()

    async def _read(self, messages: AsyncIterator[worker_pb2.FrontendMessage]) -> None:
        async for message in messages:
            if message.HasField("cancel"):
                self._end(message.cancel.request_id, message.cancel.attempt)
            elif message.HasField("submit"):
                self._prefill(message.submit)

    def _prefill(self, submit: worker_pb2.Submit) -> None:
        told, wanted = self.joining.progress, submit.sampling.max_tokens
        told(submit.request_id, submit.attempt, conductor_pb2.PHASE_PREFILL_STARTED)
        told(submit.request_id, submit.attempt, conductor_pb2.PHASE_PREFILL_ENDED)
        finish = worker_pb2.FINISH_LENGTH if wanted == 1 else worker_pb2.FINISH_NONE
        token = worker_pb2.Token(
            request_id=submit.request_id, attempt=submit.attempt, index=0, token_id=_FIRST_ID, finish=finish
        )
        token.timing.prefill_s = 0.001
        self._outbox.put_nowait(worker_pb2.WorkerMessage(tokens=[token]))
        if wanted > 1:
            self.decoder.decoding[submit.request_id] = [1, wanted, submit.attempt]
            self.decoder.joining.progress(submit.request_id, submit.attempt, conductor_pb2.PHASE_DECODE_JOINED)
        told(submit.request_id, submit.attempt, conductor_pb2.PHASE_ENDED)

    def step(self) -> None:
        """Send one token for each decoding request."""
        message = worker_pb2.WorkerMessage()
        for request_id, state in list(self.decoding.items()):
            index, wanted, attempt = state
            state[0] += 1
            message.tokens.add(
                request_id=request_id,
                attempt=attempt,
                index=index,
                token_id=_FIRST_ID + index % _IDS,
                finish=worker_pb2.FINISH_LENGTH if index == wanted - 1 else worker_pb2.FINISH_NONE,
            )
            if index == wanted - 1:
                self._end(request_id, attempt)
        if message.tokens:
            self._outbox.put_nowait(message)

    def _end(self, request_id: str, attempt: int) -> None:
        if self.decoding.pop(request_id, None) is not None:
            self.joining.progress(request_id, attempt, conductor_pb2.PHASE_ENDED)

    def _fill(self, report: conductor_pb2.NodeReport) -> None:
        report.num_running, report.free_tokens = len(self.decoding), _CAPACITY_TOKENS


def described(name: str, role: int, run_dir: str, model: str, max_len: int, block_tokens: int) -> conductor_pb2.Node:
    """Return the description with which a node joins."""
    return conductor_pb2.Node(
        node_id=name,
        role=role,  # type: ignore[arg-type]
        incarnation=secrets.randbits(63),
        target=f"unix:{run_dir}/{name}.sock",
        model=model,
        kv_namespace=bytes(16),
        spec=common_pb2.KvSpec(
            groups=[common_pb2.KvGroup(kind="full", layers=[0], kv_heads=1, head_dim=8, dtype="float32")],
            block_tokens=block_tokens,
        ),
        capacity_tokens=_CAPACITY_TOKENS,
        max_model_len=max_len,
        max_batch=4096,
        prefill_chunk_tokens=512,
        kv_bytes_per_token=64,
        model_fingerprint="scripted",
        hardware="scripted",
        engine="scripted",
    )


async def main(conductor: str, run_dir: str, model: str, max_len: int, block_tokens: int, step_s: float) -> None:
    """Serve until SIGTERM; prints a line once both nodes have joined."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    nodes = [
        ScriptedNode(  # type: ignore[abstract]
            described(name, role, run_dir, model, max_len, block_tokens), conductor
        )
        for name, role in (("prefill-0", common_pb2.ROLE_PREFILL), ("decode-0", common_pb2.ROLE_DECODE))
    ]
    nodes[0].decoder = nodes[1]
    servers = []
    for node in nodes:
        add = lambda server, node=node: add_WorkerServicer_to_server(node, server)  # noqa: E731
        servers.append(await start_server(node.node.target, add))
    tasks = [asyncio.create_task(node.joining.run()) for node in nodes]
    for node in nodes:
        either = [asyncio.ensure_future(event.wait()) for event in (node.joining.joined, node.joining.refused, stop)]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if node.joining.is_kept_out:
            raise SystemExit(node.joining.last_refusal)
    print("joined", flush=True)
    stopped = asyncio.create_task(stop.wait())
    while not stopped.done():
        await asyncio.sleep(step_s or 0.001)
        nodes[1].step()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in servers:
        await each.stop(0.2)


if __name__ == "__main__":
    _, conductor, run_dir, model, max_len, block_tokens, step_s = sys.argv
    run(main(conductor, run_dir, model, int(max_len), int(block_tokens), float(step_s)))
