"""When a request that was rejected with HTTP 429 is sent again. Pure: the same seed waits the same times."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

_FIRST_WAIT_S = 0.5


@dataclass(frozen=True)
class RetryPolicy:
    """`max_attempts`: sendings in all. `max_wait_s`: bound of one wait, whatever Retry-After says."""

    max_attempts: int = 8
    max_wait_s: float = 30.0

    def wait_s(self, *, attempts: int, retry_after_s: float | None, seed: int) -> float | None:
        """Seconds until the next sending after `attempts` of them; None: give it up.

        What Retry-After asks for, else 0.5 s doubled with each attempt, at most the bound; and up to a quarter more, by
        the request's seed, so that those rejected together do not come back together.
        """
        if attempts >= self.max_attempts:
            return None
        asked = _FIRST_WAIT_S * 2.0 ** (attempts - 1) if retry_after_s is None else max(retry_after_s, 0.0)
        digest = blake2b(f"{seed}:retry:{attempts}".encode(), digest_size=8).digest()
        return min(asked, self.max_wait_s) * (1 + 0.25 * int.from_bytes(digest, "little") / 2**64)
