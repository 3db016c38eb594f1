"""Settings of pool nodes: memory, SSD and eviction."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from settings.keys import InvalidSetting, Key, SettingsGroup, parse_size

__all__ = ["PoolSettings"]

_NAMESPACE_NBYTES = 16


@dataclass(frozen=True)
class PoolSettings(SettingsGroup):
    """Storage of one pool node."""

    panel: ClassVar[str] = "KV pool"
    pool_bytes: Annotated[
        int,
        Key(
            "Memory of each pool node for KV, e.g. 4GiB; committed as needed",
            low=1 << 16,
            parse=parse_size,
            default_text="1GiB",
        ),
    ] = 1 << 30
    pool_min_bytes: Annotated[
        int | None,
        Key(
            "Memory that each pool node keeps under memory pressure; it grows up to --pool-bytes while memory is idle",
            low=1 << 16,
            parse=parse_size,
            default_text="--pool-bytes, which never shrinks",
        ),
    ] = None
    pool_hugepages: Annotated[
        Literal["auto", "on", "off"],
        Key("Huge pages for this memory: auto uses them if available, on requires them, off disables them"),
    ] = "auto"
    pool_ssd_dir: Annotated[
        Path | None,
        Key("Folder on an SSD; each pool node keeps KV there in a subfolder of its name, across restarts"),
    ] = None
    pool_ssd_bytes: Annotated[
        int | None,
        Key(
            "Space of each pool node in --pool-ssd-dir, allocated at its first start",
            low=1 << 20,
            parse=parse_size,
            default_text="4 times --pool-bytes",
        ),
    ] = None
    pool_ssd_depth: Annotated[int, Key("Maximum concurrent reads and writes on the SSD", low=1, high=256)] = 16
    pool_ssd_compression: Annotated[
        Literal["off", "auto"],
        Key("Lossless compression of KV on the SSD: auto compresses what is predicted to load sooner, off nothing"),
    ] = "off"
    pool_copy_compression: Annotated[
        Literal["off", "auto"],
        Key("Lossless compression of KV that is copied from other pool nodes: auto where it is predicted to be faster"),
    ] = "off"
    pool_policy: Annotated[
        str, Key("Eviction policy of a full pool", choices=("lru", "lfu", "length-aware", "arc", "moonpool"))
    ] = "moonpool"
    pool_quota: Annotated[
        tuple[str, ...],
        Key("NAMESPACE=SHARE: maximum share of a pool node's memory for one model's KV; may be given several times"),
    ] = ()
    pool_retained_share: Annotated[
        float,
        Key("Maximum share of each tier for prompts that clients announce to use again; 0 retains none", low=0, high=1),
    ] = 0.75
    pool_retained_tenant_share: Annotated[
        float,
        Key("Maximum share of each tier for such prompts of one tenant, within --pool-retained-share", low=0, high=1),
    ] = 0.5

    @property
    def ssd_bytes(self) -> int:
        """Space of a pool node on the SSD; 0 without an SSD tier."""
        if self.pool_ssd_dir is None:
            return 0
        return 4 * self.pool_bytes if self.pool_ssd_bytes is None else self.pool_ssd_bytes

    @property
    def is_elastic(self) -> bool:
        """True if the memory may shrink."""
        return self.pool_min_bytes is not None and self.pool_min_bytes < self.pool_bytes

    @property
    def quotas(self) -> dict[bytes, float]:
        """Maximum share of memory by KV namespace."""
        return dict(_quota(entry) for entry in self.pool_quota)

    def check(self) -> None:
        for entry in self.pool_quota:
            _quota(entry)
        if self.pool_min_bytes is not None and self.pool_min_bytes > self.pool_bytes:
            raise InvalidSetting(
                f"--pool-min-bytes must be at most --pool-bytes ({self.pool_bytes}), got {self.pool_min_bytes}"
            )
        if self.is_elastic and self.pool_hugepages == "on":
            raise InvalidSetting(
                "--pool-min-bytes below --pool-bytes conflicts with --pool-hugepages on: reserved huge pages cannot be "
                "returned to other processes; use --pool-hugepages auto"
            )
        if self.pool_ssd_bytes is not None and self.pool_ssd_dir is None:
            raise InvalidSetting("--pool-ssd-bytes needs a folder: give it with --pool-ssd-dir FOLDER")


def _quota(entry: str) -> tuple[bytes, float]:
    namespace, _, share = entry.partition("=")
    with contextlib.suppress(ValueError):
        known, value = bytes.fromhex(namespace), float(share)
        if len(known) == _NAMESPACE_NBYTES and 0 < value <= 1:
            return known, value
    raise InvalidSetting(
        f"--pool-quota must be NAMESPACE=SHARE, 32 hexadecimal digits as shown by `moonpool pool status` and a number "
        f"above 0 and at most 1, got {entry!r}"
    )
