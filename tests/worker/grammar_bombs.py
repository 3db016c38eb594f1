"""Grammars that take exponential time and memory but keep to all limits on their size."""

import json


def allof_bomb(num_patterns: int, number: int = 0) -> str:
    """Return a JSON schema that conjoins patterns by references; time doubles with each. `number` makes it unique."""
    patterns = {f"p{i}": {"pattern": f"(a|b)*c{{{i}}}(a|b)*"} for i in range(1, num_patterns + 1)}
    refs = [{"$ref": f"#/$defs/{name}"} for name in patterns]
    return json.dumps({"type": "string", "allOf": refs, "$defs": patterns, "description": str(number)})


def late_bomb() -> str:
    """Return a Lark grammar that is cheap to compile and takes seconds for the token after `x;`."""
    alternatives = " | ".join(" ".join("s" for _ in range(count)) for count in range(2, 60))
    return f'start: "x;" s\ns: {alternatives} | /-/ | '
