"""Choice between plain and coded blocks: coded where the model of a load below predicts that the load ends sooner.

Loading a block takes I/O (reading its stored bytes) and work on a CPU (verification, and decoding if it is coded);
before a link, it is encoded on another CPU. Batches overlap: one is read while others are worked on. With the totals
of these stages in a load of `batches` batches

    load_s = longest stage + all others / batches

Coding multiplies `io_s` by the ratio of coded to plain bytes and adds decoding and encoding. All figures are measured,
in operation, and smoothed. While blocks are stored plain, some are coded and decoded on trial, so that the ratio and
the speed of the codec stay known. No clock, no I/O.
"""

import enum
import math
from dataclasses import dataclass, field

MARGIN = 0.05
"""Least predicted gain, as a share of the load's time, for which blocks are coded."""
_TRIAL_EVERY = 64  # blocks of a namespace that are stored plain, per trial
_IO_MEMORY_NBYTES = 256 << 20  # half-lives of measurements
_CPU_MEMORY_NBYTES = 32 << 20
_BURST_WEIGHT = 1 / 8


class Storage(enum.Enum):
    """How to store a block."""

    PLAIN = "plain"
    CODED = "coded"
    TRIAL = "trial"  # plain; code and decode it, for the measurements


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Measured costs of a load. Seconds are per byte of the block, except `io_s`, per byte that is read."""

    io_s: float
    verify_s: float
    decode_s: float
    ratio: float  # coded bytes / bytes
    batches: float  # per load, at least 1
    encode_s: float = 0.0  # 0: coded blocks are stored

    def load_s(self, storage: Storage) -> float:
        """Return the predicted time of a load, in seconds per byte of its blocks."""
        is_coded = storage is Storage.CODED
        io_s = self.io_s * (self.ratio if is_coded else 1.0)
        cpu_s = self.verify_s + (self.decode_s if is_coded else 0.0)
        stages = (io_s, cpu_s, self.encode_s if is_coded else 0.0)
        longest_s = max(stages)
        return longest_s + (sum(stages) - longest_s) / self.batches

    @property
    def gain(self) -> float:
        """Predicted gain of coding, as a share of the time of a plain load; negative if coding is slower."""
        plain_s = self.load_s(Storage.PLAIN)
        return 1 - self.load_s(Storage.CODED) / plain_s if plain_s > 0 else 0.0


@dataclass(slots=True)
class SmoothedPace:
    """Smoothed seconds per byte: measurements lose half their weight per `half_nbytes` measured after them."""

    half_nbytes: float
    nbytes: float = 0.0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Record that `nbytes` took `seconds`."""
        kept = 0.5 ** (nbytes / self.half_nbytes)
        total = kept * self.nbytes + nbytes
        # The limit of many small measurements, so that a large one is forgotten as fast as they are.
        weight = min(1.0, self.half_nbytes / math.log(2) / total) if total else 0.0
        self.nbytes = weight * total
        self.seconds = weight * (kept * self.seconds + seconds)

    @property
    def known(self) -> bool:
        return self.nbytes > 0

    @property
    def per_byte_s(self) -> float:
        """Smoothed seconds per byte; 0 if nothing was measured."""
        return self.seconds / self.nbytes if self.nbytes else 0.0


@dataclass(slots=True)
class CodecRecord:
    """Results of coding in one namespace."""

    encode: SmoothedPace = field(default_factory=lambda: SmoothedPace(_CPU_MEMORY_NBYTES))  # if each read encodes
    decode: SmoothedPace = field(default_factory=lambda: SmoothedPace(_CPU_MEMORY_NBYTES))
    size: SmoothedPace = field(
        default_factory=lambda: SmoothedPace(_CPU_MEMORY_NBYTES)
    )  # coded bytes in place of seconds
    num_plain: int = _TRIAL_EVERY  # blocks stored plain since the last trial


class CompressionPolicy:
    """Measurements of one tier or link, and the choice for each namespace."""

    def __init__(self) -> None:
        self.io = SmoothedPace(_IO_MEMORY_NBYTES)
        self.verify = SmoothedPace(_CPU_MEMORY_NBYTES)
        self.batches = 1.0
        self._codecs: dict[bytes, CodecRecord] = {}

    def loaded(self, num_batches: float) -> None:
        """Record that a load consisted of this many batches."""
        self.batches += _BURST_WEIGHT * (max(1.0, num_batches) - self.batches)

    def coded(self, kv_namespace: bytes, nbytes: int, coded_nbytes: int) -> None:
        """Record that blocks of `nbytes` became `coded_nbytes` long; blocks that coding does not shorten count too."""
        self._codec(kv_namespace).size.add(nbytes, coded_nbytes)

    def decoded(self, kv_namespace: bytes, nbytes: int, seconds: float) -> None:
        """Record that decoding blocks of `nbytes` took `seconds`."""
        self._codec(kv_namespace).decode.add(nbytes, seconds)

    def encoded(self, kv_namespace: bytes, nbytes: int, seconds: float) -> None:
        """Record that encoding blocks of `nbytes`, which each load of them has to wait for, took `seconds`."""
        self._codec(kv_namespace).encode.add(nbytes, seconds)

    def costs(self, kv_namespace: bytes) -> LoadCosts | None:
        """Return the measured costs of the namespace's loads; None until all of them were measured."""
        codec = self._codecs.get(kv_namespace)
        if codec is None or not (self.io.known and codec.size.known and codec.decode.known):
            return None
        return LoadCosts(
            io_s=self.io.per_byte_s,
            verify_s=self.verify.per_byte_s,
            decode_s=codec.decode.per_byte_s,
            ratio=codec.size.per_byte_s,
            batches=self.batches,
            encode_s=codec.encode.per_byte_s,
        )

    def choose(self, kv_namespace: bytes) -> Storage:
        """Return how to store the namespace's next block; a trial is due at its first and once in a while."""
        costs = self.costs(kv_namespace)
        if costs is not None and costs.gain > MARGIN:
            return Storage.CODED
        codec = self._codec(kv_namespace)
        is_due = codec.num_plain >= _TRIAL_EVERY
        codec.num_plain = 0 if is_due else codec.num_plain + 1
        return Storage.TRIAL if is_due else Storage.PLAIN

    def known(self) -> dict[bytes, LoadCosts]:
        """Return the measured costs of each namespace of which all were measured."""
        found = {kv_namespace: self.costs(kv_namespace) for kv_namespace in self._codecs}
        return {kv_namespace: costs for kv_namespace, costs in found.items() if costs is not None}

    def _codec(self, kv_namespace: bytes) -> CodecRecord:
        return self._codecs.setdefault(kv_namespace, CodecRecord())
