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
    any_family: Annotated[
        bool,
        typer.Option(
            "--any-family", help="Leave it to another engine, such as vLLM, whether it knows the model's family."
        ),
    ] = False,
) -> None:
    """Download a model into the Hugging Face cache, check it, and print its folder; `serve` then needs no network.

    Example: moonpool download Qwen/Qwen3-8B
    """
    with reported_errors():
        folder = local_model(model, weights=weights, any_family=any_family)
        check_model_folder(folder, "vllm" if any_family else "transformer" if weights else "paced")
        print(folder)
