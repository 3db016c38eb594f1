"""Reserve: under overload, the last part of the room for load is left to requests that cost little.

If more requests arrive than can be served, each one that is admitted takes the place of others. A request whose cost is
above a price therefore has to leave a share of the room between the latency of an idle node and its objective free,
while a cheaper one may use all of it (trunk reservation in loss networks: F. P. Kelly, "Loss networks", Ann. Appl.
Probab. 1991). The price follows the demand: it falls whenever a request below it finds no room, and rises whenever one
above it is kept out, so that nearly all rejections are of expensive requests. Without overload nobody needs the last
part, and nobody is rejected for it.
"""

from math import exp
from typing import Final

__all__ = ["Price"]

_STEP: Final = 0.05  # by which the logarithm of a price falls
_CHEAP: Final = 0.2  # rejections of requests below the price, per rejection of one above it


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
        room = share * max(0.0, bound - idle)
        if cost <= self._price:
            if load > bound:
                self._price *= exp(-_STEP)
            return 0.0
        if load > bound - room:
            self._price *= exp(_STEP * _CHEAP)
        return room
