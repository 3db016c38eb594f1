"""Calls under way, and the end of them: after it none is let in, and one thread waits for the last to leave."""

import threading

__all__ = ["OpenCalls"]


class OpenCalls:
    """Counts calls; from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._ended = False

    def enter(self) -> bool:
        """Whether the call may begin; it then must `leave`."""
        with self._changed:
            self._num_inside += not self._ended
            return not self._ended

    def leave(self) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    def end(self) -> bool:
        """Let no more in; True for the first to say so."""
        with self._changed:
            first, self._ended = not self._ended, True
            return first

    def wait(self) -> None:
        """Until nobody is inside."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_inside)
