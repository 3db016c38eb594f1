"""The `moonpool` command line: its commands, their groups, and their help. The work is done in `commands/`."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from moonpool.chat.command import chat
from moonpool.commands.arguments import command_group
from moonpool.commands.demo import demo
from moonpool.commands.download import download
from moonpool.commands.lazy import LazyTarget, add_lazy
from moonpool.commands.nodes import drain, scale, switch
from moonpool.commands.serve import config_keys, serve
from moonpool.commands.serve_flags import ServeCommand, show_all
from moonpool.commands.status import status, validate
from moonpool.config import ServeConfig
from moonpool.options import configured_command
from moonpool.python_path import leave_working_directory
from moonpool.role_process.roles import ROLES, run_and_exit

_HELP = """
Disaggregated prefill/decode LLM serving built around the KV cache.

[bold]Try it[/bold] (no GPU and no download needed: a small model is bundled)

  [cyan]moonpool serve[/cyan]   a whole cluster on this machine, OpenAI API on port 8000

  [cyan]moonpool chat[/cyan]    talk with it, from another terminal

  [cyan]moonpool demo[/cyan]    a cluster under a replayed production trace, its answers verified
"""

_SERVE_HELP = """
Start a whole cluster on this machine: conductor, KV pool, workers, OpenAI API. Ctrl-C ends it.

[bold]Examples[/bold]

  [cyan]moonpool serve[/cyan]  (the bundled model, 1 prefill and 1 decode worker)

  [cyan]moonpool serve ./my-llama --prefill-nodes 2 --decode-nodes 2 --port 8080[/cyan]

  [cyan]moonpool serve --aggregated 2[/cyan]  (both phases in each worker: the baseline)

  [cyan]moonpool serve ./large --add-model small=./small,aggregated=1[/cyan]  (two models behind one API server)

  [cyan]moonpool serve --pool-nodes 2[/cyan]  (as on two hosts: KV goes over TCP)

  [cyan]moonpool serve --config cluster.yaml --ttft-slo 2[/cyan]  (a flag overrides the file)

Each flag is also a key of the file and an environment variable: --port 80, port: 80, MOONPOOL_PORT=80.

These are the usual options; [cyan]moonpool serve --help-all[/cyan] shows all of them.
"""

_INSPECT, _GROUPS = "Inspect", "Groups of commands"


def _print_version(wanted: bool) -> None:
    if wanted:
        from rpc.versions import package_version

        print(f"moonpool {package_version()}")
        raise typer.Exit


app = typer.Typer(
    name="moonpool",
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
node = command_group("node", "Run one role of a cluster in the foreground; change the number and roles of workers.")
trace = command_group("trace", "Replay, convert and check request traces.")

_LAZY_GROUPS = (
    (
        "pool",
        "Inspect, verify and flush the KV pool of a running cluster.\n\n[bold]moonpool pool status[/bold]",
    ),
    (
        "slo",
        "Show, change and roll back the latency objectives of a running cluster, by class, tenant and model.\n\n"
        "[bold]moonpool slo show[/bold]",
    ),
    (
        "bench",
        "Load-test any OpenAI-compatible server with vLLM's flags, or find its capacity; measure transfers between two "
        "hosts and the costs of a model's work.\n\n[bold]moonpool bench serve --num-prompts 100 --request-rate 4[/bold]"
        "\n\n[bold]moonpool bench messenger[/bold]",
    ),
    (
        "simulate",
        "Run the cluster's own policies on a trace, to find, for instance, the hit rate of a pool of N blocks.\n\n"
        "[bold]moonpool simulate cache conversation --capacity 1k,10k,30k --policy all[/bold]",
    ),
    (
        "decisions",
        "Explain why a request was placed or rejected; verify an answer's receipt; replay a conductor's events.\n\n"
        "[bold]moonpool decisions explain cmpl-4a1c[/bold]\n\n"
        "[bold]moonpool decisions verify answer.json[/bold]\n\n"
        "[bold]moonpool decisions replay out/decisions --set ttft_objective_s=1[/bold]",
    ),
    (
        "model",
        "Check models before they are served.\n\n[bold]moonpool model check ./my-llama --window 1024[/bold]",
    ),
    (
        "droidspeak",
        "Let a model reuse the KV of another one that was tuned from the same base.\n\n"
        "[bold]moonpool droidspeak profile ./base ./tuned questions.jsonl --out reuse.json[/bold]",
    ),
    (
        "keys",
        "Create API keys for the API server, and the entries by which it recognises them.\n\n"
        "[bold]moonpool keys new --name acme-2027 --tenant acme --file keys.yaml[/bold]",
    ),
)

# Names that commands had before the groups, hidden but kept for scripts: the group's command that each one runs.
_EARLIER_NAMES = {
    "replay": LazyTarget("loadtest.cli"),
    "dialogues": LazyTarget("loadtest.dialogue_cli"),
    "profile": LazyTarget("moonpool.profiling.command"),
    "explain": LazyTarget("moonpool.commands.decisions", "explain"),
    "replay-decisions": LazyTarget("moonpool.commands.decisions", "replay"),
}


@app.callback()
def moonpool(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Read the options that precede the command."""


