"""Every error this package raises; nothing else lives here. Calls to other roles also raise messenger's ControlError.

ConductorError
├── ConfigError              a configuration that cannot work
├── JoinRefused              a node that cannot be part of this cluster; `problem` says what differs from whom
├── UnknownNode              a node id under which nobody has joined
├── NodeInUse                a node that others need: it cannot be drained now
└── LogFormatError           a row of an event log that is no event or decision of this version
"""


class ConductorError(Exception):
    """Root of the package's errors."""


class ConfigError(ConductorError, ValueError):
    """A configuration that cannot work; the message names the field."""


class JoinRefused(ConductorError):
    """The node's model, spec or description does not fit the cluster: fix the node, joining again changes nothing."""


class UnknownNode(ConductorError, LookupError):
    """Nobody has joined under this node id; the message names those who have."""


class NodeInUse(ConductorError):
    """Others need the node; the message names them."""


class LogFormatError(ConductorError, ValueError):
    """A row that cannot be read back as an event or a decision."""
