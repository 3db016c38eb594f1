"""The command `moonpool bench profile`: writes a cost profile, a table of fit errors, and a plot."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moonpool.errors import ConfigError
from moonpool.model_files import local_model
from moonpool.options import reported_errors
from moonpool.profiling.fitting import MeasuredPoint, WorkGrid, fit, fit_error, grid_of
from moonpool.profiling.measurement import check_out, progress_bar
from settings.hub_model import parse_model
from settings.keys import assemble
from settings.worker import BUNDLED_MODEL, KvSettings, name_of_model
from worker.errors import ProfileError
from worker.policy.cost_profile import CostProfile, DecodeCost, PrefillCost, Range, TransferCost, save_profile

app = typer.Typer(add_completion=False)


@app.command()
def profile(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", parser=parse_model, help="Hugging Face folder or id. [bundled]"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File of the profile.")] = Path("cost-profile.json"),
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot of the fit: .svg or .png.")] = None,
    name: Annotated[
        str, typer.Option(help="Name under which the cluster serves the model. [the id, or the folder's]")
    ] = "",
    device: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
    engine_backend: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
    kv_int8_group: Annotated[int, typer.Option(min=0, help="As for `serve`.")] = 0,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads of the engine.")] = 1,
    block_tokens: Annotated[int, typer.Option(min=1, max=4096, help="As for `serve`.")] = 16,
    capacity_tokens: Annotated[int, typer.Option(min=1, help="As for `serve`.")] = 32768,
    max_batch: Annotated[int, typer.Option(min=1, max=65536, help="As for `serve`.")] = 64,
    prefill_chunk_tokens: Annotated[int, typer.Option(min=1, help="As for `serve`.")] = 512,
    repeats: Annotated[int, typer.Option(min=3, max=1000, help="Runs of each point; the median is used.")] = 7,
    clock: Annotated[
        str,
        typer.Option(
            help="Clock: wall, or cpu (CPU seconds of this process) for a busy machine, with one thread and no GPU."
        ),
    ] = "wall",
    transfers: Annotated[
        bool, typer.Option("--transfers/--no-transfers", help="Also measure transfers of KV between processes.")
    ] = True,
) -> None:
    """Measure the costs of a model's work on this machine, and fit the conductor's prediction formulas.

    It measures prefills over new and reused tokens, decode steps over batch and context, and transfers by shared memory
    and TCP. Use the settings of `serve` on an idle machine; then `serve --cost-profile FILE`.

    Example: moonpool bench profile --out costs.json --plot costs.svg
    """
    with reported_errors():
        check_out(out)
        if plot is not None:
            from moonpool.profiling.picture import check_picture_path

            check_picture_path(plot)
        path = local_model(model) if model is not None else BUNDLED_MODEL
        kv = assemble(KvSettings, kv_dtype=kv_dtype, kv_int8_group=kv_int8_group)
        settings = {
            "dtype": dtype,
            "threads": threads,
            "block_tokens": block_tokens,
            "capacity_tokens": capacity_tokens,
            "max_batch": max_batch,
            "prefill_chunk_tokens": prefill_chunk_tokens,
        }
        clocks = {"wall": time.perf_counter, "cpu": time.process_time}
        if clock not in clocks:
            raise ConfigError(f"--clock must be {' or '.join(clocks)}, got {clock!r}")
        work = _Work(
            path,
            name or name_of_model(model or BUNDLED_MODEL),
            device,
            engine_backend,
            kv.int8_scale_group,
            settings,
            repeats,
            clock,
            clocks[clock],
        )
        made, prefills, steps = _measure(work, transfers)
        try:
            save_profile(made, out)
        except ProfileError as error:
            raise ConfigError(str(error)) from error
        Console(width=None if sys.stdout.isatty() else 140).print(_table(made))
        Console().print(f"[bold]{out}[/bold]: use it with `moonpool serve --cost-profile {out}`")
        if plot is not None:
            from moonpool.profiling.picture import draw

            draw(made, prefills, steps, plot)
        points = {"prefill": [asdict(point) for point in prefills], "decode": [asdict(point) for point in steps]}
        print(json.dumps({"profile": str(out), "points": points}))


@dataclass(frozen=True)
class _Work:
    path: Path
    name: str
    device: str
    backend: str
    kv_scale_group: int | None
    settings: dict[str, Any]  # to which the figures apply
    repeats: int
    clock_name: str
    clock: Callable[[], float]


def _measure(work: _Work, transfers: bool) -> tuple[CostProfile, list[MeasuredPoint], list[MeasuredPoint]]:
    from engine import EngineError, load_model
    from moonpool.profiling.measuring import EngineRun
    from moonpool.role_configs import choose_device
    from worker.slot_memory import spec_of
    from worker.transformer import hardware_name

    console, settings, repeats = Console(stderr=True), work.settings, work.repeats
    try:
        loaded = load_model(
            work.path,
            device=choose_device(work.device, 0),
            dtype=settings["dtype"],
            threads=settings["threads"],
            backend=work.backend,
            block_tokens=settings["block_tokens"],
            kv_scale_group=work.kv_scale_group,
        )
    except EngineError as error:
        raise ConfigError(f"model {work.path} cannot be loaded: {error}") from error
    if work.clock_name == "cpu" and (loaded.device.type != "cpu" or settings["threads"] != 1):
        raise ConfigError("--clock cpu measures one thread on a CPU: omit it, or use --threads 1 and --device cpu")
    grid = grid_of(loaded.config.max_positions, settings["max_batch"], settings["capacity_tokens"])
    run = EngineRun(
        loaded,
        block_tokens=settings["block_tokens"],
        capacity_tokens=settings["capacity_tokens"],
        chunk_tokens=settings["prefill_chunk_tokens"],
        repeats=repeats,
        clock=work.clock,
    )
    with progress_bar(console, "prefills", "runs", len(grid.prefills) * (repeats + 1)) as done:
        prefills = run.prefills(grid, done)
    with progress_bar(console, "decode steps", "runs", len(grid.steps) * (repeats + 1)) as done:
        steps = run.steps(grid, done)
    moved: dict[str, TransferCost] = {}
    if transfers:
        from moonpool.profiling.measuring import measure_transfers

        moved = measure_transfers(0.5, console)
    spec = spec_of(loaded.kv_groups, settings["block_tokens"])
    windowed = [spec.groups[g] for g in spec.windowed]
    hardware = hardware_name(loaded.device, settings["threads"])
    made = CostProfile(
        name=f"{work.name} on {hardware}",
        kind="measured",
        made=datetime.now(UTC).date().isoformat(),
        model=work.name,
        model_fingerprint=loaded.fingerprint,
        hardware=hardware,
        kv_bytes_per_token=sum(spec.groups[g].token_nbytes for g in spec.lasting),
        window_tokens=max((group.window for group in windowed), default=0),
        window_bytes_per_token=sum(group.token_nbytes for group in windowed),
        engine={**settings, "dtype": loaded.dtype, "max_model_len": loaded.config.max_positions},
        prefill=_prefill_cost(prefills),
        decode=_decode_cost(grid, steps),
        transfers=moved,
        notes=(
            f"Medians of {repeats} runs of each of {len(prefills)} prefills and {len(steps)} decode steps, in "
            + ("seconds." if work.clock_name == "wall" else "CPU seconds on a busy machine."),
        ),
    )
    return made, prefills, steps


def _prefill_cost(points: list[MeasuredPoint]) -> PrefillCost:
    features = [(1.0, float(new), new * (reused + new / 2)) for new, reused in (point.x for point in points)]
    seconds = [point.median_s for point in points]
    fixed, per_token, per_pair = found = fit(features, seconds)
    news, prompts = [point.x[0] for point in points], [sum(point.x) for point in points]
    ranges = Range(min(news), max(news)), Range(min(prompts), max(prompts))
    return PrefillCost(fixed, per_token, per_pair, *ranges, error=fit_error(features, seconds, found))


def _decode_cost(grid: WorkGrid, points: list[MeasuredPoint]) -> DecodeCost:
    features = [(1.0, float(batch), float(context)) for batch, context in (point.x for point in points)]
    seconds = [point.median_s for point in points]
    fixed, per_sequence, per_token = found = fit(features, seconds)
    batches, contexts = [point.x[0] for point in points], [point.x[1] for point in points]
    ranges = Range(min(batches), max(batches)), Range(min(contexts), max(contexts))
    return DecodeCost(fixed, per_sequence, per_token, *ranges, error=fit_error(features, seconds, found))


def _table(made: CostProfile) -> Table:
    table = Table(title=f"{made.model} on {made.hardware}", title_justify="left")
    for column in ("work", "formula", "measured up to", "points", "median error", "p90", "worst"):
        table.add_column(column, justify="left" if column in ("work", "formula", "measured up to") else "right")
    p, d = made.prefill, made.decode
    rows: list[tuple[str, str, str, Any]] = [
        (
            "prefill",
            f"{1e3 * p.fixed_s:.3g} ms + {1e6 * p.per_token_s:.3g} µs/token + {1e9 * p.per_pair_s:.3g} ns/pair",
            f"{p.new_tokens.most:,.0f} new, {p.prompt_tokens.most:,.0f} in all",
            p.error,
        ),
        (
            "decode step",
            f"{1e3 * d.fixed_s:.3g} ms + {1e6 * d.per_sequence_s:.3g} µs/sequence + {1e9 * d.per_token_s:.3g} ns/token",
            f"{d.batch.most:,.0f} sequences, {d.context_tokens.most:,.0f} tokens",
            d.error,
        ),
    ]
    for path, cost in made.transfers.items():
        formula = f"{1e6 * cost.fixed_s:.3g} µs + {1e9 * cost.per_byte_s:.3g} ns/byte"
        rows.append((path, formula, f"{cost.nbytes.most:,.0f} bytes", cost.error))
    for work, formula, most, error in rows:
        shares = (error.median, error.p90, error.worst)
        table.add_row(work, formula, most, str(error.points), *(f"{100 * share:.1f} %" for share in shares))
    return table
