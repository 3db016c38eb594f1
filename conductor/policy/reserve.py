"""Reserve: under overload, the last part of the room for load is left to requests that cost little.

If more requests arrive than can be served, each one that is admitted takes the place of others. A request whose cost is
above a price therefore has to leave a share of the room between its load on an idle node and the bound free, while a
cheaper one may use all of it (trunk reservation in loss networks: F. P. Kelly, "Loss networks", Ann. Appl. Probab.
1991). The price follows the demand: it falls when a cheap request finds no room, and rises when a request is kept out
that would have had room. On a cluster without overload nobody needs the last part, and nobody is rejected for it.
"""

from math import exp
from typing import Final

__all__ = ["Price"]

_STEP: Final = 0.05  # by which the logarithm of a price falls
_KEPT_OUT: Final = 0.1  # by which it rises, as a share of that


class Price:
    """Cost above which requests leave room to cheaper ones. The cost's unit is the caller's."""

    def __init__(self) -> None:
        self._price: float | None = None  # None: no request has been judged

    def reserved(self, share: float, cost: float, load: float, idle: float, bound: float) -> float:
        """Return the load that a request has to leave free below `bound`, and adapt the price to this demand.

        It is `share` of the room above `idle`, its load on an idle node. `load` is predicted with the request.
        """
        if self._price is None:
            self._price = cost
        room = max(0.0, bound - idle)
        if cost <= self._price:
            if load > bound:
                self._price *= exp(-_STEP)
            return 0.0
        if bound - share * room < load <= bound:
            self._price *= exp(_KEPT_OUT * _STEP)
        return share * room
