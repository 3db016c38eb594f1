"""Messages between LocalPoolClient and LocalPoolServer, and their encoding; no I/O.

Frames have the format of `messenger.frames`. The client begins with Attach and sends one request at a time; requests
marked "no reply" have none. Descriptors are passed with the first byte of their frame (SCM_RIGHTS).
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

from messenger.frames import Framing

MAGIC, VERSION = b"MPDR", 1
MAX_BODY_NBYTES = 4 << 20


class PutStatus(enum.IntEnum):
    """Result of one block of PutBlocks."""

    STORED = 1
    EXISTS = 2  # stored already, in DRAM or on SSD, or being written by another put
    NO_SPACE = 3  # nothing (more) could be evicted for it
    WRONG = 4  # its bytes do not match its digests


class Attach(NamedTuple):
    """First message of a client: its owner, for accounting."""

    owner: str
    owner_incarnation: int


class Attached(NamedTuple):
    """Reply to Attach, with the descriptors of arena and index."""

    node_id: str
    incarnation: int
    arena_nbytes: int
    index_nbytes: int


class GetIndex(NamedTuple):
    """Request for the current index, after the mapped one was replaced."""


class IndexReply(NamedTuple):
    """Reply to GetIndex, with the index's descriptor."""

    nbytes: int


class RegisterMemory(NamedTuple):
    """Request to map the client's memory `region_id`, whose descriptor comes with it, as a source of puts."""

    region_id: int
    nbytes: int


class MemoryRegistered(NamedTuple):
    """Reply to RegisterMemory: the memory is mapped."""


class UnregisterMemory(NamedTuple):
    """Notice that the client's memory `region_id` is to be unmapped; no reply."""

    region_id: int


class PutBlocks(NamedTuple):
    """Request to store those of the blocks that are missing; the pool node copies them out of the client's memory.

    chain and parents have 16 bytes per block; offsets int64 [groups, n] in the client's memory; digests uint64 [n,
    layers of all groups], or empty: computed from the copied bytes; num_tokens uint32 [n], 0 for a full block; `spec`
    is a serialised moonpool.v1.KvSpec.
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
    """Reply to PutBlocks: a PutStatus per block, one byte each."""

    status: bytes


class TouchBlocks(NamedTuple):
    """Report of blocks that were read; no reply."""

    kv_namespace: bytes
    chain: bytes


class ReportCorrupt(NamedTuple):
    """Report of blocks whose bytes do not match their digests; no reply."""

    kv_namespace: bytes
    chain: bytes


class ErrorReply(NamedTuple):
    """Error in place of a reply. `kind` is the name of an error in kvpool.errors, or ProtocolError, after which the
    node disconnects.
    """

    kind: str
    reason: str


Message = (
    Attach | Attached | GetIndex | IndexReply | RegisterMemory | MemoryRegistered
    | UnregisterMemory | PutBlocks | PutReply | TouchBlocks | ReportCorrupt | ErrorReply
)  # fmt: skip

# A message's number on the wire is its position in this tuple: append new ones at the end.
_KINDS = (
    Attach, Attached, GetIndex, IndexReply, RegisterMemory, MemoryRegistered,
    UnregisterMemory, PutBlocks, PutReply, TouchBlocks, ReportCorrupt, ErrorReply,
)  # fmt: skip
_FRAMING = Framing(MAGIC, VERSION, _KINDS, MAX_BODY_NBYTES)
encode: Callable[[Message], bytes] = _FRAMING.encode
decode_prefix = _FRAMING.decode_prefix
decode_body: Callable[[int, bytes | bytearray | memoryview], Message] = _FRAMING.decode_body
