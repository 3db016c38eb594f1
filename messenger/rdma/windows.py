"""Memory windows: ranges that a peer may access. The hardware checks each packet against the open windows.

`Window._lock` guards a window's state and is held while the hardware closes it; a revoke closes windows on any thread.
`on_closed` runs without it.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from messenger.rdma.verbs import abi

if TYPE_CHECKING:
    from messenger.rdma.lane import Lane

_log = logging.getLogger(__name__)


class Window:
    """One range of a region for one connection: a memory window for each of its lanes. Any thread may close it.

    `on_closed` is called after the first `close`, to notify the peer.
    """

    def __init__(self) -> None:
        self.on_closed: Callable[[], None] = _do_nothing
        self._lock = threading.Lock()
        self._windows: dict[Lane, Any] = {}
        self.rkeys: list[int] = []
        self.is_closed = False

    def open_on(self, lane: "Lane", registration: Any, address: int, nbytes: int, access: int) -> int:
        """Bind a window on the lane. Returns the number of the binding request. Raises OSError."""
        from pyverbs.mr import MW

        with self._lock:
            with lane.device.naming("a memory window"):
                window = MW(lane.device.pd, abi.MW_TYPE_2)
            self._windows[lane] = window
            rkey, number = lane.pair.bind(window, registration, address, nbytes, access)
            self.rkeys.append(rkey)
            return number

    def close(self) -> None:
        """Close the window. On return, the hardware rejects accesses under its keys and has finished earlier ones.

        (Soft-RoCE on several processors may still be copying one packet.)
        """
        with self._lock:
            was_closed, self.is_closed = self.is_closed, True
            windows, self._windows = self._windows, {}
            for lane, window in windows.items():
                _close(lane, window)
        if not was_closed:
            self.on_closed()

    def close_on(self, lane: "Lane") -> None:
        """Close it on one lane. Must precede the end of the lane's queue pair: soft-RoCE waits a minute for windows."""
        with self._lock:
            window = self._windows.pop(lane, None)
            if window is not None:
                _close(lane, window)


class Windows:
    """The open windows of one connection."""

    def __init__(self) -> None:
        self._open: list[Window] = []

    def open(self) -> Window:
        """Create a window, on no lane yet."""
        self._open = [*(one for one in self._open if not one.is_closed), window := Window()]
        return window

    def close(self) -> None:
        """Close every window, even if closing one raises."""
        with contextlib.ExitStack() as rest:
            for window in self._open:
                rest.callback(window.close)

    def close_on(self, lane: "Lane") -> None:
        """Close all windows on one lane, as `Window.close_on`."""
        for window in self._open:
            window.close_on(lane)


def _do_nothing() -> None:
    pass


def _close(lane: "Lane", window: Any) -> None:
    """Close the window or, if the device fails to, stop the queue pair to which it is bound."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        window.close()
    except PyverbsError as error:
        _log.warning("%s cannot close a memory window, so its queue pair is stopped: %s", lane.device.name, error)
        lane.pair.fail()
