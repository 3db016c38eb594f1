"""Errors of the test VM. Each says what is missing or went wrong and what to do about it.

VmError
├── UnsupportedHost      not Linux on x86-64, or a Python that does not fit the guest's libraries
├── MissingTool          a required program that cannot be fetched
├── NotPermitted         no right to make a root filesystem, or to write to the cache folder
├── NoSpace              the cache folder's disk is too full
├── BuildFailed          a build step failed (usually a download)
├── VmDeadlineExceeded   the deadline for build, boot and command passed
└── BootFailed           the VM ended, or ran out of time, before it was ready for the command
"""


class VmError(Exception):
    """Root of the errors of the test VM."""


class UnsupportedHost(VmError):
    """The machine cannot run the test VM."""


class MissingTool(VmError):
    """A required program is missing and cannot be fetched."""


class NotPermitted(VmError):
    """No right to make a root filesystem, or to write to the cache folder."""


class NoSpace(VmError):
    """Too little room on the cache folder's disk."""


class BuildFailed(VmError):
    """A step of the build ended with an error."""


class VmDeadlineExceeded(VmError):
    """The one deadline for build, boot and command has passed."""


class BootFailed(VmError):
    """The VM did not become ready. `reason` is the most significant line; the text has all that is known."""

    def __init__(self, reason: str, story: str) -> None:
        super().__init__(story)
        self.reason = reason
