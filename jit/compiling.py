"""Compile functions with numba for one signature, cached on disk. Imports numba and nothing else."""

from typing import Any

import numba

__all__ = ["compiled", "compiled_with_gil"]


def compiled(function: Any, signature: Any, *, nogil: bool = True) -> Any:
    """Return `function` compiled for `signature`; later processes load it from the cache instead of compiling it.

    With `nogil`, other threads run Python while it executes. If no cache folder is writable, it is compiled in every
    process.
    """
    try:
        return numba.njit(signature, nogil=nogil, cache=True)(function)
    except RuntimeError as error:
        # A read-only installation: files can be written neither beside the source nor in the user's cache folder.
        if "cannot cache" not in str(error):
            raise
        return numba.njit(signature, nogil=nogil)(function)


def compiled_with_gil(function: Any, signature: Any) -> Any:
    """Return `function` compiled to keep the GIL: for functions that take microseconds on a thread that others await.

    A thread that releases the GIL may get it back only after another thread's switch interval, milliseconds later.
    """
    return compiled(function, signature, nogil=False)
