"""Records: one per request, a row of a Mooncake trace with the decisions on its attempts and their outcome. Pure.

Records are built from events and decisions; if the end of a request is unknown, its outcome is "unknown". Prompts and
tenants are hashed with the log's secret. Equal hash ids mean an equal prefix up to the end of that block, as in
Mooncake's traces. The converse does not hold: a partial last block has no key and gets a unique id.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conductor.decision_log.codec import to_json
from conductor.policy.decisions import Copy, Decision, Reject, ReleaseOrphan
from conductor.policy.events import NS, Event, NodeJoined, RequestArrived, RequestCompleted

_ID_NBYTES, _SPARE_BITS = 7, 4  # 52 bits, which JSON readers that use doubles represent exactly


class Hashes:
    """Generator of hash ids for blocks of `block_tokens` tokens, keyed by the log's `secret` (at most 64 bytes)."""

    def __init__(self, secret: bytes, block_tokens: int) -> None:
        self._secret = secret
        self.block_tokens = block_tokens

    def ids(self, keys: NDArray[np.uint64], key_tokens: int, prompt_tokens: int, request_id: str) -> list[int]:
        """Return one id per block of the prompt; the last block may be partial.

        `keys`: one per full block of `key_tokens` tokens, for the prefix up to its end; they include tenants' salts.
        """
        own = request_id.encode()
        found = []
        for number in range(-(-prompt_tokens // self.block_tokens)):
            end = min((number + 1) * self.block_tokens, prompt_tokens)
            covering = -(-end // key_tokens) - 1
            is_shared = covering < len(keys)
            text = int(keys[covering]).to_bytes(8, "little") if is_shared else own
            digest = self._digest(number.to_bytes(4, "little") + text, b"prefix" if is_shared else b"request")
            found.append(int.from_bytes(digest, "little") >> _SPARE_BITS)
        return found

    def tenant(self, name: str) -> str:
        """Return the tenant's hash in this log, or "" for an empty name."""
        return self._digest(name.encode(), b"tenant").hex() if name else ""

    def _digest(self, data: bytes, kind: bytes) -> bytes:
        return blake2b(data, digest_size=_ID_NBYTES, key=self._secret, person=kind).digest()


RECORD_VERSION = 1
Record = dict[str, Any]
_ASKS_AGAIN_S = 2.0  # frontends retry within a second of a rejection, if at all
_UNHEARD_S = 3600.0  # after this long without events a record is closed as unknown: its frontend may have died
_MOST_OPEN = 1 << 16
_MOST_IDS = 1 << 15  # per prompt: 16 million tokens in blocks of 512
_MOST_ATTEMPTS = 16  # kept per record; attempts in the middle are dropped


@dataclass(frozen=True, slots=True)
class RecordChange:
    """New or changed record. `is_over`: the record is complete."""

    record: Record
    is_over: bool


@dataclass(slots=True)
class _Open:
    record: Record
    ends_ns: int  # time at which the record is closed without further events


class Records:
    """Open records of requests. `now_ns`: policy's clock; `wall_ms`: milliseconds since 1970."""

    def __init__(self, hashes: Hashes, started_ms: int) -> None:
        """`started_ms`: start of the log, the origin of timestamps."""
        self._hashes = hashes
        self._started_ms = started_ms
        self._open: dict[str, _Open] = {}
        self._key_tokens: dict[str, int] = {}  # per model
        self._looked_ns = 0

    def __len__(self) -> int:
        return len(self._open)

    def find(self, request_id: str) -> Record | None:
        """Return the open record of a request."""
        entry = self._open.get(request_id)
        return entry.record if entry is not None else None

    def under_way(self) -> list[Record]:
        """Return all open records."""
        return [entry.record for entry in self._open.values()]

    def restore(self, now_ns: int, record: Record) -> None:
        """Add an open record of the previous conductor."""
        self._open[record["request_id"]] = _Open(record, now_ns + round(_UNHEARD_S * NS))

    def take(
        self, now_ns: int, wall_ms: int, event: Event, decisions: Sequence[Decision], keys: NDArray[np.uint64]
    ) -> Iterator[RecordChange]:
        """Apply an event and its decisions; yield the changed records."""
        match event:
            case RequestArrived():
                yield from self._decided(now_ns, wall_ms, event, decisions, keys)
            case RequestCompleted():
                yield from self._completed(now_ns, wall_ms, event)
            case NodeJoined(node) if node.role != "pool":
                self._key_tokens[node.model] = node.block_tokens
        for decision in decisions:
            match decision:
                case ReleaseOrphan(request_id) if request_id in self._open:
                    yield self._end(request_id, "orphaned")
                case Reject(request_id) if request_id in self._open and not isinstance(event, RequestArrived):
                    yield self._turned_away(now_ns, wall_ms, decision)
        if now_ns - self._looked_ns >= NS:
            self._looked_ns = now_ns
            yield from self._give_up(now_ns)

    def _decided(
        self, now_ns: int, wall_ms: int, event: RequestArrived, decisions: Sequence[Decision], keys: NDArray[np.uint64]
    ) -> Iterator[RecordChange]:
        entry = self._open.pop(event.request_id, None)
        if entry is not None and event.attempt < entry.record["attempts"][-1]["attempt"]:
            # The client reused the id for another request.
            self._open[event.request_id] = entry
            yield self._end(event.request_id, "unknown")
            entry = None
        record = self._new(wall_ms, event, keys) if entry is None else entry.record
        attempt = self._attempt(record, wall_ms, event.attempt, decisions[0])
        if event.generated:
            attempt["generated"] = event.generated
        if event.excluded:
            attempt["excluded"] = list(event.excluded)
        copies = [to_json(decision) for decision in decisions if isinstance(decision, Copy)]
        if copies:
            attempt["copies"] = copies
        _add_attempt(record, attempt)
        rejected = isinstance(decisions[0], Reject)
        record["outcome"] = "rejected" if rejected else "open"
        self._open[event.request_id] = _Open(record, now_ns + round((_ASKS_AGAIN_S if rejected else _UNHEARD_S) * NS))
        yield RecordChange(record, is_over=False)
        while len(self._open) > _MOST_OPEN:
            yield self._end(next(iter(self._open)))

    def _new(self, wall_ms: int, event: RequestArrived, keys: NDArray[np.uint64]) -> Record:
        asked_tokens = max(1, event.prompt_tokens - event.generated)
        # Longer prompts, which no node accepts, are truncated: a row must have an id for each of its blocks.
        prompt_tokens = min(asked_tokens, _MOST_IDS * self._hashes.block_tokens)
        key_tokens = self._key_tokens.get(event.model)
        if key_tokens is None:
            keys, key_tokens = keys[:0], 1
        record: Record = {
            "timestamp": max(0, wall_ms - self._started_ms),
            "input_length": prompt_tokens,
            "output_length": 0,
            "hash_ids": self._hashes.ids(keys, key_tokens, prompt_tokens, event.request_id),
            "version": RECORD_VERSION,
            "request_id": event.request_id,
            "at": wall_ms / 1000,
            "model": event.model,
            "max_new_tokens": event.max_new_tokens + event.generated,
            "outcome": "open",
            "attempts": [],
        }
        if asked_tokens > prompt_tokens:
            record["asked_length"] = asked_tokens
        if event.tenant:
            record["tenant"] = self._hashes.tenant(event.tenant)
        if event.slo_class:
            record["slo_class"] = event.slo_class
        return record

    def _completed(self, now_ns: int, wall_ms: int, event: RequestCompleted) -> Iterator[RecordChange]:
        entry = self._open.get(event.request_id)
        if entry is None:
            return
        record = entry.record
        attempts = record["attempts"]
        # The last attempt with that number, since a rejected attempt may have been retried.
        attempt = next((one for one in reversed(attempts) if one["attempt"] == event.attempt), attempts[-1])
        attempt["outcome"], attempt["ended_ms"] = event.outcome, self._since(record, wall_ms)
        record["output_length"] = event.generated
        for name, value in (("ttft_s", event.ttft_s), ("tbt_s", event.mean_tbt_s)):
            if value and isfinite(value):
                record[name] = value
        record["cached_tokens"] = event.cached_tokens
        if event.outcome == "retry":
            entry.ends_ns = now_ns + round(_UNHEARD_S * NS)
            yield RecordChange(record, is_over=False)
        else:
            yield self._end(event.request_id, "" if record["outcome"] == "rejected" else event.outcome)

    def _turned_away(self, now_ns: int, wall_ms: int, reject: Reject) -> RecordChange:
        """Record a rejection after prefill, before the first token was sent to the client."""
        entry = self._open[reject.request_id]
        _add_attempt(entry.record, self._attempt(entry.record, wall_ms, reject.attempt, reject))
        entry.record["outcome"], entry.ends_ns = "rejected", now_ns + round(_ASKS_AGAIN_S * NS)
        return RecordChange(entry.record, is_over=False)

    def _attempt(self, record: Record, wall_ms: int, number: int, decision: Decision) -> dict[str, Any]:
        fields = {name: value for name, value in to_json(decision).items() if name not in ("request_id", "attempt")}
        return {"attempt": number, "at_ms": self._since(record, wall_ms), "decision": fields}

    def _end(self, request_id: str, outcome: str = "") -> RecordChange:
        record = self._open.pop(request_id).record
        record["outcome"] = outcome or ("rejected" if record["outcome"] == "rejected" else "unknown")
        return RecordChange(record, is_over=True)

    def _give_up(self, now_ns: int) -> Iterator[RecordChange]:
        for request_id in [name for name, entry in self._open.items() if entry.ends_ns <= now_ns]:
            yield self._end(request_id)

    def _since(self, record: Record, wall_ms: int) -> int:
        """Return the milliseconds since the request's arrival."""
        return max(0, wall_ms - round(1000 * float(record["at"])))


def _add_attempt(record: Record, attempt: dict[str, Any]) -> None:
    attempts = record["attempts"]
    if len(attempts) == _MOST_ATTEMPTS:
        del attempts[_MOST_ATTEMPTS // 2]
        record["attempts_left_out"] = record.get("attempts_left_out", 0) + 1
    attempts.append(attempt)
