"""Mutation of byte strings, and of the values behind JSON, YAML, msgpack and protobuf messages.

All functions draw from the generator that they are given, so a seed determines every case.
"""

import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_CASE_NBYTES = 1 << 20
_NUMBERS = (0, 1, 2, 3, 7, 8, 16, 127, 128, 255, 256, 511, 512, 4095, 4096, 32767, 32768, 65535, 65536)
_LARGE = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
INTEGERS = (*_NUMBERS, *_LARGE, *(-value for value in (*_NUMBERS, *_LARGE)))
FLOATS = (0.0, -0.0, 0.5, -1.0, 1e-320, 1e300, -1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", " ", "a", "\x00", "\n", "é", "🎉", "\ud800", "\uffff", "..", "/", "/nowhere", "~nobody", "%s", "{}", "null",
    "true", "0", "-1", "1e999", "9" * 30, "9" * 5000, "x" * 300, "x" * 70_000, "unix:/nowhere", "[::1]:1", "a\nb",
)  # fmt: skip
_DEEP = 3000
_MARK = "\ue000deep"


def mutate_bytes(rng: random.Random, data: bytes, other: bytes, tokens: Sequence[bytes] = ()) -> bytes:
    """Return `data` after one to five random edits."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        rng.choice(_EDITS)(rng, out, other, tokens)
    return bytes(out[:MAX_CASE_NBYTES])


def _flip(rng: random.Random, out: bytearray, other: bytes, tokens: Sequence[bytes]) -> None:
    if out:
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, out: bytearray, other: bytes, tokens: Sequence[bytes]) -> None:
    if out:
        out[rng.randrange(len(out))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _number(rng: random.Random, out: bytearray, other: bytes, tokens: Sequence[bytes]) -> None:
    code, size = rng.choice((("H", 2), ("I", 4), ("Q", 8)))
    if len(out) >= size:
        value = rng.choice((rng.choice(INTEGERS), len(out), len(out) + rng.randrange(-64, 64)))
        at = rng.randrange(len(out) - size + 1)
        out[at : at + size] = struct.pack(rng.choice("<<>") + code, value % (1 << 8 * size))


def _insert(rng: random.Random, out: bytearray, other: bytes, tokens: Sequence[bytes]) -> None:
    at = rng.randrange(len(out) + 1)
    piece = rng.choice(tokens) if tokens and rng.random() < 0.6 else rng.randbytes(rng.choice((1, 1, 2, 4, 16, 64)))
    out[at:at] = piece * rng.choice((1, 1, 1, 1, 2, 50))


def _overwrite(rng: random.Random, out: bytearray, other: bytes, tokens: Sequence[bytes]) -> None:
    if out:
        at = rng.randrange(len(out))
        piece = rng.choice(tokens) if tokens else rng.randbytes(4)
        out[at : at + len(piece)] = piece


def _delete(rng: random.Random, out: bytearray, other: bytes, tokens: Sequence[bytes]) -> None:
    start, end = _range(rng, len(out))
    del out[start:end]


def _repeat(rng: random.Random, out: bytearray, other: bytes, tokens: Sequence[bytes]) -> None:
    start, end = _range(rng, len(out))
    out[end:end] = out[start:end] * min(rng.choice((1, 1, 2, 8, 200)), 1 + 20_000 // max(1, end - start))


def _splice(rng: random.Random, out: bytearray, other: bytes, tokens: Sequence[bytes]) -> None:
    start, end = _range(rng, len(other))
    at = rng.randrange(len(out) + 1)
    out[at : at + rng.choice((0, end - start))] = other[start:end]


def _truncate(rng: random.Random, out: bytearray, other: bytes, tokens: Sequence[bytes]) -> None:
    del out[rng.randrange(len(out) + 1) :]


_EDITS: tuple[Callable[[random.Random, bytearray, bytes, Sequence[bytes]], None], ...] = (
    _flip, _flip, _set, _number, _number, _insert, _overwrite, _delete, _repeat, _splice, _truncate,
)  # fmt: skip


def _range(rng: random.Random, size: int) -> tuple[int, int]:
    start = rng.randrange(size + 1)
    return start, min(size, start + rng.choice((1, 2, 4, 16, 64, 256, 4096)))


def mutate_value(rng: random.Random, value: Any, other: Any = None, words: Sequence[Any] = ()) -> Any:
    """Return a tree of dicts, lists and scalars with one to three random changes; `words`: further scalars and keys."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(rng, value, other, words)
    return value


