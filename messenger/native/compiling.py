"""How kernels are compiled: for one signature, without the GIL, cached on disk where a cache can be."""

from typing import Any

import numba

__all__ = ["compiled"]


def compiled(function: Any, signature: Any) -> Any:
    """The compiled function; later processes load it from the cache instead of compiling for a second."""
    try:
        return numba.njit(signature, nogil=True, cache=True)(function)
    except RuntimeError as error:
        # Neither beside the source nor in the user's cache folder can a file be written: a read-only installation.
        if "cannot cache" not in str(error):
            raise
        return numba.njit(signature, nogil=True)(function)
