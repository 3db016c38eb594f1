"""How often one request is tried. Pure; time is an argument."""


class Tries:
    """An attempt counts when a worker was given the request: one that ends workers must not go on for ever.

    Where none could be reached nothing was tried, and a conductor learns in seconds who is gone or hangs: for so long
    there may be any number of such attempts, each on another node or after a pause.
    """

    def __init__(self, max_tries: int, grace_s: float) -> None:
        self._max_tries = max_tries
        self._grace_s = grace_s
        self._num_unreached = 0
        self._unreached_since_s: float | None = None

    def unreached(self, now_s: float) -> None:
        """A worker could not be reached for the attempt that was made last."""
        self._num_unreached += 1
        self._unreached_since_s = now_s if self._unreached_since_s is None else self._unreached_since_s

    def reached(self) -> None:
        """A worker was given the request."""
        self._unreached_since_s = None

    def are_over(self, num_attempts: int, now_s: float) -> bool:
        """Whether there is to be no further one after so many, those without a worker included."""
        since_s = self._unreached_since_s
        is_known = since_s is not None and now_s >= since_s + self._grace_s  # and yet nobody could be reached
        return num_attempts - (0 if is_known else self._num_unreached) >= self._max_tries
