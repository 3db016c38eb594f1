"""Sender process: `python -m loadtest.sender_process` reads a job from standard input and writes records to standard
output.

The end of its input means stop, so it ends with its parent.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from asyncio import StreamReader, StreamReaderProtocol, StreamWriter, streams
from contextlib import suppress
from dataclasses import dataclass, field

import uvloop

from loadtest.http import allow_many_connections
from loadtest.record import RequestRecord, SendOutcome
from loadtest.sender import LoadPlan, SendTally, send_share
from loadtest.senders import Done, SenderJob, SenderProgress, SenderReady, Start, frame, read_frame
from loadtest.validity import clock_from

_REPORT_EVERY_S = 0.25


@dataclass
class _Outbox(SendTally):
    """Tally that keeps the records of ended requests until they are reported."""

    waiting: list[RequestRecord] = field(default_factory=list)
    reported: int = 0

    def add(self, record: RequestRecord) -> None:
        super().add(record)
        self.waiting.append(record)

    def progress(self) -> SenderProgress:
        """Return the progress since the last call."""
        ended, self.waiting = tuple(self.waiting), []
        self.reported += len(ended)
        return SenderProgress(self.sent, ended)


def main() -> None:
    """Run the job to its end."""
    # The parent handles Ctrl-C: it sends Stop and waits for the records.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Redirect prints to standard error, so that they cannot corrupt the messages.
    output = os.dup(1)
    os.dup2(2, 1)
    allow_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(output))


async def _serve(output: int) -> None:
    reader, writer = await _pipes(output)
    job = await read_frame(reader)
    if not isinstance(job, SenderJob):
        return
    # The load lives until the end: exclude it from garbage collection during the run.
    gc.freeze()
    writer.write(frame(SenderReady()))
    start = await read_frame(reader)
    if isinstance(start, Start):
        # A closed pipe means that the parent has exited.
        with suppress(ConnectionError):
            await _send(job.load, start.at, reader, writer)


async def _send(load: LoadPlan, start: float, reader: StreamReader, writer: StreamWriter) -> None:
    stop, outbox = asyncio.Event(), _Outbox(len(load.requests))
    listening = asyncio.create_task(_stop_on_any(reader, stop))
    sending = asyncio.create_task(send_share(load, clock=clock_from(start), stop=stop, tally=outbox))
    while not sending.done():
        await asyncio.wait([sending], timeout=_REPORT_EVERY_S)
        writer.write(frame(outbox.progress()))
        await writer.drain()
    listening.cancel()
    outbox.waiting += [r for r in sending.result() if r.outcome is SendOutcome.UNFINISHED]
    writer.write(frame(outbox.progress()))
    writer.write(frame(Done(outbox.reported)))
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def _stop_on_any(reader: StreamReader, stop: asyncio.Event) -> None:
    """Set `stop` at the next message, which can only be Stop, or at the end of the input."""
    await read_frame(reader)
    stop.set()


async def _pipes(output: int) -> tuple[StreamReader, StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = StreamReader()
    await loop.connect_read_pipe(lambda: StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(streams.FlowControlMixin, os.fdopen(output, "wb", 0))
    return reader, StreamWriter(transport, protocol, None, loop)


if __name__ == "__main__":
    main()
