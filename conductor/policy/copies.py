"""Hot-spot copies under way: bounded, never the same one twice. Who is worth copying is Algorithm 1's word."""

from collections import Counter
from dataclasses import dataclass

__all__ = ["Copies", "Extent"]


@dataclass(frozen=True, slots=True)
class Extent:
    """A copied prefix in blocks."""

    num_blocks: int
    had_blocks: int  # of these, what the target had before


class Copies:
    """In-flight copies, known by (target pool, key of the prefix's last block)."""

    def __init__(self, max_copies: int, max_per_pool: int) -> None:
        self._max_copies = max_copies
        self._max_per_pool = max_per_pool
        self._under_way: dict[tuple[str, int], tuple[str, Extent]] = {}  # with the source

    def __len__(self) -> int:
        return len(self._under_way)

    def try_begin(self, source: str, target: str, match_key: int, extent: Extent) -> bool:
        """Note a copy as begun; False when it runs already or would be one too many."""
        into_target = sum(pool == target for pool, _ in self._under_way)
        if (
            source == target
            or (target, match_key) in self._under_way
            or len(self._under_way) >= self._max_copies
            or into_target >= self._max_per_pool
        ):
            return False
        self._under_way[target, match_key] = source, extent
        return True

    def end(self, target: str, match_key: int) -> Extent | None:
        """Note its end. None when it is not known (any more)."""
        _, extent = self._under_way.pop((target, match_key), ("", None))
        return extent

    def drop_pool(self, pool: str) -> None:
        """A pool node is lost, and with it the copies from and to it."""
        kept = {key: value for key, value in self._under_way.items() if pool not in (value[0], key[0])}
        self._under_way = kept

    def num_sends(self) -> Counter[str]:
        """Copies that each pool node sends."""
        return Counter(source for source, _ in self._under_way.values())
