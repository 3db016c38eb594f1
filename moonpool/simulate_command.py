"""The command `moonpool simulate`: the cluster's own policies on a trace, in seconds and without a cluster."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvpool.policy.eviction import POLICIES
from moonpool.overload_command import run_overload
from moonpool.simulation_console import bad_input, progress_bar
from moonpool.tune_command import run_tune
from simulator.cache import BELADY, CacheRun, ChainedTrace, chained, simulate_cache
from simulator.cache_report import cache_table
from simulator.dialogue_run import DialogueRun, dialogue_table, simulate_dialogues
from simulator.dialogues import DialogueSettings, Routing
from simulator.errors import BadSetting
from traces import CONVERSATION, load_trace

__all__ = ["app"]

_ALL = "all"
_NAMES = (*POLICIES, BELADY)
_STANDARD = DialogueSettings()

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The cluster's own policies under virtual time: no cluster needed, an hour of trace in seconds.",
)


@app.callback()
def simulate() -> None:
    """A group: each command simulates one thing."""


app.command("overload")(run_overload)
app.command("tune")(run_tune)


@app.command("cache", no_args_is_help=True)
def cache(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help=f"A Mooncake trace: JSONL, plain or .xz .zst .gz; '{CONVERSATION}' is the bundled one.",
        ),
    ],
    capacity: Annotated[
        str,
        typer.Option(
            metavar="N[,N...]", help="Blocks the pool holds, e.g. 10000 or 1k,10k,30k; inf: all that the trace has."
        ),
    ],
    policy: Annotated[
        str, typer.Option(metavar="NAME[,NAME...]", help=f"What leaves a full pool: {', '.join(_NAMES)}; or {_ALL}.")
    ] = "lru",
    tree: Annotated[
        bool | None,
        typer.Option(
            "--tree/--no-tree",
            help="Whether a block may leave before those that follow it (--no-tree), as the literature's policies "
            "assume, or not, as in the live pool. Default: --tree for moonpool alone.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: a name in .svg or .png.")] = None,
) -> None:
    """Hit rate of one pool over a trace, by eviction policy and capacity; the last line is JSON.

    Hits are counted at look-up: the leading blocks of a prompt that are there. Then all its blocks are stored in order.

    Example: moonpool simulate cache conversation --capacity 1k,10k,30k --policy all --plot hits.svg
    """
    with bad_input():
        policies = _policies(policy)
        sizes = [_capacity(word) for word in capacity.split(",")]
        if plot is not None:
            from simulator.cache_report import check_plot_path, plot_runs

            check_plot_path(plot)
        loaded = chained(load_trace(trace))
        runs = _cache_runs(loaded, policies, [size or loaded.num_blocks for size in sizes], tree)
        Console().print(cache_table(runs, loaded.source))
        if plot is not None:
            plot_runs(runs, loaded.source, plot)
    _print_last_line([{"trace": loaded.source, **asdict(run)} for run in runs])


@app.command("dialogues")
def dialogues(
    routing: Annotated[
        str,
        typer.Option(metavar="NAME[,NAME...]", help=f"How a turn's server is chosen: {', '.join(Routing)}; or all."),
    ] = _STANDARD.routing.value,
    dialogues: Annotated[int, typer.Option(help="How many.")] = _STANDARD.dialogues,
    mean_history: Annotated[
        float, typer.Option(help="Messages before a turn's question in its dialogue, mean over all turns.")
    ] = _STANDARD.mean_history_messages,
    servers: Annotated[int, typer.Option(help="Servers, each with a pool and a queue.")] = _STANDARD.servers,
    capacity: Annotated[int, typer.Option(help="Blocks that each server's pool holds.")] = _STANDARD.capacity,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = _STANDARD.block_tokens,
    policy: Annotated[str, typer.Option(help=f"What leaves a full pool: {', '.join(POLICIES)}.")] = _STANDARD.policy,
    tails: Annotated[
        bool, typer.Option("--tails/--no-tails", help="Keep a partial last block, too.")
    ] = _STANDARD.tails,
    balance: Annotated[
        float, typer.Option(help="Seconds by which a sticky turn's queue may be longer than the shortest.")
    ] = _STANDARD.balance_s,
    seed: Annotated[int, typer.Option(help="Of dialogues and of random routing.")] = _STANDARD.seed,
) -> None:
    """How much of their prompts do dialogues find again, turn after turn, by routing; the last line is JSON.

    Servers do not give KV to each other here: what another server has is computed again.

    Example: moonpool simulate dialogues --routing sticky,random
    """
    with bad_input():
        settings = [
            DialogueSettings(
                routing=one,
                dialogues=dialogues,
                mean_history_messages=mean_history,
                servers=servers,
                capacity=capacity,
                block_tokens=block_tokens,
                policy=policy,
                tails=tails,
                balance_s=balance,
                seed=seed,
            )
            for one in _routings(routing)
        ]
        runs: list[DialogueRun] = []
        for one in settings:
            with progress_bar("turns") as advance:
                runs.append(simulate_dialogues(one, advance))
    Console().print(dialogue_table(runs))
    _print_last_line([asdict(run) for run in runs])


def _cache_runs(
    trace: ChainedTrace, policies: Sequence[str], capacities: Sequence[int], tree: bool | None
) -> list[CacheRun]:
    wanted = [(capacity, policy) for capacity in dict.fromkeys(capacities) for policy in policies]
    runs: list[CacheRun] = []
    with progress_bar("requests") as advance:
        for capacity, policy in wanted:
            told = partial(_advanced, advance, len(runs) * len(trace.chains), len(wanted) * len(trace.chains))
            runs.append(simulate_cache(trace, policy, capacity, leaf_first=tree, progress=told))
    return runs


def _advanced(advance: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    advance(before + done, total)


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in (*_NAMES, _ALL)]:
        raise BadSetting(f"there is no policy {unknown[0]!r}; choose from {', '.join(_NAMES)}, or {_ALL}")
    return list(dict.fromkeys(one for name in names for one in (_NAMES if name == _ALL else (name,))))


def _routings(text: str) -> list[Routing]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in (*Routing, _ALL)]:
        raise BadSetting(f"there is no routing {unknown[0]!r}; choose from {', '.join(Routing)}, or {_ALL}")
    return list(dict.fromkeys(Routing(one) for name in names for one in (Routing if name == _ALL else (name,))))


def _capacity(word: str) -> int | None:
    """Blocks; None for `inf`."""
    word = word.strip()
    if word == "inf":
        return None
    digits, factor = (word[:-1], 1000) if word.endswith("k") else (word, 1)
    if not digits.isascii() or not digits.isdecimal() or not int(digits):
        raise BadSetting(f"a capacity of {word!r} blocks; give whole numbers from 1, like 10000 or 10k, or inf")
    return int(digits) * factor


def _print_last_line(runs: list[dict[str, Any]]) -> None:
    print(json.dumps(runs if len(runs) > 1 else runs[0], allow_nan=False), flush=True)
