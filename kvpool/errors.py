"""All errors of this package. Calls to a pool node also raise the messenger's ControlError.

KvPoolError
├── SpecError                an invalid KvSpec, or arrays that do not fit one
├── AddressError             a malformed chain, seed, namespace or token array
├── PoolConfigError          an invalid configuration of a pool node
├── PoolRefused              the pool node rejects the request; repeating it does not help
│   └── SpecMismatch         the namespace is stored under another KvSpec
├── PutLost                  the put has expired, was aborted or sealed, or its pool node restarted
├── LocalPoolUnavailable     this host's pool node does not answer or is gone: use the messenger
├── CopyFailed               a copy between pool nodes failed
├── CodedBlockInvalid        bytes are not the coded form of a block
└── SsdError                 the SSD store failed
    ├── SsdFolderError       its folder cannot be used: missing, read-only, in memory, too small (also PoolConfigError)
    │   ├── SsdInUse         another process has it open
    │   └── SsdForeign       it belongs to another node, cluster or version
    ├── SsdRefused           the request is invalid
    │   └── SsdNotStored     no such block at this offset
    ├── SsdIoError           the disk or file system failed; see `errno`
    │   └── SsdFull          no space left
    ├── SsdCorrupt           the bytes on the disk are not those that were written
    └── SsdClosed            the store is closed
"""


class KvPoolError(Exception):
    """Base of the package's errors."""


class SpecError(KvPoolError, ValueError):
    """Invalid values in a KvSpec or KvGroup, or slots that do not fit their spec."""


class AddressError(KvPoolError, ValueError):
    """Chain, seed, namespace or token array with the wrong shape, type or length."""


class PoolConfigError(KvPoolError, ValueError):
    """Invalid configuration of a pool node."""


class PoolRefused(KvPoolError):
    """The pool node rejects the request; repeating it does not help."""


class SpecMismatch(PoolRefused):
    """The namespace holds blocks of another KvSpec."""


class PutLost(KvPoolError):
    """The put has ended: none of its blocks became visible, and its slots must not be written any more."""


class LocalPoolUnavailable(KvPoolError):
    """This host's pool node does not answer, is gone, or closed the connection. Its memory must not be read."""


class CopyFailed(KvPoolError):
    """Blocks could not be copied from the source pool node."""


class CodedBlockInvalid(KvPoolError):
    """The bytes are not the coded form of a block of the expected spec."""


class SsdError(KvPoolError):
    """The SSD store failed."""


class SsdFolderError(SsdError, PoolConfigError):
    """The SSD store's folder or size cannot be used."""


class SsdInUse(SsdFolderError):
    """Another process has the folder open."""


class SsdForeign(SsdFolderError):
    """The folder belongs to another node, another cluster or another version of the format."""


class SsdRefused(SsdError):
    """Invalid request: an extent outside of the space or overlapping another, or arrays of the wrong form."""


class SsdNotStored(SsdRefused):
    """No such block at this offset."""


class SsdIoError(SsdError):
    """The disk or its file system failed."""

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


class SsdFull(SsdIoError):
    """The file system has no space left."""


class SsdCorrupt(SsdError):
    """The bytes on the disk are not those that were written."""


class SsdClosed(SsdError):
    """The store is closed, or its journal cannot be written any more."""
