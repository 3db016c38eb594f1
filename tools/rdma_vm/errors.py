"""The errors of the bed. Each says what is missing or went wrong and what to do about it.

BedError
├── UnsupportedHost      not Linux on x86-64, or a Python that the guest's libraries do not fit
├── MissingTool          a program that the bed cannot fetch by itself
├── NotPermitted         no right to make a root filesystem, or to write to the cache folder
├── NoSpace              the cache folder's disk is too full
├── BuildFailed          a step of the build failed (a download, most often)
├── DeadlineExceeded     the time given for everything is over
└── BootFailed           the VM ended, or ran out of time, before it was ready for the command
"""


class BedError(Exception):
    """Base of all errors of the bed."""


class UnsupportedHost(BedError):
    """The machine cannot run the bed at all."""


class MissingTool(BedError):
    """A program is missing that the bed cannot fetch by itself."""


class NotPermitted(BedError):
    """No right to make a root filesystem, or to write to the cache folder."""


class NoSpace(BedError):
    """Too little room on the cache folder's disk."""


class BuildFailed(BedError):
    """A step of the build ended with an error."""


class DeadlineExceeded(BedError):
    """The one deadline for build, boot and command has passed."""


class BootFailed(BedError):
    """The VM gave no sign that it is ready. `reason` is the line that tells most; the text tells all that is known."""

    def __init__(self, reason: str, story: str) -> None:
        super().__init__(story)
        self.reason = reason
