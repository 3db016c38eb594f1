"""Choice between plain and compressed copies of blocks from other pool nodes, per source, and its measurements."""

import time

import numpy as np
from numpy.typing import NDArray

from kvpool.block_coding import decode_block, encode_block
from kvpool.policy.compression import MARGIN, CompressionPolicy, SmoothedPace, Storage
from kvpool.spec import KvSpec

_LEAST_NBYTES = 1 << 20  # shorter copies measure the link's latency
_OTHER_EVERY = 16
_MEMORY_NBYTES = 32 << 20


class CopyCompression:
    """Measurements and choices of copies, per source. All methods belong to the node's event loop.

    What the policy predicts for compressed copies is checked against their times, since other work of both nodes slows
    them down. Every sixteenth copy is of the other kind, so that both measurements stay up to date.
    """

    def __init__(self) -> None:
        self._policies: dict[str, CompressionPolicy] = {}
        self._coded: dict[tuple[str, bytes], SmoothedPace] = {}  # of compressed copies, per source and namespace
        self._connected: set[str] = set()
        self._num_chosen = 0
        self._refusing: set[str] = set()  # sources of releases that cannot encode

    def choose(self, source: str, kv_namespace: bytes, nbytes: int, num_blocks: int) -> Storage:
        """Return how to copy blocks of `nbytes` from a source."""
        if source in self._refusing or nbytes < _LEAST_NBYTES:
            return Storage.PLAIN
        policy = self._policies.setdefault(source, CompressionPolicy())
        policy.loaded(num_blocks)
        choice = policy.choose(kv_namespace)
        if choice is not Storage.CODED:
            return choice
        measured = self._coded.get((source, kv_namespace))
        pays = measured is None or measured.per_byte_s < (1 - MARGIN) * policy.io.per_byte_s
        self._num_chosen += 1
        return Storage.CODED if pays != (self._num_chosen % _OTHER_EVERY == 0) else Storage.PLAIN

    def refuses(self, source: str) -> None:
        """Record that a source cannot encode."""
        self._refusing.add(source)

    def copied_plain(self, source: str, nbytes: int, seconds: float) -> None:
        """Record a plain copy, which measures the link; the first one from a source, which connects, does not."""
        if source in self._connected and source in self._policies and nbytes >= _LEAST_NBYTES:
            self._policies[source].io.add(nbytes, seconds)
        self._connected.add(source)

    def copied_coded(self, source: str, kv_namespace: bytes, nbytes: int, seconds: float) -> None:
        """Record a compressed copy of blocks of `nbytes`."""
        pace = self._coded.setdefault((source, kv_namespace), SmoothedPace(_MEMORY_NBYTES))
        pace.add(nbytes, seconds)

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
