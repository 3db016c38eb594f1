"""Look-up of a prompt's blocks in the conductors' directory, for requests that no conductor places."""

from __future__ import annotations

import logging
import time
from typing import Final

from moonpool_proto.v1.conductor_pb2 import LocateReply, LocateRequest
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from rpc.control import ControlError, call, check_target, open_channel
from worker.policy.health import CircuitBreaker
from worker.request import Request

log = logging.getLogger(__name__)

_DEADLINE_S: Final = 0.5
_HOLD_OFF_S, _LONGEST_HOLD_OFF_S = 1.0, 30.0


class BlockLocator:
    """Client of the conductors. A request goes to the first one that answers. Lives on the event loop."""

    def __init__(self, targets: tuple[str, ...], kv_namespace: bytes) -> None:
        """Without targets nothing is looked up. Raises InvalidArgument for a malformed one."""
        for target in targets:
            check_target(target)
        self._channels = {target: open_channel(target) for target in targets}
        self._namespace = kv_namespace
        self._breaker = CircuitBreaker(_HOLD_OFF_S, _LONGEST_HOLD_OFF_S)

    async def close(self) -> None:
        """Close all connections."""
        for channel in self._channels.values():
            await channel.close()

    async def locate(self, request: Request) -> None:
        """Enter in the request's placement the pool nodes that hold its leading blocks.

        Without an answer it stays as it is: then only this host's pool is used.
        """
        if not self._channels or not request.keys:
            return
        asked = LocateRequest(kv_namespace=self._namespace, chain=b"".join(request.keys))
        for target, channel in self._channels.items():
            if not self._breaker.try_pass(target, time.monotonic()):
                continue
            try:
                found: LocateReply = await call(
                    ConductorStub(channel).Locate(asked), what="Conductor.Locate", target=target, deadline_s=_DEADLINE_S
                )
            except ControlError as error:
                self._breaker.failed(target, time.monotonic())
                log.warning("blocks of other hosts are not found: %s", error)
                continue
            self._breaker.succeeded(target)
            request.placement.holders.extend(found.holders)
            request.placement.reuse_blocks = max((held.num_blocks for held in found.holders), default=0)
            return
