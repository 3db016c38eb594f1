"""Typer commands generated from configuration composites, with one flag for each setting."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from moonpool.config import Setting, all_settings, composite_settings, load
from moonpool.errors import ConfigError, MoonpoolError
from moonpool.supervision.child import INTERNAL_VARIABLES
from settings.keys import InvalidSetting, flag_of, parse_size

C = TypeVar("C")

_METAVARS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH", tuple: "TEXT"}


def configured_command(
    app: typer.Typer,
    name: str,
    composite: type[C],
    run: Callable[[C], int],
    *,
    help: str,
    argument: str | None = None,
    hidden: bool = False,
    kind: "type[ListsTakeSeveral] | None" = None,
    further: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Add the command `name` to `app`, which loads `composite` from file, environment and flags, and calls `run`.

    `argument` is the key of the positional argument, `kind` the class of the command, and `further` has the
    annotations of options that act by their callbacks. The exit status is `run`'s result or the error's `exit_code`.
    """
    settings = composite_settings(composite)

    def command(**given: Any) -> None:
        config_file = given.pop("config")
        for each in further:
            given.pop(each)
        with reported_errors():
            config = load(
                composite,
                flags={key: value or None if isinstance(value, list) else value for key, value in given.items()},
                environ=os.environ,
                config_file=config_file,
                known=all_settings(),
                reserved_variables=INTERNAL_VARIABLES,
            )
            raise typer.Exit(run(config))

    annotations = {key: _annotation(declared, argument) for key, declared in settings.items()}
    annotations["config"] = Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="YAML file of `key: value` lines", rich_help_panel="Configuration"
        ),
    ]
    for declared in settings.values():
        annotations |= {former: _former_option(declared, former) for former in declared.key.former_names}
    annotations |= further
    order = sorted(annotations, key=lambda key: key != argument)
    command.__annotations__ = annotations
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotations[key])
            for key in order
        ]
    )
    app.command(name, help=help, cls=kind or ListsTakeSeveral, hidden=hidden)(command)


class ListsTakeSeveral(TyperCommand):
    """Command whose list flags accept several words: `--served-model-name a b` is `--served-model-name a
    --served-model-name b`.

    This applies after the positional argument; before it, the second word is taken as that argument.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {flag: param for param in self.params if isinstance(param, TyperOption) for flag in param.opts}
        wants_argument = any(isinstance(param, TyperArgument) for param in self.params)
        spread: list[str] = []
        several = ""  # list flag to which the next words belong
        words = iter(args)
        for word in words:
            if word == "--":
                spread += [word, *words]
            elif word.startswith("-"):
                option = options.get(word)
                if option is None:
                    self.unknown_flag(word)
                takes_value = option is not None and not option.is_flag
                value = next(words, None) if takes_value else None
                spread += [word] if value is None else [word, value]
                several = word if takes_value and option is not None and option.multiple else ""
            elif several and not wants_argument:
                spread += [several, word]
            else:
                spread.append(word)
                wants_argument, several = False, ""
        return super().parse_args(ctx, spread)

    def unknown_flag(self, flag: str) -> None:
        """Raise an error that is better than the parser's, which follows; `flag` may have a value after `=`."""


class reported_errors:
    """Context that prints a MoonpoolError to stderr and ends the command with its exit code."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, MoonpoolError | InvalidSetting):
            print(f"Error: {error}", file=sys.stderr, flush=True)
            raise typer.Exit(getattr(error, "exit_code", ConfigError.exit_code)) from error


def size_of(flag: str, text: str) -> int:
    """Return the bytes of a size given to a flag. Raises ConfigError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {error}") from error


def _annotation(declared: Setting, argument: str | None) -> Any:
    """The parameter of a setting: the command's argument or an option."""
    if declared.name == argument:
        return Annotated[
            str | None,
            typer.Argument(metavar=declared.name.upper(), help=_help(declared), show_default=False),
        ]
    return _option(declared, declared.flag, *declared.key.aliases)


def _former_option(declared: Setting, former: str) -> Any:
    """The hidden option of an earlier name. It has a value of its own, so that a command given both is rejected."""
    return _option(declared, flag_of(former), hidden=True)


def _option(declared: Setting, flag: str, *aliases: str, hidden: bool = False) -> Any:
    names = [flag, *aliases]
    kind: Any = list[str] if declared.kind is tuple else str
    metavar: str | None = "|".join(declared.choices) or _METAVARS.get(declared.kind)
    if declared.key.none_word:
        metavar = f"{metavar}|{declared.key.none_word}"
    if declared.kind is bool:
        kind, metavar, names[0] = bool, None, f"{flag}/--no-{flag[2:]}"
    option = typer.Option(
        *names,
        metavar=metavar,
        help=_help(declared),
        rich_help_panel=declared.panel,
        show_default=False,
        hidden=hidden,
    )
    return Annotated[kind | None, option]


def _help(declared: Setting) -> str:
    return f"{declared.key.help} [dim]\\[{declared.default_text}][/dim]"
