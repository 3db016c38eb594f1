"""Commands `moonpool model …`: measurements of a model before it is served."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from moonpool.commands.arguments import Json, command_group
from moonpool.errors import ConfigError
from moonpool.model_files import local_model
from moonpool.options import reported_errors
from moonpool.profiling.measurement import progress_bar
from settings.hub_model import parse_model
from settings.worker import BUNDLED_MODEL, name_of_model

if TYPE_CHECKING:
    from moonpool.sink_check import SinkReport

app = command_group("model", "Check models before they are served.")
TEXT = BUNDLED_MODEL / "LICENSE"
"""A text that is always there."""


@app.callback()
def model() -> None:
    """Keep `check` a command of its own although it is the only one."""


@app.command()
def check(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", parser=parse_model, help="Hugging Face folder or id. [bundled]"),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to measure on, best of the kind to be generated. [a licence]"),
    ] = None,
    window: Annotated[int, typer.Option(min=32, help="Tokens of the window; whole blocks of 16.")] = 256,
    sinks: Annotated[int, typer.Option(min=0, max=8, help="First tokens that stay visible.")] = 4,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the text that are used, at most.")] = 2048,
    device: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
    as_json: Json = False,
) -> None:
    """Measure whether a model is suited to endless generation; exit with 1 if it is not.

    It compares the loss of a text with everything visible to that with a window alone, with one and with several first
    tokens before it. A suited model has attention sinks at its first tokens, or learned ones.

    Example: moonpool model check ./my-llama --window 1024
    """
    with reported_errors():
        path = local_model(model) if model is not None else BUNDLED_MODEL
        report = _measure(path, text or TEXT, (window, sinks, tokens), (device, dtype))
        name = name_of_model(model or BUNDLED_MODEL)
        if as_json:
            found = {"model": name, "is_suited": not report.problem, "problem": report.problem}
            sizes = {"window": report.window, "sinks": report.sinks, "tokens": report.tokens}
            print(json.dumps(found | sizes | {"losses": dict(report.losses)}))
        else:
            console = Console(highlight=False)
            console.print(f"nats per token behind a window of {report.window} tokens, {report.tokens} tokens of text:")
            for kind, loss in report.losses.items():
                label = "everything visible" if kind == "dense" else f"window and {kind} first tokens"
                console.print(f"  {label:<28}{loss:7.3f}")
            verdict = f"unsuited to endless generation: {report.problem}" if report.problem else "suited"
            console.print(f"{name}: {verdict}")
        raise typer.Exit(bool(report.problem))


def _measure(path: Path, text: Path, sizes: tuple[int, int, int], engine: tuple[str, str]) -> "SinkReport":
    """Measure a model; `sizes`: window, sinks, tokens; `engine`: device, dtype. Raises ConfigError."""
    import numpy as np

    from engine import EngineError, load_model
    from frontend.errors import FrontendError
    from frontend.tokenizer import Tokenizer
    from moonpool.role_configs import choose_device
    from moonpool.sink_check import BLOCK_TOKENS, check_sinks

    window, sinks, tokens = sizes
    if window % BLOCK_TOKENS:
        raise ConfigError(f"--window must be a multiple of {BLOCK_TOKENS}, got {window}")
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text} cannot be read as UTF-8 text: {error}") from error
    try:
        loaded = load_model(path, device=choose_device(engine[0], 0), dtype=engine[1])  # type: ignore[arg-type]
        ids = Tokenizer(path).encode(content, add_special_tokens=True)
    except (EngineError, FrontendError) as error:
        raise ConfigError(f"model {path} cannot be measured: {error}") from error
    first = loaded.config.bos_token_id
    ids = [*([] if first is None or ids[:1] == [first] else [first]), *ids][: min(tokens, loaded.config.max_positions)]
    if len(ids) < 2 * window:
        raise ConfigError(
            f"--text {text} gives {len(ids)} tokens, expected at least {2 * window}, twice the window: use a longer "
            "text, or a shorter --window"
        )
    with progress_bar(Console(stderr=True), "losses", "losses", 4) as done:
        return check_sinks(loaded, np.array(ids, np.int32), window, sinks, done)
