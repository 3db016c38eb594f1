"""A step of many sequences comes in one message; the event loop goes round while its tokens are handed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from frontend.inbox import Inbox, TokenArrived
from frontend.streams import WorkerStreams
from moonpool_proto.v1.conductor_pb2 import NodeRef
from moonpool_proto.v1.worker_pb2 import FrontendMessage, Token, WorkerMessage
from moonpool_proto.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from rpc.control import start_server

MANY = 1000


class OneStep(WorkerServicer):
    """Tells one token of each of many requests at once."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def Attach(self, messages: AsyncIterator[FrontendMessage], context: object) -> AsyncIterator[WorkerMessage]:
        yield WorkerMessage()
        await self.go.wait()
        yield WorkerMessage(tokens=[Token(request_id=str(i), token_id=i) for i in range(MANY)])
        await asyncio.Event().wait()


async def test_the_loop_goes_round_within_a_step_of_a_thousand_streams(tmp_path: Path) -> None:
    worker = OneStep()
    server = await start_server(f"unix:{tmp_path}/w.sock", lambda s: add_WorkerServicer_to_server(worker, s))
    streams = WorkerStreams("f", 1, 20.0)
    try:
        stream = await streams.attach(NodeRef(node_id="d", incarnation=1, target=server.target))
        inboxes = [Inbox(16, lambda: None) for _ in range(MANY)]
        for i, inbox in enumerate(inboxes):
            stream.subscribe(str(i), 0, inbox)
        rounds: list[int] = []  # the loop's round in which each request was woken

        async def woken(inbox: Inbox) -> int:
            (event,) = await inbox.take()
            assert isinstance(event, TokenArrived)
            rounds.append(turn)
            return event.token.token_id

        waiting = asyncio.gather(*map(woken, inboxes))
        turn = 0
        worker.go.set()
        while not waiting.done():
            turn += 1
            await asyncio.sleep(0)
        assert await waiting == list(range(MANY))  # each request its own token
        assert rounds == sorted(rounds)
        assert max(rounds.count(each) for each in set(rounds)) <= 128
    finally:
        await streams.close()
        await server.stop(0.1)
