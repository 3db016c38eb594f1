"""Redis store shared by the conductors: its records as plain data and JSON, and one method per operation, with a
deadline.

Keys: `moonpool:cluster` (hash: name, format), `moonpool:epoch` (the last conductor's incarnation), `moonpool:node:ID`
(JSON, expires unless refreshed), `moonpool:snapshots` (hash: path -> JSON), `moonpool:slo` (hash: version -> JSON, and
`last`: number of the newest version), `moonpool:slo:ack:ID` (JSON, expires, too). A database holds one cluster.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from conductor.errors import SharedStoreRefused, SharedStoreUnavailable
from conductor.redis_url import redacted

FORMAT = 1  # of all stored data; other formats are rejected


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """Node of the cluster, as described by the conductor that it joined."""

    node_id: str
    role: str
    target: str
    incarnation: int
    host_id: str
    conductor: int  # that conductor's incarnation

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "NodeRecord":
        """Parse a record. Raises SharedStoreRefused."""
        try:
            fields = json.loads(text)
            record = cls(**{name: fields[name] for name in cls.__slots__})
            if type(record.incarnation) is not int or type(record.conductor) is not int:
                raise TypeError("incarnation and conductor must be integers")
            if not all(isinstance(each, str) for each in (record.node_id, record.role, record.target, record.host_id)):
                raise TypeError("node_id, role, target and host_id must be texts")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SharedStoreRefused(f"a node's record is invalid ({error!r})") from error
        return record


@dataclass(frozen=True, slots=True)
class SnapshotPointer:
    """Location of a directory snapshot."""

    path: str
    host: str
    written_at: float  # seconds since 1970
    positions: dict[str, tuple[int, int]]  # per pool node: incarnation and last event included

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "SnapshotPointer":
        """Parse a pointer. Raises SharedStoreRefused."""
        try:
            fields = json.loads(text)
            positions = {node: (int(at[0]), int(at[1])) for node, at in fields["positions"].items()}
            return cls(str(fields["path"]), str(fields["host"]), float(fields["written_at"]), positions)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise SharedStoreRefused(f"a pointer to a snapshot is invalid ({error!r})") from error


_CLUSTER, _EPOCH, _NODE, _SNAPSHOTS = "moonpool:cluster", "moonpool:epoch", "moonpool:node:", "moonpool:snapshots"
_CLAIM = """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('HSET', KEYS[1], 'name', ARGV[1], 'format', ARGV[2]) end
return redis.call('HMGET', KEYS[1], 'name', 'format')
"""
_SLO, _SLO_ACK = "moonpool:slo", "moonpool:slo:ack:"
# Compare and set. ARGV[1]: newest version that the caller knows; ARGV[2]: newest version to write; ARGV[3]: number of
# versions to keep; then alternating numbers and texts.
_PUT_SLO = """
if (redis.call('HGET', KEYS[1], 'last') or '0') ~= ARGV[1] then return 0 end
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], 'last', ARGV[2])
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  local number = tonumber(field)
  if number and number <= tonumber(ARGV[2]) - tonumber(ARGV[3]) then redis.call('HDEL', KEYS[1], field) end
