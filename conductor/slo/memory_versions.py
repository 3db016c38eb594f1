"""Versions of a conductor that was given no place to keep them: gone when it ends."""

from collections.abc import Sequence

from conductor.slo.versions import KEPT, Acknowledgement, SloVersion

__all__ = ["MemoryVersions"]


class MemoryVersions:
    """One conductor's alone."""

    outlives = False
    where = "this conductor's memory alone"

    def __init__(self) -> None:
        self._versions: list[SloVersion] = []
        self._said: list[Acknowledgement] = []

    async def history(self) -> list[SloVersion]:
        return list(self._versions)

    async def put(self, versions: Sequence[SloVersion], *, after: int) -> bool:
        if (self._versions[-1].version if self._versions else 0) != after:
            return False
        self._versions = [*self._versions, *versions][-KEPT:]
        return True

    async def acknowledge(self, mine: Acknowledgement, ttl_s: float) -> None:
        self._said = [mine]

    async def withdraw(self, node_id: str) -> None:
        self._said = []

    async def acknowledged(self) -> list[Acknowledgement]:
        return list(self._said)
