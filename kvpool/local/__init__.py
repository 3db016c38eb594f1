"""The pool for processes of its own host: a mapped index and arena that are read without a call, and puts in one round
trip.
"""

from kvpool.local.client import LocalPoolClient, RegisteredBlocks
from kvpool.local.protocol import PutStatus

__all__ = ["LocalPoolClient", "PutStatus", "RegisteredBlocks"]