def _changed(rng: random.Random, value: Any, other: Any, words: Sequence[Any]) -> Any:
    """Return a copy with one change at a random place."""
    places = list(_places(value))
    path = rng.choice(places) if len(places) == 1 or rng.random() < 0.9 else ()
    if not path:
        return _replaced(rng, value, other, words)
    if isinstance(value, dict):
        key = path[0]
        found = dict(value)
        if len(path) == 1:
            action = rng.randrange(6)
            if action == 0:
                del found[key]
                return found
            if action == 1:
                found[_key(rng, words)] = found[key]
                return found
        found[key] = _at(rng, value[key], path[1:], other, words)
        return found
    items = list(value)
    if len(path) == 1:
        action = rng.randrange(7)
        if action == 0:
            del items[path[0]]
            return items
        if action == 1:
            items.insert(path[0], items[path[0]])
            return items
        if action == 2:
            rng.shuffle(items)
            return items
    items[path[0]] = _at(rng, value[path[0]], path[1:], other, words)
    return items


def _at(rng: random.Random, value: Any, path: tuple[Any, ...], other: Any, words: Sequence[Any]) -> Any:
    """Return `value` changed at `path`."""
    if not path:
        return _replaced(rng, value, other, words)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _at(rng, value[path[0]], path[1:], other, words)
    return copy


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if len(path) < 12:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from _places(item, (*path, key))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value[:64]):
                yield from _places(item, (*path, index))


def _replaced(rng: random.Random, value: Any, other: Any, words: Sequence[Any]) -> Any:
    action = rng.randrange(12)
    if action == 0 and isinstance(value, bool | int):
        return int(value) + rng.choice((-1, 1, 8, -8))
    if action == 1 and isinstance(value, str | bytes):
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        raw = mutate_bytes(rng, raw, b"")
        return raw.decode("utf-8", "replace") if isinstance(value, str) else raw
    if action == 2:
        return [value]
    if action == 3:
        return {_key(rng, words): value}
    if action == 4 and isinstance(value, list):
        return value * rng.choice((0, 2, 40))
    if action == 5 and other is not None:
        places = list(_places(other))
        return _get(other, rng.choice(places))
    if action in (6, 7) and words:
        return rng.choice(words)
    if action == 8:
        return _MARK
    return scalar(rng)


def scalar(rng: random.Random) -> Any:
    """Return a value on which parsers stumble."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(INTEGERS)
    if kind == 1:
        return rng.choice(FLOATS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.choice((None, True, False, [], {}, [[]], [None], {"": None}))
    if kind == 4:
        return rng.choice((10**40, -(10**40), 10**400))
    return rng.randrange(-4, 100)


def _key(rng: random.Random, words: Sequence[Any]) -> str:
    return str(rng.choice(words)) if words and rng.random() < 0.7 else rng.choice(TEXTS)[:80]


def _get(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def to_json(rng: random.Random, value: Any) -> bytes:
    """Encode a mutated value as JSON, including what only lenient parsers accept; deep nesting where it is marked."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    mark = json.dumps(_MARK).encode()
    for spelled in (mark, f'"{_MARK}"'.encode()):
        if spelled in text:
            deep = rng.choice((b"[" * _DEEP + b"]" * _DEEP, b'{"a":' * _DEEP + b"1" + b"}" * _DEEP))
            deep = deep if rng.random() < 0.95 else b"[" * 200_000
            text = text.replace(spelled, deep)
    return text


