"""The caller's side of a session: finding the owner, its greeting, and questions between the batches.

Everything that can be wrong on the way is told apart: no such host, nobody listens, no answer (a firewall), something
else listens, another version, no memory to lend; and a second time for the port that the bytes go to.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from messenger import Endpoint, RemoteKey
from messenger.frames import VERSION
from moonpool.errors import TransferBenchFailed
from moonpool.transfer_bench.owner import METHOD, SERVICE
from moonpool.transfer_bench.plan import Shape
from moonpool.transfer_bench.report import Settled
from moonpool_proto.v1 import common_pb2
from rpc.control import call, open_channel
from rpc.errors import ControlError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
LISTEN_COMMAND = "moonpool bench messenger --listen"


@dataclass(frozen=True)
class OwnerFacts:
    """What the owner lends, and where."""

    endpoint: Endpoint
    key: RemoteKey
    host: str
    cores: int


class Session:
    """Towards one owner at `host`:`port`; `node_id` is who the caller's messenger must say it is."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._target = f"{f'[{host}]' if ':' in host else host}:{port}"
        self._channel: grpc.aio.Channel | None = None
        self._stream: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
        self.node_id = f"bench-caller-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

    async def open(self, region_nbytes: int) -> OwnerFacts:
        """Ask for memory. Raises TransferBenchFailed."""
        await asyncio.to_thread(probe, self._host, self._port, f"start `{LISTEN_COMMAND}` there")
        self._channel = open_channel(self._target)
        self._stream = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        told = await self._ask({"version": VERSION, "node_id": self.node_id, "region_nbytes": region_nbytes})
        endpoint = Endpoint.from_proto(common_pb2.Endpoint.FromString(bytes.fromhex(told["endpoint"])))
        if told["wildcard"]:
            endpoint = replace(endpoint, tcp_host=self._host)
        return OwnerFacts(endpoint, RemoteKey.unpack(bytes.fromhex(told["key"])), told["host"], told["cores"])

    async def hash_of(self, shape: Shape, base: int) -> str:
        """What `owner.hash_of` gives of the owner's memory."""
        asked = {"ask": "hash", "slice_nbytes": shape.slice_nbytes, "slices": shape.slices, "base": base}
        return str((await self._ask(asked))["hash"])

    async def settle(self) -> Settled:
        """Wait until all that landed has been compared; what was wrong since the last time."""
        return Settled(**await self._ask({"ask": "settle"}))

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._stream is not None
        try:
            await call(self._stream.write(json.dumps(message).encode()), **self._named)
            answer = await call(self._stream.read(), **self._named)
        except ControlError as error:
            raise TransferBenchFailed(
                f"what listens at {self._target} is no `{LISTEN_COMMAND}`, or it has ended: {error}"
            ) from error
        if not isinstance(answer, bytes):
            raise TransferBenchFailed(f"the other side at {self._target} ended the session")
        told: dict[str, Any] = json.loads(answer)
        if "refused" in told:
            raise TransferBenchFailed(f"the other side at {self._target} refuses: {told['refused']}")
        return told

    @property
    def _named(self) -> dict[str, Any]:
        return {"what": SERVICE, "target": self._target, "deadline_s": ANSWER_TIMEOUT_S}


def probe(host: str, port: int, advice: str) -> None:
    """Connect by tcp and leave again. Raises TransferBenchFailed with what is wrong, and the advice."""
    where = f"{host}:{port}"
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except socket.gaierror as error:
        raise TransferBenchFailed(f"there is no host {host!r}: {error.strerror}") from error
    except ConnectionRefusedError as error:
        raise TransferBenchFailed(f"nobody listens at {where}: {advice}") from error
    except TimeoutError as error:
        raise TransferBenchFailed(
            f"no answer from {where} within {CONNECT_TIMEOUT_S:g} s: the host is down, or a firewall drops what goes "
            f"to port {port}; let it through on both hosts and everything between"
        ) from error
    except OSError as error:
        raise TransferBenchFailed(f"{where} cannot be reached: {error.strerror or error}") from error
