"""Commands whose modules are imported only when they run: plots, HTTP clients and the engine take seconds to import."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand


@dataclass(frozen=True)
class LazyTarget:
    """Location of a command: the typer application `app` of `module`, and the sub-command in it ("": the whole)."""

    module: str
    command: str = ""

    def load(self) -> Any:
        """Import the module and return its click command."""
        found = typer.main.get_command(import_module(self.module).app)
        return found.commands[self.command] if self.command else found  # type: ignore[attr-defined]


_TARGETS: dict[str, LazyTarget] = {}  # by the command's full name, such as "bench profile"


def add_lazy(app: typer.Typer, path: str, target: LazyTarget, help: str = "", panel: str | None = None) -> None:
    """Add the command `path` ("group name", or "name" at the top) to `app`; it is hidden if it has no `help`.

    All its arguments, --help included, go to the target unparsed.
    """
    _TARGETS[path] = target
    group, _, name = path.rpartition(" ")

    class CompletedCommand(TyperCommand):
        """Command that a shell completes as its target."""

        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            if extra.get("resilient_parsing"):
                return target.load().make_context(info_name, args, parent, **extra)
            return super().make_context(info_name, args, parent, **extra)

    @app.command(
        name,
        cls=CompletedCommand,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help=help,
        hidden=not help,
        rich_help_panel=panel,
    )
    def run(context: typer.Context) -> None:
        target.load().main(args=context.args, prog_name=" ".join(filter(None, ("moonpool", group, name))))


def every_command(app: typer.Typer, *, with_hidden: bool = True) -> dict[str, Any]:
    """Return the click command of each full command name of `app`; imports all lazy modules."""
    found: dict[str, Any] = {}

    def walk(command: Any, path: str) -> None:
        if command.hidden and not with_hidden:
            return
        command = _TARGETS[path].load() if path in _TARGETS else command
        if hasattr(command, "commands"):
            for name, inner in command.commands.items():
                walk(inner, f"{path} {name}".strip())
        else:
            found[path] = command

    walk(typer.main.get_command(app), "")
    return found