configured_command(
    app,
    "serve",
    ServeConfig,
    serve,
    help=_SERVE_HELP,
    argument="model",
    kind=ServeCommand,
    further={
        "help_all": Annotated[
            bool, typer.Option("--help-all", callback=show_all, is_eager=True, help="Show all options, and exit.")
        ]
    },
)
app.command("chat")(chat)
app.command("demo")(demo)
app.command("config")(config_keys)
app.command("download")(download)
app.command("status", rich_help_panel=_INSPECT)(status)
add_lazy(
    app,
    "top",
    LazyTarget("moonpool.commands.top"),
    "Watch a running cluster in a terminal: throughput, load, objectives, rejections, KV tiers, nodes.\n\n"
    "[bold]moonpool top[/bold]",
    _INSPECT,
)
app.command("validate", rich_help_panel=_INSPECT)(validate)
add_lazy(
    app,
    "doctor",
    LazyTarget("moonpool.doctor.command"),
    "Check what this machine provides for serving, and advise on what is missing; or check a running cluster.\n\n"
    "[bold]moonpool doctor --for gpu[/bold]",
    _INSPECT,
)

app.add_typer(node, name="node", rich_help_panel=_GROUPS)
app.add_typer(trace, name="trace", rich_help_panel=_GROUPS)
for _name, _help in _LAZY_GROUPS:
    add_lazy(app, _name, LazyTarget(f"moonpool.commands.{_name}"), _help, _GROUPS)
for _role in ROLES:
    _short = _role.command.removesuffix("-node")
    if not _role.is_internal:
        configured_command(node, _short, _role.composite, partial(run_and_exit, _role), help=_role.help)
    configured_command(app, _role.command, _role.composite, partial(run_and_exit, _role), help=_role.help, hidden=True)
_WORKERS: dict[str, Callable[..., None]] = {"scale": scale, "drain": drain, "switch": switch}
for _name, _command in _WORKERS.items():
    node.command(_name)(_command)
    app.command(_name, hidden=True)(_command)
add_lazy(
    trace,
    "trace replay",
    LazyTarget("loadtest.cli"),
    "Replay a production trace against a running server and report latencies; can verify the answers.\n\n"
    "[bold]moonpool trace replay conversation --sample-families 0.1 --speed 15 --verify --out out/replay[/bold]",
)
add_lazy(
    trace,
    "trace convert",
    LazyTarget("loadtest.trace_cli", "convert"),
    "Convert a trace of Azure, BurstGPT, Bailian, ShareGPT, AIPerf or Weka to the replay's format.\n\n"
    "[bold]moonpool trace convert AzureLLMInferenceTrace_conv.csv azure.jsonl.zst[/bold]",
)
add_lazy(
    trace,
    "trace check",
    LazyTarget("loadtest.trace_cli", "check"),
    "Report all problems of a trace, with their lines.\n\n[bold]moonpool trace check trace.jsonl[/bold]",
)
add_lazy(
    trace,
    "trace stats",
    LazyTarget("loadtest.trace_cli", "stats"),
    "Print a trace's lengths, rates, reuse and turns per session.\n\n[bold]moonpool trace stats conversation[/bold]",
)
for _name, _target in _EARLIER_NAMES.items():
    add_lazy(app, _name, _target)


def main() -> None:
    """Entry point of the `moonpool` script."""
    leave_working_directory()
    app()
