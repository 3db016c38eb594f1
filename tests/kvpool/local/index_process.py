"""Writes to a shared index for ever, to be killed: `index_process.py FD`, where FD is one end of a socket pair.

Sends the index's descriptor, then takes blocks in and out. Block i lies at offset 64 * i with digests of all i + 1.
"""

import socket
import sys
from typing import Any

import numpy as np

from kvpool.local.shared_index import SharedIndex

NUM_BLOCKS, NUM_LAYERS = 64, 48


class Block:
    """Stub of the interface that the index uses."""

    def __init__(self, i: int) -> None:
        self.key = bytes([i + 1]) * 32
        self.num_tokens = 0
        self.offsets = (64 * i,)
        self.digests = (np.full(NUM_LAYERS, i + 1, "<u8").tobytes(),)


def main(fd: str) -> None:
    index = SharedIndex(7)
    blocks: list[Any] = [Block(i) for i in range(NUM_BLOCKS)]
    index.apply([(True, block) for block in blocks])
    with socket.socket(fileno=int(fd)) as sock:
        socket.send_fds(sock, [index.nbytes.to_bytes(8, "little")], [index.memory.fd])
    rng = np.random.default_rng(0)
    inside = [True] * NUM_BLOCKS
    while True:
        i = int(rng.integers(NUM_BLOCKS // 2))  # the others stay
        inside[i] = not inside[i]
        index.apply([(inside[i], blocks[i])])


if __name__ == "__main__":
    main(*sys.argv[1:])
