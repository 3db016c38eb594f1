"""The pool for processes of its own host: an index and an arena that are mapped, puts in one round trip."""

from kvpool.local.client import LocalPoolClient, RegisteredBlocks
from kvpool.local.protocol import PutStatus

__all__ = ["LocalPoolClient", "PutStatus", "RegisteredBlocks"]
