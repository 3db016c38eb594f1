"""The memory that bodies of requests may take together while they come in and are read."""

from types import TracebackType
from typing import Self

from frontend.errors import ServiceUnavailable

__all__ = ["BodyRoom", "Place"]


class BodyRoom:
    """Of one front door."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.used_nbytes = 0

    def place(self) -> "Place":
        """For one body; what it took is given back on exit."""
        return Place(self)

    def take(self, nbytes: int) -> None:
        """Raises ServiceUnavailable where all together would be too much."""
        if self.used_nbytes + nbytes > self._nbytes:
            raise ServiceUnavailable(
                f"other requests' bodies take all of the {self._nbytes} bytes there are for bodies; try again soon",
                code="bodies",
                retry_after_s=1.0,
            )
        self.used_nbytes += nbytes


class Place:
    """What one body has taken so far."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room.used_nbytes -= self._taken

    def take(self, nbytes: int) -> None:
        """So much more has come. Raises ServiceUnavailable."""
        self._room.take(nbytes)
        self._taken += nbytes
