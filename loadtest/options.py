"""Command-line options that several commands share, and the API key that clients send."""

from __future__ import annotations

from typing import Any

import typer


def one_key(context: typer.Context, parameter: typer.CallbackParam, given: str) -> str:
    """Callback of a client's `--api-key`.

    The variable is `serve`'s too, which accepts every key of it, separated by commas; a client needs one of them.
    """
    source = context.get_parameter_source(parameter.name or "")
    if source is None or source.name != "ENVIRONMENT":
        return given
    return next((key.strip() for key in given.split(",") if key.strip()), "")


def verify(panel: str) -> Any:
    """bool"""
    return typer.Option("--verify/--no-verify", help="Re-score a sample of the answers.", rich_help_panel=panel)


def verify_sample(panel: str) -> Any:
    """int"""
    return typer.Option(help="How many answers to re-score.", rich_help_panel=panel)


def verify_tolerance(panel: str) -> Any:
    """float"""
    return typer.Option(help="A token is wrong if its score lies further below the largest.", rich_help_panel=panel)


def verify_device(panel: str) -> Any:
    """str"""
    return typer.Option(help="Where to re-score: cpu, cuda.", rich_help_panel=panel)


def model_path(panel: str) -> Any:
    """Path | None"""
    return typer.Option(
        help="Folder of the served model, for its tokenizer and for --verify. Default: the bundled model.",
        rich_help_panel=panel,
    )


def model(panel: str) -> Any:
    """str"""
    return typer.Option(help="Name of the model in requests. Default: the first served.", rich_help_panel=panel)


def api_key(panel: str) -> Any:
    """str"""
    return typer.Option(
        envvar="MOONPOOL_API_KEY",
        callback=one_key,
        help="Bearer key; of several in the variable, the first is sent.",
        rich_help_panel=panel,
    )
