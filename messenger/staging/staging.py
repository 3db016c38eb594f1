"""DeviceStaging: how bytes get from an engine's memory into the messenger's reach, and back.

Streams of `MirrorStaging` and what waits for what (▶ = waits on the device, ┊ = waits on a thread other than the
engine's):

  compute     … layer l written ●─────────────────────────▶ layer l reads loaded KV …
                                │ to_host                ▲ Ticket.order_compute
  out                           └▶ copy ● ┊ sender       │
  in                              copy ●─────────────────┘ to_device

- `to_host` is called on the engine's thread after the kernels that write a layer are queued: the copy waits, on the
  device, for the compute stream's work up to this call, and for earlier copies to the device.
- `to_device` waits for nothing: slots whose earlier use has not ended are not given out (see `all_ended`).
- No method but `Ticket.wait` and `close` blocks.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from messenger.staging.copies import Ranges, merged
from messenger.staging.mirror import PinnedMirror
from messenger.staging.runtime import DeviceRuntime, DeviceStream
from messenger.staging.ticket import READY, EventTicket, FailedTicket, StagingError, Ticket, TicketsOfAll

_log = logging.getLogger(__name__)


class DeviceStaging(ABC):
    """Interface between the memory in which an engine computes and the memory registered with the messenger."""

    is_needed = True
    """False if `to_host` and `to_device` have nothing to do."""

    @abstractmethod
    def to_host(self, parts: Iterable[Ranges]) -> Ticket:
        """Make ranges readable by the messenger once the compute stream has done all work queued so far.

        After the ticket's `wait` the messenger may read them. Errors are raised by the ticket.
        """

    @abstractmethod
    def to_device(self, parts: Iterable[Ranges]) -> Ticket:
        """Make received ranges readable by the engine: after the ticket's `wait`, or by work queued after its
        `order_compute`. Errors are raised by the ticket.
        """

    @abstractmethod
    def all_ended(self) -> Ticket:
        """Return a ticket of everything queued so far: copies and computation. Slots must not be reused before."""

    def close(self) -> None:
        """Wait until all copies have ended, and release what staging has allocated."""
        return


class HostStaging(DeviceStaging):
    """Staging of an engine that computes in the registered memory itself: there is nothing to copy or to wait for."""

    is_needed = False

    def to_host(self, parts: Iterable[Ranges]) -> Ticket:
        return READY

    def to_device(self, parts: Iterable[Ranges]) -> Ticket:
        return READY

    def all_ended(self) -> Ticket:
        return READY


class DirectStaging(DeviceStaging):
    """Staging of device memory that adapters read and write themselves: nothing is copied, but computation is awaited.

    An adapter's writes are visible to work that is queued after their notification (`Registered.settle`).
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._compute = runtime.compute

    def to_host(self, parts: Iterable[Ranges]) -> Ticket:
        return self.all_ended()

    def to_device(self, parts: Iterable[Ranges]) -> Ticket:
        return READY

    def all_ended(self) -> Ticket:
        try:
            return EventTicket(self._compute.record(), self._compute)
        except Exception as error:
            return FailedTicket(error)


class MirrorStaging(DeviceStaging):
    """Staging through a page-locked host mirror of device memory, with one copy stream per direction."""

    def __init__(self, runtime: DeviceRuntime, mirror: NDArray[np.uint8]) -> None:
        """`mirror`: the registered memory."""
        self._runtime = runtime
        self._out, self._in = runtime.new_stream(), runtime.new_stream()
        # Each guards a stream from its wait or first copy to the record of its event.
        self._out_lock, self._in_lock = threading.Lock(), threading.Lock()
        self._mirror = PinnedMirror(runtime, mirror)

    def to_host(self, parts: Iterable[Ranges]) -> Ticket:
        try:
            with self._out_lock:
                self._out.wait(self._runtime.compute.record())
                self._out.wait(self._in.record())  # loaded bytes may be on their way to the same slots
                return self._copy(self._out, parts, to_host=True)
        except Exception as error:
            return FailedTicket.after(self._out, error)

    def to_device(self, parts: Iterable[Ranges]) -> Ticket:
        try:
            with self._in_lock:
                return self._copy(self._in, parts, to_host=False)
        except Exception as error:
            return FailedTicket.after(self._in, error)

    def _copy(self, stream: DeviceStream, parts: Iterable[Ranges], *, to_host: bool) -> Ticket:
        copies = merged(parts, self._runtime.max_pitch)
        if not copies:
            return READY
        self._runtime.copy(stream, copies, to_host=to_host)
        return EventTicket(stream.record(), self._runtime.compute)

    def all_ended(self) -> Ticket:
        compute = self._runtime.compute
        try:
            events = [stream.record() for stream in (compute, self._out, self._in)]
        except Exception as error:
            return FailedTicket(error)
        return TicketsOfAll([EventTicket(event, compute) for event in events])

    def close(self) -> None:
        try:
            self.all_ended().wait()
        except StagingError as error:
            _log.warning("copies failed before the end of staging: %s", error)
        self._mirror.close()
