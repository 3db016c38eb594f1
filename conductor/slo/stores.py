"""Stores of versions of the objectives: in memory, in a folder of the machine, or in Redis for the cluster.

The file in the folder is replaced atomically under a file lock; several conductors of the machine may share it.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from conductor.errors import SharedStoreRefused, SharedStoreUnavailable
from conductor.shared_store import RedisStore
from conductor.slo.versions import KEPT, Acknowledgement, SloVersion, VersionReader
from rpc.private_folder import open_trusted


class MemoryVersions:
    """Versions in one conductor's memory, which are lost when it exits."""

    outlives = False
    where = "only this conductor's memory"

    def __init__(self) -> None:
        self._versions: list[SloVersion] = []
        self._acknowledged: list[Acknowledgement] = []

    async def history(self) -> list[SloVersion]:
        return list(self._versions)

    async def put(self, versions: Sequence[SloVersion], *, after: int) -> bool:
        if (self._versions[-1].version if self._versions else 0) != after:
            return False
        self._versions = [*self._versions, *versions][-KEPT:]
        return True

    async def acknowledge(self, mine: Acknowledgement, ttl_s: float) -> None:
        self._acknowledged = [mine]

    async def withdraw(self, node_id: str) -> None:
        self._acknowledged = []

    async def acknowledged(self) -> list[Acknowledgement]:
        return list(self._acknowledged)


T = TypeVar("T")
_FORMAT = 1
_LOCK_S = 5.0  # the lock is held only during small writes
_POLL_S = 0.01


class FileVersions:
    """Versions in `objectives.json` in a folder, with a small file per acknowledging conductor beside it."""

    outlives = True

    def __init__(self, folder: Path, cluster_name: str) -> None:
        """Create the folder. Raises OSError if that fails."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(open_trusted(folder))
        self._folder = folder.resolve()
        self._path = self._folder / "objectives.json"
        self._cluster_name = cluster_name
        self._reader = VersionReader()

    @property
    def where(self) -> str:
        return str(self._path)

    async def history(self) -> list[SloVersion]:
        return await self._run(self._read)

    async def put(self, versions: Sequence[SloVersion], *, after: int) -> bool:
        def put() -> bool:
            with self._locked():
                kept = self._read()
                if (kept[-1].version if kept else 0) != after:
                    return False
                self._write([*kept, *(one for one in versions if one.version > after)])
                return True

        return await self._run(put)

    async def keep(self, versions: Sequence[SloVersion]) -> None:
        """Replace the contents by these versions, as a copy of another store.

        Damaged contents are overwritten; those of another cluster raise SharedStoreRefused.
        """

        def keep() -> None:
            with self._locked():
                self._refuse_another(self._owner())
                self._write(versions)

        await self._run(keep)

    async def acknowledge(self, mine: Acknowledgement, ttl_s: float) -> None:
        def write() -> None:
            entry = {"until": time.time() + ttl_s, "said": mine.to_json()}
            _replace(self._acknowledgement(mine.node_id), json.dumps(entry))

        await self._run(write)

    async def withdraw(self, node_id: str) -> None:
        await self._run(lambda: self._acknowledgement(node_id).unlink(missing_ok=True))

    async def acknowledged(self) -> list[Acknowledgement]:
        def read() -> list[Acknowledgement]:
            found = []
            for path in self._folder.glob("acknowledged-*.json"):
                with contextlib.suppress(FileNotFoundError):
                    entry = json.loads(path.read_text(encoding="utf-8"))
                    if entry["until"] >= time.time():
                        found.append(Acknowledgement.from_json(entry["said"]))
                    else:
                        path.unlink()
            return sorted(found, key=lambda each: each.node_id)

        return await self._run(read)

    async def _run(self, work: Callable[[], T]) -> T:
        working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:  # the thread cannot be cancelled: wait, so that writes stay in order
            await asyncio.wait([working])
            raise
        except OSError as error:
            raise SharedStoreUnavailable(f"{self._path} cannot be used: {error}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SharedStoreRefused(f"a file beside {self._path} is invalid ({error!r})") from error

    def _read(self) -> list[SloVersion]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        try:
            content = json.loads(text)
            name, versions = content["cluster"], self._reader.read(content["versions"])
            if content["format"] != _FORMAT or [one.version for one in versions] != sorted(
                {o.version for o in versions}
            ):
                raise ValueError(f"format {content['format']}, or versions out of order")
        except (ValueError, KeyError, TypeError, RecursionError, SharedStoreRefused) as error:
            raise SharedStoreRefused(
                f"{self._path} is damaged or of another version of this program ({error}); repair it or move it away: "
                "without it, the configuration provides the first version again"
            ) from error
        self._refuse_another(name)
        return versions

    def _owner(self) -> str | None:
        """Return the name of the file's cluster; None if there is no file or it is unreadable."""
        try:
            name = json.loads(self._path.read_text(encoding="utf-8"))["cluster"]
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return name if isinstance(name, str) else None

    def _refuse_another(self, name: str | None) -> None:
        if name not in (None, self._cluster_name):
            raise SharedStoreRefused(
                f"{self._path} belongs to the cluster {name!r}, but this one is {self._cluster_name!r}; use another "
                "folder, or set --cluster-name if it is the same cluster"
            )

    def _write(self, versions: Sequence[SloVersion]) -> None:
        kept = [one.to_json() for one in versions[-KEPT:]]
        content = {"format": _FORMAT, "cluster": self._cluster_name, "versions": kept}
        _replace(self._path, json.dumps(content, indent=1))

    def _acknowledgement(self, node_id: str) -> Path:
        return self._folder / f"acknowledged-{quote(node_id, safe='')}.json"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file lock. Raises TimeoutError, an OSError, if another process holds it for too long."""
        with (self._folder / "objectives.lock").open("a") as lock:
            deadline_s = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        raise TimeoutError(f"another process holds {lock.name}") from None
                    time.sleep(_POLL_S)
            yield


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically and durably: readers see the old or the new contents, even after a crash."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class RedisVersions:
    """Versions in Redis, through `RedisStore`."""

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
