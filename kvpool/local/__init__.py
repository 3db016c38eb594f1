"""The pool for processes of its own host: an index and an arena that are mapped, puts in one round trip."""

from kvpool.local.frames import PutStatus
from kvpool.local.pool import LocalPool

__all__ = ["LocalPool", "PutStatus"]
