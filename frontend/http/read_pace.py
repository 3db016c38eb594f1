"""Pace at which bytes are read from clients, so that fast uploads do not keep the event loop from other clients."""


class ReadPace:
    """Bound of `nbytes_per_s`; after a pause in reading, up to `burst_s` seconds of it are read at once."""

    def __init__(self, nbytes_per_s: float, burst_s: float) -> None:
        self._nbytes_per_s, self._burst_s = nbytes_per_s, burst_s
        self._until_s = 0.0

    def pause_s(self, nbytes: int, now_s: float) -> float:
        """Return how long to wait before more is read, now that `nbytes` have been."""
        self._until_s = max(self._until_s, now_s - self._burst_s) + nbytes / self._nbytes_per_s
        return max(0.0, self._until_s - now_s)
