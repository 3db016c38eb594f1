"""Cache simulations for people. Pure."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from simulator.cache import BELADY, CacheRun

__all__ = ["cache_table"]


def cache_table(runs: Sequence[CacheRun], source: str) -> Group:
    """A row for each policy; of several capacities the hit rates, of one all figures. The best policies are bold."""
    capacities = list(dict.fromkeys(run.capacity for run in runs))
    held = f"{capacities[0]:,} blocks" if len(capacities) == 1 else "so many blocks"
    title = Text(f"{source}: hit rate of one pool of {held}", style="bold")
    table = Table()
    table.add_column("policy", no_wrap=True)
    best = {
        capacity: max((run.hit_rate for run in runs if run.capacity == capacity and run.policy != BELADY), default=0.0)
        for capacity in capacities
    }
    if len(capacities) == 1:
        for heading in ("hit rate", "1st half", "2nd half", "evictions", "time"):
            table.add_column(heading, justify="right", no_wrap=True)
        for run in runs:
            halves = (f"{run.hit_rate_first_half:.4f}", f"{run.hit_rate_second_half:.4f}")
            table.add_row(_name(run), _rate(run, best), *halves, f"{run.evictions:,}", f"{run.seconds:.1f} s")
        return Group(title, table)
    for capacity in capacities:
        table.add_column(f"{capacity:,}", justify="right", no_wrap=True)
    for policy in dict.fromkeys(run.policy for run in runs):
        of_policy = [run for run in runs if run.policy == policy]
        table.add_row(_name(of_policy[0]), *(_rate(run, best) for run in of_policy))
    return Group(title, table)


def _name(run: CacheRun) -> str:
    return (
        "belady, the limit" if run.policy == BELADY else f"{run.policy}, leaf first" if run.leaf_first else run.policy
    )


def _rate(run: CacheRun, best: dict[int, float]) -> str:
    text = f"{run.hit_rate:.4f}"
    return f"[bold]{text}[/bold]" if run.policy != BELADY and run.hit_rate == best[run.capacity] else text
