"""The `moonpool` command: what it offers, with examples. Each command's work is done elsewhere."""

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from moonpool.chat.command import chat
from moonpool.config import ServeConfig
from moonpool.demo import demo
from moonpool.inspection import config_keys, validate
from moonpool.lazy_command import add_lazy
from moonpool.options import configured_command
from moonpool.roles import ROLES, Role, run_role
from moonpool.scale_commands import drain, scale, switch
from moonpool.serve import serve
from moonpool.status_command import status

_HELP = """
Disaggregated prefill/decode LLM serving built around the KV cache.

[bold]Try it[/bold] (no GPU and no download needed: a small model is bundled)

  [cyan]moonpool serve[/cyan]   a whole cluster on this machine, OpenAI API on port 8000

  [cyan]moonpool chat[/cyan]    talk with it, from another terminal

  [cyan]moonpool demo[/cyan]    a cluster under a replayed production trace, every token verified
"""

_SERVE_HELP = """
Start a whole cluster on this machine: conductor, KV pool, workers, OpenAI API. Ctrl-C ends it.

[bold]Examples[/bold]

  [cyan]moonpool serve[/cyan]  (the bundled model, 1 prefill and 1 decode worker)

  [cyan]moonpool serve ./my-llama --prefill-nodes 2 --decode-nodes 2 --port 8080[/cyan]

  [cyan]moonpool serve --aggregated 2[/cyan]  (both phases in each worker: the baseline)

  [cyan]moonpool serve ./large --add-model small=./small,aggregated=1[/cyan]  (two models, one front door)

  [cyan]moonpool serve --pool-nodes 2[/cyan]  (as if on two hosts: KV goes over TCP)

  [cyan]moonpool serve --config cluster.yaml --ttft-slo 2[/cyan]  (a flag wins over the file)

Each flag is also a key of the file and a variable: --port 80, port: 80, MOONPOOL_PORT=80.
"""

_LAZY = (
    (
        "replay",
        "loadtest.cli",
        "Replay a real trace against a running server and report what it saw; can verify every token.\n\n"
        "[bold]moonpool replay conversation --sample-families 0.1 --speed 15 --verify --out out/replay[/bold]",
    ),
    (
        "dialogues",
        "loadtest.dialogue_cli",
        "Lead many-turn chats with a running server and report what of each prompt was reused.\n\n"
        "[bold]moonpool dialogues --dialogues 8 --turns 50 --think-time 0.5 --verify --out out/dialogues[/bold]",
    ),
    (
        "bench",
        "moonpool.bench_command",
        "Load-test any OpenAI-compatible server with vLLM's flags, or find the rate that it can bear; measure how fast "
        "KV goes between two hosts.\n\n[bold]moonpool bench serve --num-prompts 100 --request-rate 4[/bold]\n\n"
        "[bold]moonpool bench messenger[/bold]",
    ),
    (
        "doctor",
        "moonpool.doctor.command",
        "Tell what this machine offers for serving, and what to do about what is missing.\n\n"
        "[bold]moonpool doctor --for gpu[/bold]",
    ),
    (
        "top",
        "moonpool.top.command",
        "Watch a running cluster in a terminal: throughput, load, objectives, rejections, KV tiers, nodes.\n\n"
        "[bold]moonpool top[/bold]",
    ),
    (
        "pool",
        "moonpool.pool_command",
        "Look into the KV pool of a running cluster: what it holds and finds, single blocks; verify it, empty it.\n\n"
        "[bold]moonpool pool status[/bold]",
    ),
    (
        "slo",
        "moonpool.slo_command",
        "The objectives of a running cluster, by class, tenant and model: show, change, go back, see who did what.\n\n"
        "[bold]moonpool slo show[/bold]",
    ),
    (
        "keys",
        "moonpool.keys_command",
        "API keys for the front door: draw one, and the entry by which it is known.\n\n"
        "[bold]moonpool keys new --name acme-2027 --tenant acme --file keys.yaml[/bold]",
    ),
    (
        "explain",
        "moonpool.explain_command",
        "Tell why a request went where it went, or was rejected: predictions, losers, what became of it.\n\n"
        "[bold]moonpool explain cmpl-4a1c[/bold]",
    ),
    (
        "replay-decisions",
        "moonpool.replay_decisions_command",
        "Replay a conductor's events: are the same decisions made? Or how many others, under other settings.\n\n"
        "[bold]moonpool replay-decisions out/decisions --set ttft_objective_s=1[/bold]",
    ),
    (
        "profile",
        "moonpool.profiling.command",
        "Measure what a model's prefills, decode steps and transfers cost here, for predictions to begin with."
        "\n\n[bold]moonpool profile --out costs.json --plot costs.svg[/bold]",
    ),
    (
        "simulate",
        "moonpool.simulate_command",
        "Run the cluster's own policies on a trace without a cluster: what would a pool of N blocks find?\n\n"
        "[bold]moonpool simulate cache conversation --capacity 1k,10k,30k --policy all[/bold]",
    ),
)

app = typer.Typer(
    name="moonpool",
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _runner(role: Role) -> Callable[[Any], int]:
    def run(config: Any) -> int:
        exit_code = run_role(role, config)
        # The role has closed what it opened. The interpreter's own end, with torch and numba loaded, takes a second
        # of CPU for each process, which one Ctrl-C would have to wait for.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    return run


configured_command(app, "serve", ServeConfig, serve, help=_SERVE_HELP, argument="model")
for _name, _module, _help in _LAZY:
    add_lazy(app, _name, _module, _help)
app.command("demo")(demo)
app.command("chat")(chat)
app.command("status")(status)
app.command("validate")(validate)
app.command("scale")(scale)
app.command("drain")(drain)
app.command("switch")(switch)
app.command("config")(config_keys)
for _role in ROLES:
    configured_command(app, _role.command, _role.composite, _runner(_role), help=_role.help)


def main() -> None:
    """Entry point of the `moonpool` script."""
    app()
