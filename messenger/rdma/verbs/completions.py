"""One completion queue with its channel: polled, or waited for by its descriptor.

One thread at a time uses it, usually the leader of the connection (`messenger.rdma.link`).
"""

import os
from typing import Any, Final

import numpy as np

from messenger.rdma.verbs import abi
from messenger.rdma.verbs.device import Device
from messenger.rdma.verbs.functions import channel_fd, polling_of

_BATCH = 64

Completions = list[tuple[int, int, int]]
"""(number of the request or RECEIVE_ID, status, bytes) of each, in order."""

_NOTHING: Final[Completions] = []


class CompletionQueue:
    def __init__(self, device: Device, capacity: int) -> None:
        """Create the queue and its channel. Raises OSError if the device has no more resources."""
        from pyverbs.cq import CQ, CompChannel
        from pyverbs.pyverbs_error import PyverbsError

        self._nothing_was_there = PyverbsError
        with device.naming("a completion queue"):
            self._channel = CompChannel(device.context)
            self.cq: Any = CQ(device.context, min(capacity, device.limits.max_cqe), None, self._channel, 0)
        self.fd = channel_fd(self._channel)
        os.set_blocking(self.fd, False)
        self._poll, self._arm = polling_of(self.cq)
        buffer = np.zeros(_BATCH * abi.WC.size, dtype=np.uint8)
        self._view = memoryview(buffer)  # type: ignore[arg-type]
        self._address = int(buffer.ctypes.data)

    def poll(self) -> Completions:
        """Return the available completions, at most 64. Raises OSError if the queue is broken."""
        found = self._poll(_BATCH, self._address)
        if not found:
            return _NOTHING
        if found < 0:
            raise OSError(-found, "the completion queue is broken")
        return [*abi.WC.iter_unpack(self._view[: found * abi.WC.size])]

    def arm(self, *, solicited: bool = False) -> None:
        """Make the descriptor readable with the next completion; the caller must poll once more afterwards.

        With `solicited`, only solicited and failed completions count. (Soft-RoCE does not count failed ones.)
        """
        self._arm(solicited)

    def take_event(self) -> None:
        """Consume the event that made the descriptor readable."""
        try:
            self._channel.get_cq_event(self.cq)
        except self._nothing_was_there:
            pass

    def close(self) -> None:
        """Destroy the queue, after its queue pairs."""
        self.cq.close()
        self._channel.close()
