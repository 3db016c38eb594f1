"""Names for what a log may not say in clear: prompts as hash ids, tenants. Both mean nothing without the log's secret.

An equal id means an equal prefix up to the end of that block, as in Mooncake's traces; the contrary does not hold: a
block whose last tokens have no key of their own (keys are of the cluster's whole blocks) gets an id that none shares.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

__all__ = ["Hashes"]

_ID_NBYTES, _SPARE_BITS = 7, 4  # 52 bits: exact in whatever reads JSON's numbers as doubles


class Hashes:
    """Hash ids of `block_tokens` tokens each, under one log's `secret` (at most 64 bytes)."""

    def __init__(self, secret: bytes, block_tokens: int) -> None:
        self._secret = secret
        self.block_tokens = block_tokens

    def ids(self, keys: NDArray[np.uint64], key_tokens: int, prompt_tokens: int, request_id: str) -> list[int]:
        """One id per block of the prompt, the last may be partial. `keys`: one per whole `key_tokens` tokens of it,
        each of the prefix up to its end; tenants' salts are in them."""
        own = request_id.encode()
        found = []
        for number in range(-(-prompt_tokens // self.block_tokens)):
            end = min((number + 1) * self.block_tokens, prompt_tokens)
            covering = -(-end // key_tokens) - 1
            is_shared = covering < len(keys)
            text = int(keys[covering]).to_bytes(8, "little") if is_shared else own
            digest = self._digest(number.to_bytes(4, "little") + text, b"prefix" if is_shared else b"request")
            found.append(int.from_bytes(digest, "little") >> _SPARE_BITS)
        return found

    def tenant(self, name: str) -> str:
        """The tenant's name in this log; "" for none."""
        return self._digest(name.encode(), b"tenant").hex() if name else ""

    def _digest(self, data: bytes, kind: bytes) -> bytes:
        return blake2b(data, digest_size=_ID_NBYTES, key=self._secret, person=kind).digest()
