"""Counter that compiled loops in several threads share, to take the pieces of one piece of work. Imports numba only."""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["take_next"]


def _fetch_and_add(_typing: Any, _counter: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", counter.data, cgutils.intp_t(1), "seq_cst")

    return types.int64(_counter), generate


take_next: Any = intrinsic(_fetch_and_add)
"""`take_next(counter)` increments an int64 [1] atomically. Returns its value before."""
