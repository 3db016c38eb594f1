"""Failed calls of a conductor as errors of commands."""

from moonpool.errors import ClusterNotFound
from rpc.control import CallRefused, ControlError
from rpc.gateway import is_forwarded


def conductor_silent(error: ControlError) -> ClusterNotFound:
    """Return the error to raise after a failed call of a conductor, directly or through an API server."""
    if is_forwarded(error.target):
        return ClusterNotFound(error.reason)  # it names the process that failed
    problem = "the call was rejected" if isinstance(error, CallRefused) else "the conductor does not answer"
    return ClusterNotFound(f"{problem}: {error}")
