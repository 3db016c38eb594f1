"""Commands `moonpool model …`: measurements of a model before it is served."""

import json
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

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
    from engine import ModelConfig
    from engine.rolling import RollingWindow
    from moonpool.sink_check import SinkReport

app = command_group("model", "Check models before they are served.")
TEXT = BUNDLED_MODEL / "LICENSE"
"""A text that is always there."""
BLOCK_TOKENS: Final = 16
WINDOW: Final = 256
TOKENS: Final = 2048
LABELS: Final = {"dense": "everything visible", "0": "window alone", "1": "window and first token"}


@app.callback()
def model() -> None:
    """Keep `check` a command of its own although it is the only one."""


@app.command()
def check(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL", parser=parse_model, help="Hugging Face folder or id; by default the bundled model."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text to measure on, best of the kind to be generated; by default a licence."
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=2 * BLOCK_TOKENS,
            help=f"Tokens of the window, a multiple of {BLOCK_TOKENS}; by default {WINDOW}, or what the model's own "
            "windows require.",
        ),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=BLOCK_TOKENS // 2,
            help="First tokens that stay visible; by default 4, and 0 for models with learned sinks, or with windows "
            "in all layers.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=4 * BLOCK_TOKENS,
            help=f"Tokens of the text that are used, at most; by default {TOKENS}, or twice the window.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
    engine_backend: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
    as_json: Json = False,
) -> None:
    """Measure whether a model is suited to endless generation; exit with 0 if it is, 1 if it is not.

    It compares the loss of a text with everything visible to those with a window alone, with one and with several
    first tokens before it. A suited model predicts nearly as well as with everything visible, because it has attention
    sinks at its first tokens or learned ones, or needs none.

    Example: moonpool model check ./my-llama --window 1024
    """
    with reported_errors():
        path = local_model(model) if model is not None else BUNDLED_MODEL
        report = _measure(path, text, (window, sinks, tokens), (device, dtype, engine_backend))
        name = name_of_model(model or BUNDLED_MODEL)
        rolling = report.rolling
        if as_json:
            found = {"model": name, "is_suited": not report.problem, "problem": report.problem}
            sizes = {"window": rolling.window, "sinks": rolling.sinks, "tokens": report.tokens}
            print(json.dumps(found | sizes | {"losses": dict(report.losses)}, allow_nan=False))
        else:
            print(f"nats per token behind a window of {rolling.window} tokens, {report.tokens} tokens of text:")
            for kind, loss in report.losses.items():
                print(f"  {LABELS.get(kind) or f'window and first {kind} tokens':<28}{loss:7.3f}")
            print(f"{name}: {f'unsuited to endless generation: {report.problem}' if report.problem else 'suited'}")
        raise typer.Exit(bool(report.problem))


def _measure(
    path: Path, text: Path | None, sizes: tuple[int | None, int | None, int | None], engine: tuple[str, str, str]
) -> "SinkReport":
    """Measure a model; `sizes`: window, sinks, tokens; `engine`: device, dtype, backend. Raises ConfigError."""
    import numpy as np

    from engine import EngineError, check_folder, load_model
    from frontend.errors import FrontendError
    from frontend.tokenizer import Tokenizer
    from moonpool.role_configs import choose_device
    from moonpool.sink_check import check_sinks, measured_windows

    try:
        config = check_folder(path)
        rolling = _rolling_window(config, sizes[0], sizes[1])
        needed = 2 * rolling.window
        most = max(TOKENS, needed) if sizes[2] is None else sizes[2]
        if most < needed:
            raise ConfigError(f"--tokens must be at least {needed}, twice the window, got {most}")
        ids = Tokenizer(path).encode(_read(text or TEXT), add_special_tokens=True)[: min(most, config.max_positions)]
        if len(ids) < needed:
            given = f"--text {text}" if text else "the default text"
            raise ConfigError(
                f"{given} has {len(ids)} tokens, expected at least {needed}, "
                "twice the window: give a longer --text, or a shorter --window"
            )
        device, dtype, backend = engine
        loaded = load_model(path, device=choose_device(device, 0), dtype=dtype, backend=backend)  # type: ignore[arg-type]
        total = len(measured_windows(rolling))
        with progress_bar(Console(stderr=True), "endless generation", "losses", total) as done:
            report = check_sinks(loaded, np.array(ids, np.int32), rolling, done)
    except (EngineError, FrontendError) as error:
        raise ConfigError(f"model {path} cannot be measured: {error}") from error
    if not all(map(isfinite, report.losses.values())):
        raise ConfigError(
            f"model {path} cannot be measured: its losses are not finite: its weights are damaged, or exceed the range "
            "of --dtype"
        )
    return report


def _rolling_window(config: "ModelConfig", window: int | None, sinks: int | None) -> "RollingWindow":
    """Return the window to measure, which slides as those of requests do. Raises ConfigError if it does not suit."""
    from engine import InvalidBatch
    from engine.rolling import RollingWindow, check_rolling, default_sinks, least_window
    from frontend.endless import slide_of

    if window is None:
        window = max(WINDOW, -(-least_window(config, BLOCK_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS)
    if window % BLOCK_TOKENS:
        raise ConfigError(f"--window must be a multiple of {BLOCK_TOKENS}, got {window}")
    if 2 * window > config.max_positions:
        raise ConfigError(
            f"--window must be at most {config.max_positions // 2}, half of the model's positions, got {window}: the "
            "loss with everything visible is measured on twice the window"
        )
    chosen = default_sinks(config) if sinks is None else sinks
    rolling = RollingWindow(chosen, window, slide_of(window, BLOCK_TOKENS), BLOCK_TOKENS)
    try:
        check_rolling(config, rolling)
    except InvalidBatch as error:
        raise ConfigError(f"--{error}") from error
    return rolling


def _read(text: Path) -> str:
    """Return the contents of a text file. Raises ConfigError."""
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text} cannot be read as UTF-8 text: {error}") from error
