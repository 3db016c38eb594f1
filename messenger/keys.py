"""Remote keys: what an owner hands out so that a peer may touch a window of one of its regions."""

import struct
from dataclasses import dataclass

from rpc.errors import InvalidArgument

_PACKED = struct.Struct("<QQQQB")
_READ, _WRITE = 1, 2


@dataclass(frozen=True)
class RemoteKey:
    """A window of bytes [offset, offset + nbytes) of the owner's region, named by an unguessable token."""

    region_id: int
    token: int
    offset: int
    nbytes: int
    read: bool
    write: bool

    def pack(self) -> bytes:
        """33 bytes, for the control plane's messages."""
        rights = _READ * self.read | _WRITE * self.write
        return _PACKED.pack(self.region_id, self.token, self.offset, self.nbytes, rights)

    @classmethod
    def unpack(cls, packed: bytes) -> "RemoteKey":
        """Raises InvalidArgument when `packed` is no key."""
        if len(packed) != _PACKED.size:
            raise InvalidArgument(f"a packed remote key has {_PACKED.size} bytes, not {len(packed)}")
        region_id, token, offset, nbytes, rights = _PACKED.unpack(packed)
        if not rights or rights & ~(_READ | _WRITE):
            raise InvalidArgument(f"a remote key cannot have the rights {rights:#x}")
        return cls(region_id, token, offset, nbytes, bool(rights & _READ), bool(rights & _WRITE))
