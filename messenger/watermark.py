"""How much of a large payload its receiver sleeps through: arithmetic, and no system calls.

A receiver that wakes for every segment costs its sender, who has to wake it, as much as the copying does, and itself
as much again. So for large payloads the socket's low-water mark (SO_RCVLOWAT, socket(7)) is raised: half a payload, or
1 MiB, is copied while the rest arrives. It is at most a quarter of the receive buffer, so that the window never closes
for it; the buffer grows with what the way holds (tcp(7), tcp_moderate_rcvbuf), which this does not touch.
"""

__all__ = ["LEAST_NBYTES", "watermark"]

LEAST_NBYTES = 512 << 10
"""Smaller payloads are taken as they come: it takes as many calls to wait for their parts."""
_MOST_NBYTES = 1 << 20


def watermark(nbytes: int, buffer_nbytes: int) -> int:
    """For a payload of so many bytes and a receive buffer (SO_RCVBUF) of so many; 0: wake for whatever comes."""
    return 0 if nbytes < LEAST_NBYTES else min(nbytes // 2, _MOST_NBYTES, buffer_nbytes // 4)
