"""The part of a device's runtime that staging uses. Implemented by `cuda.CudaRuntime`, and by a stand-in in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from messenger.staging.copies import StridedCopy


class DeviceEvent(Protocol):
    """A point in a stream's queue of work."""

    def is_done(self) -> bool:
        """Return True if all work before the point has ended. Does not block. Raises if the work failed."""
        ...

    def synchronize(self) -> None:
        """Block until all work before the point has ended. Raises if the work failed."""
        ...


class DeviceStream(Protocol):
    """A queue of work that the device executes in order, concurrently with other streams."""

    def record(self) -> DeviceEvent:
        """Return an event after all work queued so far. Does not block."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Let work queued from now on start only after the event. Does not block."""
        ...

    def launch(self, work: Callable[[], object]) -> None:
        """Queue the kernels that `work` launches with torch. Does not block.

        `work` is called before or when the device executes them, perhaps by another thread.
        """
        ...


class DeviceRuntime(Protocol):
    """One device and its memory that holds KV. All methods may be called by any thread."""

    max_pitch: int
    """Largest pitch of a strided copy."""

    @property
    def compute(self) -> DeviceStream:
        """The stream on which the engine computes."""
        ...

    def new_stream(self) -> DeviceStream:
        """Return a stream that does not wait for any other by itself."""
        ...

    def pin(self, mirror: NDArray[np.uint8]) -> None:
        """Page-lock the mirror, so that copies do not block their caller. Raises StagingError."""
        ...

    def unpin(self, mirror: NDArray[np.uint8]) -> None:
        """Undo `pin`, after all copies have ended."""
        ...

    def copy(self, stream: DeviceStream, copies: Sequence[StridedCopy], *, to_host: bool) -> None:
        """Queue copies between the pinned mirror and the device's memory, in one call where possible. Does not block.

        Copies of one call may be executed in any order. Raises StagingError.
        """
        ...
