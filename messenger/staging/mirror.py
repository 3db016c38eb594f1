"""Host memory that a device copies from and to, page-locked if possible."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from messenger.staging.runtime import DeviceRuntime
from messenger.staging.ticket import StagingError

_log = logging.getLogger(__name__)


class PinnedMirror:
    """Page lock of a mirror. If it cannot be page-locked, copies block their callers; this is logged."""

    def __init__(self, runtime: DeviceRuntime, mirror: NDArray[np.uint8]) -> None:
        self._runtime = runtime
        self._mirror = mirror
        self._is_pinned = False
        try:
            runtime.pin(mirror)
            self._is_pinned = True
        except StagingError as error:
            _log.warning("the host mirror of device memory is not page-locked, so copies block the engine: %s", error)

    def close(self) -> None:
        """Release the lock, after all copies have ended. Raises StagingError."""
        if self._is_pinned:
            self._runtime.unpin(self._mirror)
            self._is_pinned = False
