"""Arguments that several commands share, and the console they print tables to."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from moonpool.cluster_view.locate import Located, locate
from moonpool.errors import ConfigError

WIDE = 200
_KEY_VARIABLE = "MOONPOOL_API_KEY"

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_PANEL = "Cluster"


@dataclass(frozen=True)
class ClusterArguments:
    """Arguments that name a cluster; without any, the environment or this machine's cluster is used."""

    url: str = ""
    conductor: tuple[str, ...] = ()
    ready_file: Path | None = None
    api_key_file: Path | None = None

    @property
    def is_given(self) -> bool:
        """True if one of them is given."""
        return self != ClusterArguments()

    def api_key(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the API key to send, "" if there is none. Raises ConfigError."""
        if self.api_key_file is not None:
            from loadtest.secret_file import read_secret

            try:
                return read_secret(self.api_key_file)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        return next((key.strip() for key in environ.get(_KEY_VARIABLE, "").split(",") if key.strip()), "")

    def locate(self) -> Located:
        """Return the cluster; calls through its API server send the API key. Raises ClusterNotFound, ConfigError."""
        located = locate(conductor=self.conductor, url=self.url, ready_file=self.ready_file)
        if located.gateway:
            from rpc import gateway

            gateway.authorize(self.api_key())
        return located


_OPTIONS: Mapping[str, Any] = {
    "url": Annotated[
        str,
        typer.Option(
            "--url",
            help="URL of an API server of the cluster. Default: the variable MOONPOOL_URL, otherwise this user's "
            "`moonpool serve` at port 8000, otherwise the newest one.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ],
    "conductor": Annotated[
        list[str] | None,
        typer.Option(
            "--conductor",
            metavar="ADDRESS",
            help="gRPC address of a conductor, for direct access inside the cluster. Repeatable. Default: the variable "
            "MOONPOOL_CONDUCTOR.",
            rich_help_panel=_PANEL,
        ),
    ],
    "ready_file": Annotated[
        Path | None,
        typer.Option("--ready-file", help="File written by `serve --ready-file`.", rich_help_panel=_PANEL),
    ],
    "api_key_file": Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            help="File with an admin's API key, for --url. Default: the variable MOONPOOL_API_KEY.",
            rich_help_panel=_PANEL,
        ),
    ],
}


def on_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name a cluster, in place of its parameter of type ClusterArguments."""
    hints = get_type_hints(command, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        parameter.replace(annotation=hints[parameter.name], kind=kind)
        for parameter in inspect.signature(command).parameters.values()
        if hints[parameter.name] is not ClusterArguments
    ]
    parameters += [
        inspect.Parameter(name, kind, default="" if name == "url" else None, annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    place = next(name for name, hint in hints.items() if hint is ClusterArguments)

    @wraps(command)
    def run(**given: Any) -> None:
        own = {name: given.pop(name) for name in _OPTIONS}
        command(**given, **{place: ClusterArguments(**own | {"conductor": tuple(own["conductor"] or ())})})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # Typer would read its parameters
    return run


def command_group(name: str, help: str) -> typer.Typer:
    """Return an empty group of commands; without a command it prints its help."""
    return typer.Typer(
        name=name,
        help=help,
        no_args_is_help=True,
        rich_markup_mode="rich",
        add_completion=False,
        pretty_exceptions_enable=False,
    )


def wide_console() -> Console:
    """Return a console of at least 200 columns: addresses must not be folded or truncated."""
    return Console(width=max(Console().width, WIDE))
