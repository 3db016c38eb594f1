"""Matching of a call's syntax at the beginning of text that is still incomplete. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]*")


class _Verdict(Enum):
    MORE = "more"


MORE: Final = _Verdict.MORE  # the text may become a match with what follows


class _Space(Enum):
    SPACE = "space"


SPACE: Final = _Space.SPACE  # part that matches any white space, also none


@dataclass(frozen=True)
class OneOf:
    """Part that matches one of these names; any name of a call if there are none."""

    names: frozenset[str]

    def match(self, text: str) -> str | Literal[_Verdict.MORE] | None:
        """Return the longest name with which `text` begins; MORE if it may become longer."""
        if not self.names:
            found = _NAME.match(text)
            name = "" if found is None else found[0]
            return MORE if name == text else name
        if any(name.startswith(text) for name in self.names):
            return MORE
        return max((name for name in self.names if text.startswith(name)), key=len, default=None)


Part = str | Literal[_Space.SPACE] | OneOf


@dataclass(frozen=True)
class PartsMatch:
    """Match of all parts: its end in the text, and the name that `OneOf` matched."""

    end: int
    name: str


Found = PartsMatch | Literal[_Verdict.MORE] | None


def match_parts(text: str, parts: Sequence[Part]) -> Found:
    """Match the parts, one after the other, at the beginning of `text`.

    Returns MORE if `text` is a beginning of a match, and None if it cannot become one.
    """
    at, name = 0, ""
    for part in parts:
        if part is SPACE:
            at = len(text) - len(text[at:].lstrip())
        elif isinstance(part, OneOf):
            found = part.match(text[at:])
            if found is None or found is MORE:
                return found
            name = found
            at += len(name)
        elif text.startswith(part, at):
            at += len(part)
        else:
            return MORE if part.startswith(text[at:]) else None
    return PartsMatch(at, name)


@dataclass(frozen=True)
class CallSyntax:
    """Syntax of one call around its arguments, which are a JSON object. The tails are alternatives."""

    before: tuple[Part, ...]
    tails: tuple[tuple[Part, ...], ...]

    @classmethod
    def of_object(cls, names: frozenset[str], arguments: str) -> "CallSyntax":
        """Return the syntax of a call as a JSON object. `names` are the tools', `arguments` is the arguments' key."""
        name: tuple[Part, ...] = ("{", SPACE, '"name"', SPACE, ":", SPACE, '"', OneOf(names), '"')
        call_id: tuple[Part, ...] = (SPACE, ",", SPACE, '"id"', SPACE, ":", SPACE, '"', OneOf(frozenset()), '"')
        before = (*name, SPACE, ",", SPACE, f'"{arguments}"', SPACE, ":", SPACE)
        return cls(before, ((SPACE, "}"), (*call_id, SPACE, "}")))

    def head(self, text: str, opening: str) -> Found:
        """Match `opening` and all of the call before its arguments."""
        found = match_parts(text, (SPACE, opening, SPACE, *self.before))
        if isinstance(found, PartsMatch) and not text.startswith("{", found.end):
            return MORE if found.end == len(text) else None
        return found

    def tail(self, text: str) -> Found:
        """Match all of the call after its arguments."""
        founds = [match_parts(text, parts) for parts in self.tails]
        return next((found for found in founds if isinstance(found, PartsMatch)), MORE if MORE in founds else None)


class ObjectScanner:
    """Incremental search for the end of a JSON object."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """Take the next piece; return how much of it belongs to the object."""
        for position, char in enumerate(text, start=1):
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_complete = True
                    return position
        return len(text)
