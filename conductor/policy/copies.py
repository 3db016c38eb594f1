"""Hot-spot copies under way: bounded, never the same one twice. Who is worth copying is Algorithm 1's word."""

from collections import Counter

__all__ = ["Copies"]


class Copies:
    """In-flight copies, known by (target pool, key of the prefix's last block)."""

    def __init__(self, max_copies: int, max_per_pool: int) -> None:
        self._max_copies = max_copies
        self._max_per_pool = max_per_pool
        self._sources: dict[tuple[str, int], str] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def try_begin(self, source: str, target: str, match_key: int) -> bool:
        """Note a copy as begun; False when it runs already or would be one too many."""
        into_target = sum(pool == target for pool, _ in self._sources)
        if (
            source == target
            or (target, match_key) in self._sources
            or len(self._sources) >= self._max_copies
            or into_target >= self._max_per_pool
        ):
            return False
        self._sources[target, match_key] = source
        return True

    def end(self, target: str, match_key: int) -> bool:
        """Note its end; False when it is not known (any more)."""
        return self._sources.pop((target, match_key), None) is not None

    def drop_pool(self, pool: str) -> None:
        """A pool node is lost, and with it the copies from and to it."""
        self._sources = {key: source for key, source in self._sources.items() if pool not in (source, key[0])}

    def num_sends(self) -> Counter[str]:
        """Copies that each pool node sends."""
        return Counter(self._sources.values())
