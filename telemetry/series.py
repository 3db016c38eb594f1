"""Which metric a number that nodes report under a name belongs to: its family, kind and labels. Pure."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

__all__ = ["GAUGE_SUFFIXES", "Series", "series_of"]

GAUGE_SUFFIXES: Final = (
    *("_open", "_held_blocks", "_used_bytes", "_capacity_bytes", "_readable", "_writable", "_left_seconds"),
)
# What the messenger moved: which way, and in which units.
_WAY: Final = r"(?P<transport>[a-z]+)/(?P<direction>[a-z]+)"
_UNITS: Final = "bytes|slices|operations|seconds"
# Names that hold a label: the pattern's named groups are labels, but for `unit`, which goes into the family's name.
_LABELLED: Final = tuple(
    (re.compile(pattern), family, scale)
    for pattern, family, scale in (
        (r"kv_(?P<path>[a-z]+)_bytes", "kv_bytes_moved", 1.0),
        (r"pool_hit_(?P<tier>dram|ssd)_(?P<unit>blocks|tokens)", "pool_hit_{unit}", 1.0),
        (r"pool_evicted_(?P<tier>dram|ssd)_(?P<unit>bytes)", "pool_evicted_{unit}", 1.0),
        (r"pool_evicted_(?P<tier>dram|ssd)_(?P<reason>[a-z]+)_blocks", "pool_evicted_blocks", 1.0),
        (r"pool_evicted_(?P<tier>dram|ssd)_(?P<unit>age|idle)", "pool_evicted_{unit}", 1.0),
        (r"pool_lost_(?P<reason>[a-z_]+)_blocks", "pool_lost_blocks", 1.0),
        (r"pool_saved_(?P<tier>dram|ssd)_compute_us", "pool_saved_seconds", 1e-6),
        (rf"messenger_flow/(?P<peer>.*)/{_WAY}_(?P<unit>{_UNITS})", "messenger_{unit}", 1.0),
        (rf"messenger_rail/(?P<rail>.*)/{_WAY}_(?P<unit>{_UNITS})", "messenger_rail_{unit}", 1.0),
        (rf"messenger_latency/{_WAY}", "messenger_latency", 1.0),
        (rf"messenger_rail_latency/(?P<rail>.*)/{_WAY}", "messenger_rail_latency", 1.0),
        (r"trace_spans_(?P<result>[a-z]+)", "node_trace_spans", 1.0),
        (r"messenger_queued_(?P<priority>[a-z]+)_open", "messenger_queued_open", 1.0),
    )
)
# Sums of series that are exported by their labels, and what the pool's policy and its shell both count.
_TOLD_OTHERWISE: Final = {
    *("pool_evicted_blocks", "pool_lost_blocks"),
    *("pool_promoted_blocks", "pool_load_failed_blocks", "pool_ssd_stored_blocks", "pool_ssd_failed_blocks"),
}
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True)
class Series:
    """`family` is without the prefix moonpool: and without _total; the number is `scale` times what is reported."""

    family: str
    labels: tuple[tuple[str, str], ...] = ()
    is_gauge: bool = False
    scale: float = 1.0

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.labels)

    @property
    def label_values(self) -> tuple[str, ...]:
        return tuple(value for _, value in self.labels)


@lru_cache(maxsize=4096)
def series_of(name: str) -> Series | None:
    """Where the number goes; None for what other series tell."""
    if name in _TOLD_OTHERWISE:
        return None
    for pattern, family, scale in _LABELLED:
        if found := pattern.fullmatch(name):
            groups = found.groupdict()
            unit = groups.pop("unit", "")
            return Series(family.format(unit=unit), tuple(groups.items()), name.endswith(GAUGE_SUFFIXES), scale)
    family = _NOT_IN_NAMES.sub("_", name).removesuffix("_total")
    return Series(family, is_gauge=name.endswith(GAUGE_SUFFIXES))
