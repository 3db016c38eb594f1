"""Which API key a client sends: the flag's as it is, or the first of the list that MOONPOOL_API_KEY holds."""

from __future__ import annotations

import typer


def one_key(context: typer.Context, parameter: typer.CallbackParam, given: str) -> str:
    """Callback of a client's `--api-key`.

    The variable is `serve`'s too, which accepts every key of it, separated by commas; a client needs one of them.
    """
    source = context.get_parameter_source(parameter.name or "")
    if source is None or source.name != "ENVIRONMENT":
        return given
    return next((key.strip() for key in given.split(",") if key.strip()), "")
