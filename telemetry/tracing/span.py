"""What the project's code does with a span. `OFF`, which is most of them, does nothing and costs a call."""

from types import TracebackType
from typing import Final, Literal, Self

__all__ = ["OFF", "Kind", "Span"]

Kind = Literal["internal", "server", "client"]


class Span:
    """A span that is not recorded. Ends at the end of its `with`, or by `end`; an exception that leaves it is noted."""

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        """For those who go on from here; "" where nothing is recorded."""
        return ""

    @property
    def is_on(self) -> bool:
        """Whether it is recorded: for facts that cost something to make."""
        return False

    def child(self, name: str, kind: Kind = "internal", **about: str | int | float | bool) -> "Span":
        """A part of it that begins now."""
        return self

    def past(self, name: str, start_s: float, end_s: float, **about: str | int | float | bool) -> None:
        """A part of it that is over; `time.monotonic()` instants of this process."""

    def note(self, **about: str | int | float | bool) -> None:
        """Facts about it; names without the prefix moonpool., but those of OpenTelemetry's conventions, with dots for
        double underscores."""

    def event(self, name: str) -> None:
        """Something that happened now."""

    def fail(self, why: str) -> None:
        """It did not do what it was for."""

    def end(self) -> None:
        """It is over. Idempotent."""

    def end_by(self, error: BaseException) -> None:
        """It is over by this."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


OFF: Final = Span()
