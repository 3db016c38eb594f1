"""Coded blocks of the SSD tier: feeds the policy with measurements, counts, and chooses how blocks are stored.

All methods belong to the node's event loop; the measurements come from the threads that read and write.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kvpool.policy import TierWrite
from kvpool.policy.compression import CompressionPolicy, Storage
from kvpool.verified_io import LoadResults, ReadTimes, WriteResults

_LEAST_READ_NBYTES = 1 << 20  # shorter reads measure the SSD's latency, which coding does not shorten
_MEASURE_AGAIN_S = 60.0


class SsdCompression:
    """Measurements and choices of one SSD tier; `auto` is False if all blocks are to be stored plain."""

    def __init__(self, counters: defaultdict[str, float], *, auto: bool) -> None:
        self.auto = auto
        self._policy = CompressionPolicy()
        self._counters = counters
        self._read_until_s = 0.0  # end of the reads so far

    def storage(self, writes: Sequence[TierWrite]) -> list[Storage]:
        """Return how to store each block."""
        if not self.auto:
            return [Storage.PLAIN] * len(writes)
        return [self._policy.choose(write.block.kv_namespace) for write in writes]

    def should_measure(self, writes: Sequence[TierWrite]) -> bool:
        """Return True if no read was measured for a minute, and reading these blocks would be a measurement."""
        is_due = not self._policy.io.known or time.perf_counter() - self._read_until_s > _MEASURE_AGAIN_S
        return self.auto and is_due and sum(write.block.spec.block_nbytes for write in writes) >= _LEAST_READ_NBYTES

    def begun(self, num_batches: float) -> None:
        """Record that loads of this many batches were begun together."""
        self._policy.loaded(num_batches)

    def was_read(self, times: ReadTimes) -> None:
        """Record a read from the SSD; the time during which another one was running counts once."""
        if times.nbytes >= _LEAST_READ_NBYTES:
            self._policy.io.add(times.nbytes, max(0.0, times.ended_s - max(times.began_s, self._read_until_s)))
            self._read_until_s = max(self._read_until_s, times.ended_s)

    def loaded(self, nbytes: int, results: LoadResults) -> None:
        """Record a batch of loads of blocks of `nbytes` in total."""
        self.was_read(results.times)
        self._policy.verify.add(nbytes, results.verify_s)
        for kv_namespace, (decoded_nbytes, seconds) in results.times.decoded.items():
            self._policy.decoded(kv_namespace, decoded_nbytes, seconds)
            self._counters["ssd_decoded_bytes"] += decoded_nbytes
            self._counters["ssd_decode_seconds"] += seconds

    def written(self, writes: Sequence[TierWrite], storage: Sequence[Storage], results: WriteResults) -> None:
        """Record a batch of writes."""
        for write, how, coded in zip(writes, storage, results.coded, strict=True):
            if coded is None:
                continue
            nbytes = write.block.spec.block_nbytes
            self._policy.coded(write.block.kv_namespace, nbytes, coded.nbytes)
            if coded.decode_s:
                self._policy.decoded(write.block.kv_namespace, nbytes, coded.decode_s)
            self._counters["ssd_encode_seconds"] += coded.encode_s
            if how is Storage.CODED and coded.nbytes < nbytes:
                self._counters["ssd_coded_blocks"] += 1
                self._counters["ssd_coded_plain_bytes"] += nbytes
                self._counters["ssd_coded_bytes"] += coded.nbytes
            else:
                self._counters["ssd_trial_blocks"] += 1

    def describe(self) -> dict[str, Any]:
        """Return the measurements and the predicted gain per namespace as JSON-compatible data."""
        policy = self._policy
        return {
            "setting": "auto" if self.auto else "off",
            "read_bytes_per_s": 1 / policy.io.per_byte_s if policy.io.per_byte_s else None,
            "namespaces": {
                kv_namespace.hex(): {
                    "ratio": costs.ratio,
                    "decode_bytes_per_s": 1 / costs.decode_s if costs.decode_s else None,
                    "gain": costs.gain,
                }
                for kv_namespace, costs in policy.known().items()
            },
        }
