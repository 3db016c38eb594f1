"""Bounded log of what peers do wrong: their number of messages is not under this process's control."""

import logging
import threading
import time

_INTERVAL_S = 60.0
_MOST_PEERS = 32


class LimitedLog:
    """Log of warnings about peers: at most one line a minute for each peer, and 32 for all of them.

    The events themselves are counted by metrics. Safe to use from any thread.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._since_s = float("-inf")
        self._peers: set[str] = set()

    def warning(self, peer: str, message: str, *args: object) -> None:
        """Log the message unless the peer, or too many peers, had one in this minute."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._since_s >= _INTERVAL_S:
                self._since_s = now_s
                self._peers.clear()
            if peer in self._peers or len(self._peers) >= _MOST_PEERS:
                return
            self._peers.add(peer)
        self._log.warning(message, *args)
