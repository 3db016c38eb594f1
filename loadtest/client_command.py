"""The command `moonpool-client`: the load tests of `moonpool`, installed without the server."""

from __future__ import annotations

import typer

from loadtest.agent_cli import agents
from loadtest.bench.cli import VllmFlags, serve
from loadtest.cli import replay
from loadtest.dialogue_cli import dialogues
from loadtest.trace_cli import check, convert, stats

app = typer.Typer(
    name="moonpool-client",
    help="Load-test servers that implement OpenAI's API. --model-path: the folder of the served model's tokenizer.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)
trace = typer.Typer(help="Replay, convert and check request traces.", no_args_is_help=True)
for _name, _command in (("replay", replay), ("convert", convert), ("check", check), ("stats", stats)):
    trace.command(_name)(_command)
bench = typer.Typer(help="Load-test any OpenAI-compatible server.", no_args_is_help=True)
bench.command("serve", cls=VllmFlags)(serve)
bench.command("dialogues")(dialogues)
bench.command("agents")(agents)
app.add_typer(trace, name="trace")
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the `moonpool-client` script."""
    app()