def from_json(data: bytes) -> Any:
    """Decode JSON; None if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def mutate_json(
    rng: random.Random, case: bytes, other: bytes, tokens: Sequence[bytes] = (), words: Sequence[Any] = ()
) -> bytes:
    """Return a mutated JSON text: mostly changed in its structure, sometimes in its bytes."""
    value = from_json(case) if rng.random() < 0.8 else None
    if value is None:
        return mutate_bytes(rng, case, other, tokens)
    try:
        return to_json(rng, mutate_value(rng, value, from_json(other), words))
    except (ValueError, RecursionError):
        return mutate_bytes(rng, case, other, tokens)


def mutate_message(rng: random.Random, message: Message) -> None:
    """Change one to four fields of a protobuf message, at any depth, in place; it stays valid on the wire."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        part = message
        while True:
            children = [
                value
                for field, value in part.ListFields()
                if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_repeated(field)
            ]
            children += [
                item
                for field, value in part.ListFields()
                if _is_repeated(field) and field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field)
                for item in value[:8]
            ]
            if not children or rng.random() < 0.35:
                break
            part = rng.choice(children)
        if part.DESCRIPTOR.fields:
            _set_field(rng, part, rng.choice(list[Any](part.DESCRIPTOR.fields)))


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _set_field(rng: random.Random, message: Message, field: FieldDescriptor) -> None:
    if rng.random() < 0.15:
        message.ClearField(field.name)
        return
    if _is_map(field):
        entry: Any = field.message_type.fields_by_name  # type: ignore[union-attr]
        target = getattr(message, field.name)
        key = _field_value(rng, entry["key"])
        if entry["value"].type == FieldDescriptor.TYPE_MESSAGE:
            target[key].SetInParent()
        else:
            target[key] = _field_value(rng, entry["value"])
        return
    if _is_repeated(field):
        values = getattr(message, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if values and rng.random() < 0.5:
                values.add().CopyFrom(rng.choice(values[:8]))
            elif values and rng.random() < 0.5:
                del values[rng.randrange(len(values))]
            else:
                values.add()
        else:
            values.extend(_field_value(rng, field) for _ in range(rng.choice((1, 2, 50))))
        return
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, field.name).SetInParent()
        return
    old = getattr(message, field.name)
    if isinstance(old, bytes) and old and rng.random() < 0.5:
        setattr(message, field.name, mutate_bytes(rng, old, old)[:65536])
    elif isinstance(old, int) and not isinstance(old, bool) and rng.random() < 0.3:
        least, most = _LIMITS.get(field.type, (0, 1))
        setattr(message, field.name, min(max(old + rng.choice((-1, 1)), least), most))
    else:
        setattr(message, field.name, _field_value(rng, field))


_F = FieldDescriptor
_LIMITS = {
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32, _F.TYPE_ENUM), (-(2**31), 2**31 - 1)),
    **dict.fromkeys((_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64), (-(2**63), 2**63 - 1)),
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_FIXED32), (0, 2**32 - 1)),
    **dict.fromkeys((_F.TYPE_UINT64, _F.TYPE_FIXED64), (0, 2**64 - 1)),
}


def _field_value(rng: random.Random, field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_ENUM:
        kind: Any = field.enum_type
        return rng.choice((*(value.number for value in kind.values), 99, -1))
    if field.type in _LIMITS:
        least, most = _LIMITS[field.type]
        return rng.choice((*(value for value in INTEGERS if least <= value <= most), most, least, rng.randrange(64)))
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice((*FLOATS, 1.0, 60.0))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice(
            (b"", b"\0", bytes(8), bytes(16), rng.randbytes(16), rng.randbytes(17), bytes(64), bytes(5000))
        )
    return rng.choice(TEXTS).encode("utf-8", "replace").decode("utf-8")
