"""Commands `moonpool bench …`: load tests of a server, transfer speed between two hosts, costs of a model's work."""

from loadtest.bench.cli import VllmFlags, serve
from moonpool.commands.arguments import command_group
from moonpool.commands.lazy import LazyTarget, add_lazy
from moonpool.transfer_bench.command import ListenByDefault, messenger

app = command_group("bench", "Load tests and measurements.")
app.command("serve", cls=VllmFlags)(serve)
app.command("messenger", cls=ListenByDefault)(messenger)
add_lazy(
    app,
    "bench dialogues",
    LazyTarget("loadtest.dialogue_cli"),
    "Hold multi-turn chats with a running server and report how much of each prompt was reused.\n\n"
    "[bold]moonpool bench dialogues --dialogues 8 --turns 50 --think-time 0.5 --verify --out out/dialogues[/bold]",
)
add_lazy(
    app,
    "bench agents",
    LazyTarget("loadtest.agent_cli"),
    "Run coding agents in a closed loop against a running server and report how long their jobs took.\n\n"
    "[bold]moonpool bench agents --agents 8 --turns 6 --hints all --out out/agents[/bold]",
)
add_lazy(
    app,
    "bench profile",
    LazyTarget("moonpool.profiling.command"),
    "Measure the cost of a model's prefills, decode steps and transfers on this machine, for the conductor's "
    "predictions.\n\n[bold]moonpool bench profile --out costs.json --plot costs.svg[/bold]",
)
