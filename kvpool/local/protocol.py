"""The messages of a pool node's door and their bytes; sans I/O.

Frames are those of `messenger.frames`. The caller begins with Hello and sends one request at a time; requests marked
"no answer" have none. Descriptors cross beside the first byte of their frame (SCM_RIGHTS).
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

from messenger.frames import Framing

MAGIC, VERSION = b"MPDR", 1
MAX_BODY_NBYTES = 4 << 20


class PutStatus(enum.IntEnum):
    """What became of one block of a Put."""

    STORED = 1
    EXISTS = 2  # it is here already, in DRAM or on SSD, or is just being put by another
    NO_SPACE = 3  # nothing (more) could be evicted for it
    WRONG = 4  # its bytes are not those of its digests


class Attach(NamedTuple):
    """Who calls, for accounting."""

    owner: str
    owner_incarnation: int


class Attached(NamedTuple):
    """Answer to Hello, with the arena's and the index's descriptors."""

    node_id: str
    incarnation: int
    arena_nbytes: int
    index_nbytes: int


class GetIndex(NamedTuple):
    """The index that was known has moved."""


class IndexReply(NamedTuple):
    """Answer to AskIndex, with the index's descriptor."""

    nbytes: int


class RegisterMemory(NamedTuple):
    """The descriptor that comes with this is the caller's memory `region_id`, from which it will put."""

    region_id: int
    nbytes: int


class MemoryRegistered(NamedTuple):
    """Answer to Offer: the memory is mapped."""


class UnregisterMemory(NamedTuple):
    """The caller's memory `region_id` is not used any more; no answer."""

    region_id: int


class PutBlocks(NamedTuple):
    """Store those of the blocks that are not here; the pool node copies them out of the caller's memory.

    chain and parents 16 bytes per block; offsets int64 [groups, n] in the caller's memory; digests uint64 [n, layers of
    all groups], empty: those of the bytes as they are copied; num_tokens uint32 [n], 0 for a full block; `spec` is a
    serialised moonpool.v1.KvSpec.
    """

    kv_namespace: bytes
    spec: bytes
    region_id: int
    chain: bytes
    parents: bytes
    offsets: bytes
    digests: bytes
    num_tokens: bytes
    compute_s: float


class PutReply(NamedTuple):
    """Answer to Put: a PutStatus per block, one byte each."""

    status: bytes


class TouchBlocks(NamedTuple):
    """Blocks that were read; no answer."""

    kv_namespace: bytes
    chain: bytes


class ReportCorrupt(NamedTuple):
    """Blocks whose bytes are not those of their digests; no answer."""

    kv_namespace: bytes
    chain: bytes


class ErrorReply(NamedTuple):
    """Instead of an answer. `kind` is the name of an error in kvpool.errors, or ProtocolError: the node hangs up."""

    kind: str
    reason: str


Message = (
    Attach | Attached | GetIndex | IndexReply | RegisterMemory | MemoryRegistered
    | UnregisterMemory | PutBlocks | PutReply | TouchBlocks | ReportCorrupt | ErrorReply
)  # fmt: skip

# A message's number on the wire is its place in this tuple: append new ones at the end.
_KINDS = (
    Attach, Attached, GetIndex, IndexReply, RegisterMemory, MemoryRegistered,
    UnregisterMemory, PutBlocks, PutReply, TouchBlocks, ReportCorrupt, ErrorReply,
)  # fmt: skip
_FRAMING = Framing(MAGIC, VERSION, _KINDS, MAX_BODY_NBYTES)
encode: Callable[[Message], bytes] = _FRAMING.encode
decode_prefix = _FRAMING.decode_prefix
decode_body: Callable[[int, bytes | bytearray | memoryview], Message] = _FRAMING.decode_body
