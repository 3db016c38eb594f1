"""The front door's view of the conductor: calls with deadlines, repeated while it is away."""

import asyncio
import logging
from time import monotonic
from typing import Final

from frontend.errors import GenerationFailed, RequestDeadline
from messenger.control import ControlError, DeadlineExceeded, Refused, Unavailable, call, open_channel
from moonpool_proto.v1 import conductor_pb2, conductor_pb2_grpc

_log = logging.getLogger(__name__)
_CALL_S: Final = 5.0  # one try of one call
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_COMPLETE_S: Final = 15.0  # a restarted conductor takes seconds; its ledger outlives a lost Complete anyway


class ConductorClient:
    """One channel to the conductor."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._channel = open_channel(target)
        self._stub: conductor_pb2_grpc.ConductorAsyncStub = conductor_pb2_grpc.ConductorStub(self._channel)

    async def schedule(
        self, request: conductor_pb2.ScheduleRequest, *, deadline_s: float
    ) -> conductor_pb2.Placement | conductor_pb2.Rejection:
        """Ask for a place until the conductor answers. Raises RequestDeadline at `deadline_s` (the monotonic clock)."""
        pause_s = _FIRST_PAUSE_S
        while True:
            left_s = deadline_s - monotonic()
            try:
                reply = await call(
                    self._stub.Schedule(request, wait_for_ready=True),
                    what="Conductor.Schedule",
                    target=self.target,
                    deadline_s=max(0.0, min(left_s, _CALL_S)),
                )
                break
            except Refused as error:
                raise GenerationFailed(
                    f"the conductor refused the request: {error}", code="schedule_refused"
                ) from error
            except (Unavailable, DeadlineExceeded) as error:
                if monotonic() + pause_s >= deadline_s:
                    raise RequestDeadline(f"no placement before the request's deadline: {error}") from error
                _log.warning("conductor away, trying again: %s", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return reply.rejection if reply.WhichOneof("result") == "rejection" else reply.placement

    async def complete(self, request: conductor_pb2.CompleteRequest) -> None:
        """The last word on a request or an attempt. Given up with a warning when the conductor stays away."""
        try:
            await call(
                self._stub.Complete(request, wait_for_ready=True),
                what="Conductor.Complete",
                target=self.target,
                deadline_s=_COMPLETE_S,
            )
        except ControlError as error:
            _log.warning("outcome %s of %s not delivered: %s", request.outcome, request.request_id, error)

    async def cluster(self, *, deadline_s: float) -> conductor_pb2.ClusterReply:
        """The cluster's state; `deadline_s` is a duration. Raises ControlError."""
        return await call(
            self._stub.Cluster(conductor_pb2.ClusterRequest()),
            what="Conductor.Cluster",
            target=self.target,
            deadline_s=deadline_s,
        )

    async def close(self) -> None:
        """Close the channel; running calls fail."""
        await self._channel.close()
