"""One completion queue with its channel: polled, or waited for by its descriptor."""

import contextlib
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from messenger.rdma.verbs import abi
from messenger.rdma.verbs.device import Device
from messenger.rdma.verbs.functions import channel_fd, polling_of

_BATCH = 64

Completions = npt.NDArray[np.void]


class CompletionQueue:
    def __init__(self, device: Device, capacity: int) -> None:
        """Raises OSError when the device gives no more."""
        from pyverbs.cq import CQ, CompChannel

        with device.naming("a completion queue"):
            self._channel = CompChannel(device.context)
            self.cq: Any = CQ(device.context, min(capacity, device.limits.max_cqe), None, self._channel, 0)
        self.fd = channel_fd(self._channel)
        os.set_blocking(self.fd, False)
        self._poll, self._arm = polling_of(self.cq)
        self._buffer = np.zeros(_BATCH, dtype=abi.WC)
        self._address = int(self._buffer.ctypes.data)

    def poll(self) -> Completions:
        """What completed, of abi.WC; empty if nothing did. Raises OSError when the queue is broken."""
        found = self._poll(_BATCH, self._address)
        if found < 0:
            raise OSError(-found, "the completion queue is broken")
        return self._buffer[:found].copy()

    def arm(self) -> None:
        """Let the descriptor become readable with the next completion; poll once more afterwards."""
        self._arm()

    def take_event(self) -> None:
        """Take what made the descriptor readable."""
        from pyverbs.pyverbs_error import PyverbsError

        with contextlib.suppress(PyverbsError):  # nothing was there
            self._channel.get_cq_event(self.cq)

    def close(self) -> None:
        """After the queue pairs."""
        self.cq.close()
        self._channel.close()
