"""Shared-memory access to this host's pool node: a mapped index and arena, read without a call, and puts in one round
trip.

    pool node's process    server.py         LocalPoolServer: the unix socket and puts
                           shared_index.py   SharedIndex: the only writer of the index
    client's process       client.py         LocalPoolClient: gets, puts, touches
                           index_reading.py  look-ups and gets in the mapped index and arena
    both                   index_layout.py   the index in memory, and its synchronisation
                           protocol.py       messages on the socket
                           block_copy.py     copies and digests of blocks; *_kernels.py: compiled loops
"""

from kvpool.local.client import LocalPoolClient, RegisteredBlocks
from kvpool.local.protocol import PutStatus

__all__ = ["LocalPoolClient", "PutStatus", "RegisteredBlocks"]
