"""Markers: the tokens with which models mark reasoning and tool calls, in text and in grammars. Pure.

A marker may be a token of its own. A grammar then names the token by its id, since the text of a grammar never matches
such tokens; else the marker is text like any other.
"""

import json
from collections.abc import Mapping


def marker_rule(marker: str, markers: Mapping[str, int]) -> str:
    """Return the Lark expression of a marker. `markers` holds the ids of those that are tokens of their own."""
    return f"<[{markers[marker]}]>" if marker in markers else json.dumps(marker)


def up_to_marker(rule: str, marker: str, markers: Mapping[str, int], text: str = "TEXT") -> list[str]:
    """Return Lark rules for `rule`: text that matches `text`, and the first such marker, spelt or as a token."""
    token = f" | {text} {marker_rule(marker, markers)}" if marker in markers else ""
    return [f"{rule}: {rule}_spelt{token}", f"{rule}_spelt[lazy]: {text} {json.dumps(marker)}"]


def partial_length(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    return next((length for length in range(len(marker) - 1, 0, -1) if text.endswith(marker[:length])), 0)
