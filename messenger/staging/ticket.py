"""Tickets: handles of copies that were queued and may not have ended."""

from __future__ import annotations

import contextlib

from messenger.errors import MessengerError
from messenger.staging.runtime import DeviceEvent, DeviceStream


class StagingError(MessengerError):
    """Bytes could not be copied between device and host memory."""


class Ticket:
    """Handle of copies in progress. The copied slots must be held until `wait` has returned or raised."""

    @property
    def is_done(self) -> bool:
        """True if the copies have ended, whether successful or not. Does not block."""
        return True

    def wait(self) -> None:
        """Block until the copies have ended; never on the engine's thread. Raises StagingError if they failed."""

    def order_compute(self) -> None:
        """Let work that is queued on the compute stream from now on start after the copies. Does not block.

        Raises StagingError if the copies are known to have failed.
        """


READY = Ticket()
"""Ticket of nothing: the bytes are there."""


class FailedTicket(Ticket):
    """Ticket of copies of which some could not be queued, after those before `event`, if any."""

    def __init__(self, error: BaseException, event: DeviceEvent | None = None) -> None:
        self._error = error
        self._event = event

    @classmethod
    def after(cls, stream: DeviceStream, error: BaseException) -> FailedTicket:
        """Return a ticket that raises the error once the copies that were queued on the stream before it have ended."""
        try:
            return cls(error, stream.record())
        except Exception:
            return cls(error)

    @property
    def is_done(self) -> bool:
        return self._event is None or _is_done(self._event)

    def wait(self) -> None:
        if self._event is not None:
            with contextlib.suppress(Exception):  # the first error is raised
                self._event.synchronize()
        self.order_compute()

    def order_compute(self) -> None:
        raise _staging_error(self._error) from self._error


class EventTicket(Ticket):
    """Ticket of copies that have ended once an event is done."""

    def __init__(self, event: DeviceEvent, compute: DeviceStream) -> None:
        self._event = event
        self._compute = compute

    @property
    def is_done(self) -> bool:
        return _is_done(self._event)

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except Exception as error:
            raise _staging_error(error) from error

    def order_compute(self) -> None:
        try:
            self._compute.wait(self._event)
        except Exception as error:
            raise _staging_error(error) from error


class TicketsOfAll(Ticket):
    """Ticket of several tickets' copies."""

    def __init__(self, tickets: list[Ticket]) -> None:
        self._tickets = tickets

    @property
    def is_done(self) -> bool:
        return all(ticket.is_done for ticket in self._tickets)

    def wait(self) -> None:
        failed: StagingError | None = None
        for ticket in self._tickets:  # all of them: after this, none may be in progress
            try:
                ticket.wait()
            except StagingError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def order_compute(self) -> None:
        for ticket in self._tickets:
            ticket.order_compute()


def _is_done(event: DeviceEvent) -> bool:
    try:
        return event.is_done()
    except Exception:
        return True  # `wait` raises the error


def _staging_error(error: BaseException) -> StagingError:
    if isinstance(error, StagingError):
        return error
    return StagingError(f"a copy between device and host memory failed: {error}")
