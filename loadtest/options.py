"""Command-line options shared by several commands. The docstring of each function names the option's type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from loadtest.model_folder import parse_model_path
from loadtest.secret_file import read_secret


def one_key(context: typer.Context, parameter: typer.CallbackParam, given: str) -> str:
    """Return the API key to send: Typer callback of a client's `--api-key`.

    The environment variable may hold several keys separated by commas, because `serve` accepts every one of them; a
    client sends the first.
    """
    source = context.get_parameter_source(parameter.name or "")
    if source is None or source.name != "ENVIRONMENT":
        return given
    return next((key.strip() for key in given.split(",") if key.strip()), "")


def key_in_file(text: str) -> str:
    """Return the API key in a file: parser of `--api-key-file`."""
    try:
        return read_secret(Path(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


class EarlierFlags(TyperCommand):
    """Command whose help shows the first long flag of each option only: the others are its earlier names."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        every = [(param, param.opts) for param in self.params]
        try:
            for param, opts in every:
                long = [flag for flag in opts if flag.startswith("--")]
                param.opts = [flag for flag in opts if flag not in long[1:]]
            super().format_help(ctx, formatter)
        finally:
            for param, opts in every:
                param.opts = opts


URL_VARIABLE = "MOONPOOL_URL"
DEFAULT_URL = "http://127.0.0.1:8000"


def url(panel: str) -> Any:
    """str"""
    return typer.Option(envvar=URL_VARIABLE, help="URL of the server.", rich_help_panel=panel)


def verify(panel: str) -> Any:
    """bool"""
    return typer.Option("--verify/--no-verify", help="Re-score a sample of the answers.", rich_help_panel=panel)


def verify_sample(panel: str) -> Any:
    """int"""
    return typer.Option(help="Number of answers to re-score.", rich_help_panel=panel)


def verify_tolerance(panel: str) -> Any:
    """float"""
    return typer.Option(help="A token is wrong if its score is further below the maximum.", rich_help_panel=panel)


def verify_device(panel: str) -> Any:
    """str"""
    return typer.Option(help="Device for re-scoring: cpu or cuda.", rich_help_panel=panel)


def model_path(panel: str) -> Any:
    """Path | None"""
    return typer.Option(
        parser=parse_model_path,
        metavar="MODEL",
        help="Folder or Hugging Face id of the served model, for its tokenizer and for --verify; default: the bundled "
        "model.",
        rich_help_panel=panel,
    )


def model(panel: str) -> Any:
    """str"""
    return typer.Option(help="Model name in requests; default: the first model served.", rich_help_panel=panel)


def api_key(panel: str) -> Any:
    """str"""
    return typer.Option(
        envvar="MOONPOOL_API_KEY",
        callback=one_key,
        help="API key, sent as bearer token; of several in the environment variable, the first is sent.",
        rich_help_panel=panel,
    )


def api_key_file(panel: str) -> Any:
    """str | None: the key"""
    return typer.Option(
        parser=key_in_file,
        metavar="FILE",
        help="File with the API key, in place of --api-key: other users can see a command line.",
        rich_help_panel=panel,
    )
