"""How the kernels of a decision are compiled: they keep the GIL, which the log's thread would not soon give back."""

from typing import Any

from messenger.native.compiling import compiled

__all__ = ["decision_kernel"]


def decision_kernel(function: Any, signature: Any) -> Any:
    """The function compiled for the signature. It takes microseconds of a decision that somebody waits for."""
    return compiled(function, signature, nogil=False)
