"""Schemas of tools' arguments as they are embedded in grammars. Pure.

A strict schema is enforced completely, or is an error. Other schemas, such as those of agents and their MCP servers,
are enforced as far as the grammar library can: it ignores keywords that it does not support and takes `oneOf` for
`anyOf`, and patterns that it cannot express and keywords that are null are left out here.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from worker.grammar_frames import MAX_LARK_REPEATS

_LENIENT: Final = {"lenient": True, "coerce_one_of": True}
# Grammars have a limited size, and constrain nothing by these.
_ANNOTATIONS: Final = frozenset({"$comment", "default", "deprecated", "description", "examples", "title"})
_MAPS_OF_SCHEMAS: Final = frozenset({"$defs", "definitions", "properties", "patternProperties"})
_LISTS_OF_SCHEMAS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMAS: Final = frozenset({"additionalProperties", "items"})
_ESCAPE: Final = re.compile(r"\\(?:[^a-zA-Z0-9]|[afnrtvdDsSwWAzpPxuU])")
# Look-around, back references, atomic groups, and all other escapes, such as word boundaries.
_INEXPRESSIBLE: Final = re.compile(r"\(\?(<?[=!]|P=|>)|\\")
_REPETITION: Final = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def grammar_schema(schema: Mapping[str, Any], *, is_strict: bool, spacing: Mapping[str, Any]) -> str:
    """Return the JSON text of a schema for a grammar. `spacing` holds the grammar library's options of white space."""
    options = spacing if is_strict else {**spacing, **_LENIENT}
    found = {**_constraints(schema, is_strict=is_strict), "x-guidance": options}
    return json.dumps(found, separators=(",", ":"))


def _constraints(schema: Any, *, is_strict: bool) -> Any:
    """Return a schema without annotations and, unless it is strict, without patterns that no grammar can express."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS or (not is_strict and _has_no_effect(key, value)):
            continue
        if key in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: _constraints(each, is_strict=is_strict) for name, each in value.items()}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            found[key] = [_constraints(each, is_strict=is_strict) for each in value]
        else:
            found[key] = _constraints(value, is_strict=is_strict) if key in _SCHEMAS else value
    patterns = found.get("patternProperties")
    if not is_strict and isinstance(patterns, Mapping) and any(map(_is_inexpressible, patterns)):
        # The others, and `additionalProperties`, are for names that it does not match.
        del found["patternProperties"]
        found.pop("additionalProperties", None)
    return found


def _has_no_effect(key: str, value: Any) -> bool:
    """Return True for a keyword that is left out of a schema that is not strict."""
    if value is None:  # as some libraries write what a schema lacks
        return key != "const"
    return key == "pattern" and _is_inexpressible(value)


def _is_inexpressible(pattern: Any) -> bool:
    if not isinstance(pattern, str):
        return False
    rest = _ESCAPE.sub("", pattern)
    counts = [count for found in _REPETITION.findall(rest) for count in found if count]
    return _INEXPRESSIBLE.search(rest) is not None or any(_is_above(count, MAX_LARK_REPEATS) for count in counts)


def _is_above(digits: str, limit: int) -> bool:
    significant = digits.lstrip("0")
    return len(significant) > len(str(limit)) or int(significant or "0") > limit
