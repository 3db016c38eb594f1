"""Every error this package raises; nothing else lives here. Calls to other roles also raise messenger's ControlError.

ConductorError
├── ConfigError              a configuration that cannot work
├── ObjectivesError          a record of objectives that cannot be
├── SloConflict              the record of objectives is not at the version that a change was made for
├── JoinRefused              a node that cannot be part of this cluster; `problem` says what differs from whom
├── FrontDoorRefused         a front door of a version with which this one cannot work
├── MalformedCall            a front door's call that asks for nothing that can be
├── UnknownNode              a node id under which nobody has joined
├── NodeInUse                a node that others need: it cannot be drained now
├── SharedStoreError         what conductors share cannot be read or written
│   ├── SharedStoreRefused       ... and never will: a wrong password, another cluster's data, another format
│   └── SharedStoreUnavailable   ... now: not reachable, read-only, out of memory
├── SnapshotUnusable         a snapshot of the directory that is damaged, or not this cluster's
└── LogFormatError           a row of an event log that is no event or decision of this version
"""


class ConductorError(Exception):
    """Root of the package's errors."""


class ConductorConfigError(ConductorError, ValueError):
    """A configuration that cannot work; the message names the field."""


class ObjectivesError(ConductorError, ValueError):
    """A record of objectives that cannot be; the message names the place in it and what is expected there."""


class SloConflict(ConductorError):
    """Somebody else changed the record of objectives first; the message says which version there is, and whose."""


class JoinRefused(ConductorError):
    """The node's model, spec or description does not fit the cluster: fix the node, joining again changes nothing."""


class FrontendRefused(ConductorError):
    """Its version and this one cannot work together; the message names both."""


class MalformedCall(ConductorError, ValueError):
    """A front door's call that contradicts itself; the message says where."""


class UnknownNode(ConductorError, LookupError):
    """Nobody has joined under this node id; the message names those who have."""


class SwitchRefused(ConductorError):
    """The node cannot have that role; the message says why, `reason` in a word for those who count."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NodeInUse(ConductorError):
    """Others need the node; the message names them."""


class SharedStoreError(ConductorError):
    """What conductors share cannot be read or written; the message says where and why, and no password."""


class SharedStoreRefused(SharedStoreError):
    """Trying again cannot help: a conductor that starts with this ends."""


class SharedStoreUnavailable(SharedStoreError):
    """It may come back: a conductor goes on without."""


class SnapshotUnusable(ConductorError):
    """A snapshot of the directory that cannot be loaded; the message says why. The pool nodes tell all there is."""


class LogFormatError(ConductorError, ValueError):
    """A row that cannot be read back as an event or a decision."""
