"""Every error this package raises; nothing else lives here. Calls to a pool node also raise messenger's ControlError.

KvPoolError
├── SpecError                a KvSpec, or arrays that do not fit one
├── AddressError             a chain, seed, namespace or token array of the wrong form
├── PoolConfigError          a pool node's configuration cannot work
├── PoolRefused              the pool node cannot do what was asked; the request itself is wrong
│   └── SpecMismatch         the namespace is stored here under another KvSpec
├── PutLost                  the put expired, was aborted or sealed before, or its pool node restarted
├── DoorClosed               no pool node of this host answers at the door, or it is gone: take the messenger
├── CopyFailed               a copy between pool nodes could not start or be finished
└── SsdError                 the SSD store cannot do what was asked
    ├── SsdFolderError       its folder cannot be used: missing, read-only, in memory, too small (also PoolConfigError)
    │   ├── SsdInUse         another process has it open
    │   └── SsdForeign       it belongs to another node, cluster or version
    ├── SsdRefused           the request itself is wrong
    │   └── SsdNotStored     no such block lies there
    ├── SsdIoError           the disk or file system failed; `errno` says how
    │   └── SsdFull          no space left
    ├── SsdCorrupt           what is on the disk is not what was written
    └── SsdClosed            the store is closed
"""


class KvPoolError(Exception):
    """Root of the package's errors."""


class SpecError(KvPoolError, ValueError):
    """A KvSpec or KvGroup with impossible values, or slots that do not fit their spec."""


class AddressError(KvPoolError, ValueError):
    """A chain, seed, namespace or token array of the wrong shape, type or length."""


class PoolConfigError(KvPoolError, ValueError):
    """A pool node's configuration cannot work."""


class PoolRefused(KvPoolError):
    """The pool node cannot do what was asked, and asking again changes nothing."""


class SpecMismatch(PoolRefused):
    """The namespace holds blocks of another KvSpec."""


class PutLost(KvPoolError):
    """The put is gone: nothing of it became visible, and its slots must not be written any more."""


class LocalPoolUnavailable(KvPoolError):
    """The pool node behind a door is gone, was never there, or sent the caller away. Its memory must not be read."""


class CopyFailed(KvPoolError):
    """Blocks could not be copied from the source pool node."""


class SsdError(KvPoolError):
    """The SSD store cannot do what was asked."""


class SsdFolderError(SsdError, PoolConfigError):
    """The SSD store's folder, or its size, cannot be used."""


class SsdInUse(SsdFolderError):
    """Another process has the folder open."""


class SsdForeign(SsdFolderError):
    """The folder belongs to another node, another cluster or another version of the format."""


class SsdRefused(SsdError):
    """The request itself is wrong: an extent outside of the space or over another, or arrays of the wrong form."""


class SsdNotStored(SsdRefused):
    """No such block lies at this offset."""


class SsdIoError(SsdError):
    """The disk or its file system failed."""

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


class SsdFull(SsdIoError):
    """The file system has no space left."""


class SsdCorrupt(SsdError):
    """What is on the disk is not what was written there."""


class SsdClosed(SsdError):
    """The store is closed, or its journal can be written no more."""
