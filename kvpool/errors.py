"""Every error this package raises; nothing else lives here. Calls to a pool node also raise messenger's ControlError.

KvPoolError
├── SpecError                a KvSpec, or arrays that do not fit one
├── AddressError             a chain, seed, namespace or token array of the wrong form
├── PoolConfigError          a pool node's configuration cannot work
├── PoolRefused              the pool node cannot do what was asked; the request itself is wrong
│   └── SpecMismatch         the namespace is stored here under another KvSpec
├── PutLost                  the put expired, was aborted or sealed before, or its pool node restarted
└── CopyFailed               a copy between pool nodes could not start or be finished
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


class CopyFailed(KvPoolError):
    """Blocks could not be copied from the source pool node."""
