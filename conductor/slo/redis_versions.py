"""Versions in Redis, for all conductors of a cluster."""

from collections.abc import Sequence

from conductor.shared_store import RedisStore
from conductor.slo.versions import KEPT, Acknowledgement, SloVersion, VersionReader

__all__ = ["RedisVersions"]


class RedisVersions:
    """What `RedisStore` keeps of objectives, as what it means."""

    outlives = True

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._reader = VersionReader()

    @property
    def where(self) -> str:
        return f"Redis at {self._store.where}"

    async def history(self) -> list[SloVersion]:
        await self._store.claim()
        return self._reader.read(await self._store.slo_versions())

    async def put(self, versions: Sequence[SloVersion], *, after: int) -> bool:
        await self._store.claim()
        texts = {one.version: one.to_json() for one in versions[-KEPT:]}
        return await self._store.put_slo_versions(texts, after=after, keep=KEPT)

    async def acknowledge(self, mine: Acknowledgement, ttl_s: float) -> None:
        await self._store.put_slo_acknowledgement(mine.node_id, mine.to_json(), ttl_s)

    async def withdraw(self, node_id: str) -> None:
        await self._store.forget_slo_acknowledgement(node_id)

    async def acknowledged(self) -> list[Acknowledgement]:
        found = [Acknowledgement.from_json(text) for text in await self._store.slo_acknowledgements()]
        return sorted(found, key=lambda each: each.node_id)
