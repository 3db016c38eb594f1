"""The command `moonpool download`: a model of the Hugging Face hub, stored on this host before a cluster needs it."""

from pathlib import Path
from typing import Annotated

import typer

from moonpool.model_files import check_model_folder, local_model
from moonpool.options import reported_errors
from settings.hub_model import parse_model


def download(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", parser=parse_model, help="Hugging Face id, ORG/NAME or ORG/NAME@REVISION."),
    ],
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Download the weights; a frontend does not need them.")
    ] = True,
) -> None:
    """Download a model into the Hugging Face cache, check it, and print its folder; `serve` then needs no network.

    Example: moonpool download Qwen/Qwen3-8B
    """
    with reported_errors():
        folder = local_model(model, weights=weights)
        check_model_folder(folder, "transformer" if weights else "paced")
        print(folder)
