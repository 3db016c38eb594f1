"""Errors of the control plane and of connections.

NetworkError
├── InvalidArgument          an invalid argument, configuration or file; nothing was sent
├── AddressInUse             another process listens at this address
├── BindFailed               the address cannot be bound for another reason
├── DeadlineExceeded         the deadline passed first
└── ControlError             a gRPC call failed
    ├── Unavailable          no connection to the target, or it broke during the call
    ├── ControlDeadlineExceeded  (also a DeadlineExceeded)
    └── CallRefused          the target answered with an error; `code` is gRPC's status name

`messenger.errors.MessengerError` derives from `NetworkError`, too.
"""


class NetworkError(Exception):
    """Root of errors caused by another process, its address or the connection to it."""


class InvalidArgument(NetworkError, ValueError):
    """An argument, file or configuration is invalid; nothing was sent."""


class AddressInUse(NetworkError):
    """Another process or server already listens at the address."""


class BindFailed(NetworkError):
    """The address cannot be bound: unknown host, no permission, or the path is too long."""


class DeadlineExceeded(NetworkError):
    """The deadline passed before the operation was done."""


class ControlError(NetworkError):
    """A gRPC call failed. `code` is gRPC's status name, `what` names the call and `target` the process called."""

    def __init__(self, reason: str, *, what: str, target: str, code: str) -> None:
        super().__init__(f"{what} at {target}: {reason} [{code}]")
        self.reason = reason
        self.what = what
        self.target = target
        self.code = code


class Unavailable(ControlError):
    """No connection to the target, or it broke during the call: retry, or use another target."""


class ControlDeadlineExceeded(ControlError, DeadlineExceeded):
    """The target did not answer in time."""


class CallRefused(ControlError):
    """The target answered with an error; a retry of the call is useful only for some values of `code`."""
