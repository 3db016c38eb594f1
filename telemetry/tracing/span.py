"""Interface of a span. `OFF`, used for unsampled requests, does nothing."""

from types import TracebackType
from typing import Final, Literal, Self

__all__ = ["OFF", "Kind", "Span"]

Kind = Literal["internal", "server", "client"]


class Span:
    """A span that is not recorded; base class of recorded ones.

    It ends with its `with` block or by `end`; an exception that leaves the block is recorded.
    """

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        """Context to pass to other processes; "" if the span is not recorded."""
        return ""

    @property
    def is_on(self) -> bool:
        """True if the span is recorded; check it before computing costly attributes."""
        return False

    def child(self, name: str, kind: Kind = "internal", **about: str | int | float | bool) -> "Span":
        """Begin a child span now."""
        return self

    def past(self, name: str, start_s: float, end_s: float, **about: str | int | float | bool) -> None:
        """Add a child span that has ended; `time.monotonic()` instants of this process."""

    def note(self, **about: str | int | float | bool) -> None:
        """Add attributes, whose names get the prefix moonpool.

        Names of OpenTelemetry's conventions are written with double underscores for dots, and get no prefix.
        """

    def event(self, name: str) -> None:
        """Add an event that happens now."""

    def fail(self, why: str) -> None:
        """Mark the span as failed."""

    def end(self) -> None:
        """End the span now. Idempotent."""

    def end_by(self, error: BaseException) -> None:
        """Set the latest time at which the span ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


OFF: Final = Span()
