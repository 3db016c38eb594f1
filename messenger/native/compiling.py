"""How kernels are compiled: for one signature, cached on disk where a cache can be."""

from typing import Any

import numba

__all__ = ["compiled"]


def compiled(function: Any, signature: Any, *, nogil: bool = True) -> Any:
    """The compiled function; later processes load it from the cache instead of compiling for a second.

    `nogil`: other threads may run Python meanwhile. Not for what takes microseconds on a thread that is waited for:
    who gives the GIL away gets it back when the other one has had its turn, which may be milliseconds later.
    """
    try:
        return numba.njit(signature, nogil=nogil, cache=True)(function)
    except RuntimeError as error:
        # Neither beside the source nor in the user's cache folder can a file be written: a read-only installation.
        if "cannot cache" not in str(error):
            raise
        return numba.njit(signature, nogil=nogil)(function)
