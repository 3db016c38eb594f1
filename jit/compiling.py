"""Compile functions with numba for one signature, cached on disk. Imports numba and nothing else."""

from typing import Any

import numba

__all__ = ["compiled", "compiled_with_gil"]


def compiled(function: Any, signature: Any, *, nogil: bool = True) -> Any:
    """Return `function` compiled for `signature`; later processes load it from the cache instead of compiling it.

    With `nogil` other threads run Python while it executes. Where the cache folder is read-only, it is compiled in
    memory.
    """
    try:
        return numba.njit(signature, nogil=nogil, cache=True)(function)
    except RuntimeError as error:
        # Neither beside the source nor in the user's cache folder can a file be written: a read-only installation.
        if "cannot cache" not in str(error):
            raise
        return numba.njit(signature, nogil=nogil)(function)


def compiled_with_gil(function: Any, signature: Any) -> Any:
    """Return `function` compiled to keep the GIL: for functions of microseconds on a thread that others wait for.

    A thread that releases the GIL gets it back only after another thread's switch interval, milliseconds later.
    """
    return compiled(function, signature, nogil=False)
