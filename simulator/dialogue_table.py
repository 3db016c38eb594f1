"""Simulations of dialogues for people: a column for each run. Pure."""

from collections.abc import Callable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from simulator.dialogue_run import DialogueRun

__all__ = ["dialogue_table"]

_ROWS: tuple[tuple[str, Callable[[DialogueRun], str]], ...] = (
    ("prompt tokens reused", lambda run: f"{run.reused:.2%}"),
    ("at most", lambda run: f"{run.reused_limit:.2%}"),
    ("turns at another server than before", lambda run: f"{run.moved_turns / run.turns:.1%}"),
    ("mean wait in the queue", lambda run: f"{run.mean_wait_s:.2f} s"),
    ("busiest server over the mean", lambda run: f"{run.busy_balance:.2f}"),
    ("blocks evicted", lambda run: f"{run.evicted_blocks:,}"),
)


def dialogue_table(runs: Sequence[DialogueRun]) -> Group:
    """All runs are of the same dialogues."""
    one = runs[0]
    title = Text(
        f"{one.dialogues:,} dialogues, {one.turns:,} turns, {one.mean_history_messages:.0f} messages before a turn\n"
        f"{len(one.turns_per_server)} servers hold {one.blocks_held / one.blocks_made:.0%} of what the dialogues make",
        style="bold",
    )
    table = Table()
    table.add_column("")
    for run in runs:
        table.add_column(run.routing + ("" if run.tails else ", no tails"), justify="right", no_wrap=True)
    for heading, text in _ROWS:
        table.add_row(heading, *(text(run) for run in runs))
    return Group(title, table)
