"""Choice between plain and compressed copies of blocks from other pool nodes, per source, and its measurements."""

import time

import numpy as np
from numpy.typing import NDArray

from kvpool.block_coding import decode_block, encode_block
from kvpool.policy.compression import CompressionPolicy, Storage
from kvpool.spec import KvSpec

_LEAST_NBYTES = 1 << 20  # shorter copies measure the link's latency
_PLAIN_EVERY = 16  # coded copies, per copy that measures the link again


class CopyCompression:
    """Measurements and choices of copies, per source. All methods belong to the node's event loop."""

    def __init__(self) -> None:
        self._policies: dict[str, CompressionPolicy] = {}
        self._num_coded: dict[str, int] = {}
        self._refusing: set[str] = set()  # sources of releases that cannot encode

    def choose(self, source: str, kv_namespace: bytes, nbytes: int, num_blocks: int) -> Storage:
        """Return how to copy blocks of `nbytes` from a source."""
        if source in self._refusing or nbytes < _LEAST_NBYTES:
            return Storage.PLAIN
        policy = self._policies.setdefault(source, CompressionPolicy())
        policy.loaded(num_blocks)
        choice = policy.choose(kv_namespace)
        if choice is Storage.CODED:
            self._num_coded[source] = self._num_coded.get(source, 0) + 1
            if self._num_coded[source] % _PLAIN_EVERY == 0:
                return Storage.PLAIN
        return choice

    def refuses(self, source: str) -> None:
        """Record that a source cannot encode."""
        self._refusing.add(source)

    def copied_plain(self, source: str, nbytes: int, seconds: float) -> None:
        """Record a plain copy, which measures the link."""
        if source in self._policies and nbytes >= _LEAST_NBYTES:
            self._policies[source].io.add(nbytes, seconds)

    def tried(
        self, source: str, kv_namespace: bytes, nbytes: int, coded_nbytes: int, codec_s: tuple[float, float]
    ) -> None:
        """Record a trial: lengths of a block, and the times of encoding and decoding it."""
        policy = self._policies[source]
        policy.coded(kv_namespace, nbytes, coded_nbytes)
        policy.encoded(kv_namespace, nbytes, codec_s[0])
        policy.decoded(kv_namespace, nbytes, codec_s[1])


def try_codec(slots: list[NDArray[np.uint8]], spec: KvSpec) -> tuple[int, tuple[float, float]]:
    """Encode and decode a block. Returns (coded length, CPU times of encoding and decoding)."""
    times = []
    coded: bytes | None = None
    for _ in range(2):  # the first prepares the thread's contexts
        began = time.thread_time()
        coded = encode_block(slots, spec)
        encoded = time.thread_time()
        if coded is not None:
            decode_block(np.frombuffer(coded, np.uint8), [np.empty_like(slot) for slot in slots], spec)
        times.append((encoded - began, time.thread_time() - encoded))
    return spec.block_nbytes if coded is None else len(coded), times[-1]
