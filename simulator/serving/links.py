"""Links of finite speed: whoever sends on one waits for those before it. Congestion is nothing else."""

__all__ = ["Link", "send"]


class Link:
    """One direction of a node's network, or a host's memory or SSD."""

    def __init__(self) -> None:
        self.free_ns = 0


def send(now_ns: int, links: tuple[Link, ...], duration_ns: int) -> int:
    """Bytes that take `duration_ns` alone go over all `links` at once, as soon as all are free: when they arrive."""
    begin_ns = max(now_ns, *(link.free_ns for link in links))
    for link in links:
        link.free_ns = begin_ns + duration_ns
    return begin_ns + duration_ns