end
return 1
"""
# Incarnations are at least microseconds since 1970, which a Lua number represents exactly until the year 2255.
_RAISE = """
local last = tonumber(redis.call('GET', KEYS[1]) or '0')
local want = tonumber(ARGV[1])
if ARGV[2] == 'new' and want <= last then want = last + 1 end
if want > last then redis.call('SET', KEYS[1], string.format('%.0f', want)) end
return string.format('%.0f', want)
"""


class RedisStore:
    """Client of the store.

    Methods raise SharedStoreUnavailable for temporary failures and SharedStoreRefused for permanent ones.
    """

    def __init__(self, url: str, cluster_name: str, *, deadline_s: float = 2.0) -> None:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self.where = redacted(url)
        self._cluster_name = cluster_name
        self._deadline_s = deadline_s
        self._redis = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,  # with 3, a rejected login cannot be distinguished from other errors
        )

    async def claim(self) -> None:
        """Check that the database belongs to this cluster and has this format; an empty one is claimed."""
        async with self._errors():
            name, kept_format = await self._redis.eval(_CLAIM, 1, _CLUSTER, self._cluster_name, FORMAT)
        if name != self._cluster_name:
            raise SharedStoreRefused(
                f"Redis at {self.where} belongs to the cluster {name!r}, but this one is {self._cluster_name!r}; use "
                "another database (redis://host:6379/1), or set --cluster-name if it is the same cluster"
            )
        if kept_format != str(FORMAT):
            raise SharedStoreRefused(
                f"Redis at {self.where} has data of format {kept_format}, but this version supports {FORMAT}; run the "
                "same version of all conductors, or use another database"
            )

    async def new_epoch(self, at_least: int) -> int:
        """Return an incarnation greater than all earlier ones."""
        async with self._errors():
            return int(await self._redis.eval(_RAISE, 1, _EPOCH, at_least, "new"))

    async def raise_epoch(self, own: int) -> None:
        """Make later incarnations greater than `own`, which Redis may not know because of an outage or data loss."""
        async with self._errors():
            await self._redis.eval(_RAISE, 1, _EPOCH, own, "raise")

    async def put_nodes(self, records: Iterable[NodeRecord], ttl_s: float) -> None:
        """Write the records; each expires after `ttl_s` unless written again."""
        async with self._errors(), self._redis.pipeline(transaction=False) as batch:
            for record in records:
                batch.set(_NODE + record.node_id, record.to_json(), px=round(ttl_s * 1000))
            await batch.execute()

    async def forget_nodes(self, node_ids: Iterable[str]) -> None:
        """Delete the records."""
        keys = [_NODE + node_id for node_id in node_ids]
        if keys:
            async with self._errors():
                await self._redis.delete(*keys)

    async def nodes(self) -> dict[str, NodeRecord]:
        """Return the records of all nodes of the cluster."""
        records = [NodeRecord.from_json(text) for text in await self._texts(_NODE)]
        return {record.node_id: record for record in records}

    async def put_snapshot(self, pointer: SnapshotPointer) -> None:
        """Write a pointer to a snapshot; it replaces an earlier one of the same path."""
        async with self._errors():
            await self._redis.hset(_SNAPSHOTS, pointer.path, pointer.to_json())

    async def snapshots(self) -> list[SnapshotPointer]:
        """Return all pointers."""
        async with self._errors():
            texts = await self._redis.hvals(_SNAPSHOTS)
        return [SnapshotPointer.from_json(str(text)) for text in texts]

    async def slo_versions(self) -> list[str]:
        """Return the versions of the record of objectives, oldest first."""
        async with self._errors():
            fields = await self._redis.hgetall(_SLO)
        texts = {int(name): str(text) for name, text in fields.items() if str(name).isdecimal()}
        return [texts[number] for number in sorted(texts)]

    async def put_slo_versions(self, texts: Mapping[int, str], *, after: int, keep: int) -> bool:
        """Write versions, in ascending order, if the newest stored one is `after` (0: none); else return False."""
        pairs = [item for number, text in texts.items() for item in (number, text)]
        async with self._errors():
            return bool(await self._redis.eval(_PUT_SLO, 1, _SLO, after, max(texts), keep, *pairs))

    async def put_slo_acknowledgement(self, node_id: str, text: str, ttl_s: float) -> None:
        """Write a conductor's acknowledgement; it expires after `ttl_s` unless written again."""
        async with self._errors():
            await self._redis.set(_SLO_ACK + node_id, text, px=round(ttl_s * 1000))

    async def forget_slo_acknowledgement(self, node_id: str) -> None:
        """Delete a conductor's acknowledgement."""
        async with self._errors():
            await self._redis.delete(_SLO_ACK + node_id)

    async def slo_acknowledgements(self) -> list[str]:
        """Return the acknowledgements of all conductors."""
        return await self._texts(_SLO_ACK)

    async def close(self) -> None:
        """Disconnect, whatever state the connection is in."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._deadline_s):
                await self._redis.aclose()

    async def _texts(self, prefix: str) -> list[str]:
        """Return the values of all keys with this prefix."""
        async with self._errors():
            keys = [key async for key in self._redis.scan_iter(match=prefix + "*", count=1000)]
            texts = await self._redis.mget(keys) if keys else []
        return [str(text) for text in texts if text is not None]

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Apply one operation's deadline and translate its errors."""
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(2 * self._deadline_s):
                yield
        except UnicodeDecodeError:
            raise SharedStoreRefused(_foreign(self.where)) from None
        except (RedisError, OSError, TimeoutError) as error:
            # Reconnect: after a failover, connections may still lead to the former primary.
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            # `from None`, because the chained exception could reveal connection details.
            raise _translated(error, self.where) from None


def _translated(error: Any, where: str) -> SharedStoreUnavailable | SharedStoreRefused:
    from redis import exceptions as e

    text = str(error) or type(error).__name__
    denied = (e.AuthenticationError, e.AuthorizationError, e.AuthenticationWrongNumberOfArgsError, e.NoPermissionError)
    phrases = ("invalid username-password", "Authentication required", "WRONGPASS", "NOAUTH", "NOPERM")
    if isinstance(error, denied) or any(words in text for words in phrases):
        return SharedStoreRefused(
            f"Redis at {where} rejects the login ({_first_line(text)}); check user and password in redis_url"
        )
    if "WRONGTYPE" in text:
        return SharedStoreRefused(_foreign(where))
    if isinstance(error, e.ReadOnlyError) or "READONLY" in text:
        return SharedStoreUnavailable(f"Redis at {where} is a read-only replica; set redis_url to the primary")
    if isinstance(error, e.OutOfMemoryError) or "OOM command" in text:
        return SharedStoreUnavailable(
            f"Redis at {where} is out of memory (maxmemory reached); raise maxmemory or use a dedicated Redis"
        )
    if isinstance(error, e.TimeoutError | TimeoutError) or text.startswith("Timeout "):
        return SharedStoreUnavailable(f"Redis at {where} does not answer in time")
    if isinstance(error, e.ConnectionError | OSError):
        return SharedStoreUnavailable(f"Redis at {where} cannot be reached ({_first_line(text)})")
    return SharedStoreUnavailable(f"Redis at {where} cannot serve ({_first_line(text)})")


def _foreign(where: str) -> str:
    return f"Redis at {where} has foreign data under the keys moonpool:...; use another database"


def _first_line(text: str) -> str:
    return text.splitlines()[0].rstrip(".")
