"""How vLLM's command line is written: lists after one flag, and underscores for dashes. Pure, and a click command that
reads it so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from loadtest.errors import SettingInvalid

LIST_FLAGS = ("--goodput", "--header", "--metadata")


def normalised(arguments: Sequence[str]) -> list[str]:
    """`--goodput a b` as `--goodput a --goodput b`, `--num_prompts` as `--num-prompts`; all else as it is."""
    found: list[str] = []
    current = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-")
            current = "" if equals or name not in LIST_FLAGS else name
            found += [] if current else [name + equals + value]
        elif current:
            found += [current, argument]
        else:
            found.append(argument)
    return found


class VllmFlags(TyperCommand):
    """A command that takes its flags as vLLM's does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click's, after `normalised`."""
        return super().parse_args(ctx, normalised(args))


def bounds_of(pairs: Sequence[str]) -> dict[str, float]:
    """KEY:MILLISECONDS pairs. Raises SettingInvalid."""
    found: dict[str, float] = {}
    for pair in pairs:
        key, _, value = pair.partition(":")
        try:
            found[key] = float(value)
        except ValueError:
            raise SettingInvalid(f"--goodput is {pair!r}; expected KEY:MILLISECONDS, as in ttft:500") from None
    return found


def header_of(pair: str) -> tuple[str, str]:
    """KEY=VALUE. Raises SettingInvalid."""
    key, equals, value = pair.partition("=")
    if not equals or not key.strip():
        raise SettingInvalid(f"--header is {pair!r}; expected KEY=VALUE")
    return key.strip(), value.strip()


def json_object(text: str, flag: str) -> dict[str, Any]:
    """A JSON object, {} of nothing. Raises SettingInvalid."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingInvalid(f"{flag} is {text!r}, which is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingInvalid(f"{flag} is {text!r}; expected a JSON object")
    return value


def numbers(text: str, flag: str) -> tuple[float, ...]:
    """Comma-separated numbers. Raises SettingInvalid."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise SettingInvalid(f"{flag} is {text!r}; expected numbers separated by commas") from None
