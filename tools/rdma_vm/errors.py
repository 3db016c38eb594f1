"""Errors of the test VM. Each message describes the problem and how to solve it.

VmError
├── UnsupportedHost      not Linux on x86-64, or a Python that does not fit the guest's libraries
├── MissingTool          a required program that cannot be fetched
├── NotPermitted         not allowed to build a root filesystem or to write to the cache folder
├── NoSpace              the cache folder's disk is too full
├── BuildFailed          a build step failed (usually a download)
├── VmDeadlineExceeded   the deadline for build, boot and command passed
└── BootFailed           the VM ended, or ran out of time, before it was ready for the command
"""


class VmError(Exception):
    """Base class of the errors of the test VM."""


class UnsupportedHost(VmError):
    """The machine cannot run the test VM."""


class MissingTool(VmError):
    """A required program is missing and cannot be fetched."""


class NotPermitted(VmError):
    """Not allowed to build a root filesystem or to write to the cache folder."""


class NoSpace(VmError):
    """Too little free space on the cache folder's disk."""


class BuildFailed(VmError):
    """A build step failed."""


class VmDeadlineExceeded(VmError):
    """The deadline for build, boot and command has passed."""


class BootFailed(VmError):
    """The VM did not become ready. `reason`: the most significant line; the message contains all available details."""

    def __init__(self, reason: str, story: str) -> None:
        super().__init__(story)
        self.reason = reason
