"""The configuration keys of the KV pool: its room, what leaves it first, and how it is read and written."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from moonpool.config.fields import Key, Slice
from moonpool.config.sources import parse_size
from moonpool.errors import ConfigError

_NAMESPACE_NBYTES = 16


@dataclass(frozen=True)
class PoolSettings(Slice):
    """The KV pool."""

    panel: ClassVar[str] = "KV pool"
    pool_bytes: Annotated[
        int,
        Key(
            "Memory of each pool node for KV, e.g. 4GiB; taken as it fills",
            low=1 << 16,
            parse=parse_size,
            default_text="1GiB",
        ),
    ] = 1 << 30
    pool_hugepages: Annotated[
        str,
        Key(
            "Huge pages for that memory: auto as far as there are any, on nothing else, off none",
            choices=("auto", "on", "off"),
        ),
    ] = "auto"
    pool_ssd_dir: Annotated[
        Path | None,
        Key("Folder on an SSD; each pool node keeps KV in a subfolder of it, named like the node, also over restarts"),
    ] = None
    pool_ssd_bytes: Annotated[
        int | None,
        Key(
            "Room of each pool node in --pool-ssd-dir, taken at the first start",
            low=1 << 20,
            parse=parse_size,
            default_text="4 times --pool-bytes",
        ),
    ] = None
    pool_ssd_depth: Annotated[int, Key("Reads and writes in flight on the SSD", low=1, high=256)] = 16
    pool_policy: Annotated[
        str, Key("Who leaves a full pool first", choices=("lru", "lfu", "length-aware", "arc", "moonpool"))
    ] = "moonpool"
    pool_quota: Annotated[
        tuple[str, ...],
        Key("NAMESPACE=SHARE: the most of a pool node's memory that one model's KV takes; may be given several times"),
    ] = ()
    put_ttl: Annotated[float, Key("Seconds after which a put that was never sealed is dropped", low=0.1, high=3600)] = (
        30.0
    )
    lease: Annotated[float, Key("Seconds for which a reader holds blocks of the pool", low=0.1, high=3600)] = 30.0
    kv_load_wait: Annotated[
        float,
        Key("Seconds that a request waits for its KV on a pool node's SSD; then it is computed", low=0, high=600),
    ] = 2.0
    kv_parity_sample: Annotated[
        float,
        Key("Share of requests whose reused KV is computed as well and compared; 0: none", low=0, high=1),
    ] = 0.0
    kv_storage: Annotated[
        str,
        Key(
            "How KV is kept in the pool: as computed, or rounded to int8, an approximation in less than half the room",
            choices=("exact", "int8"),
        ),
    ] = "exact"

    @property
    def ssd_bytes(self) -> int:
        """Room of a pool node on the SSD; 0: no SSD tier."""
        if self.pool_ssd_dir is None:
            return 0
        return 4 * self.pool_bytes if self.pool_ssd_bytes is None else self.pool_ssd_bytes

    @property
    def quotas(self) -> dict[bytes, float]:
        """Largest share of memory by KV namespace."""
        return dict(_quota(entry) for entry in self.pool_quota)

    def check(self) -> None:
        for entry in self.pool_quota:
            _quota(entry)
        if self.kv_storage == "int8" and self.kv_parity_sample:
            raise ConfigError("--kv-parity-sample compares exact KV: it cannot be used with --kv-storage int8")
        if self.pool_ssd_bytes is not None and self.pool_ssd_dir is None:
            raise ConfigError("pool_ssd_bytes is set and pool_ssd_dir is not: say where, with --pool-ssd-dir FOLDER")


def _quota(entry: str) -> tuple[bytes, float]:
    namespace, _, share = entry.partition("=")
    with contextlib.suppress(ValueError):
        known, value = bytes.fromhex(namespace), float(share)
        if len(known) == _NAMESPACE_NBYTES and 0 < value <= 1:
            return known, value
    raise ConfigError(
        f"--pool-quota {entry!r}: expected NAMESPACE=SHARE, 32 hexadecimal digits as `moonpool pool status` shows "
        "them, and a number above 0, at most 1"
    )
