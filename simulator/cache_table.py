"""Cache simulations for people. Pure."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from simulator.cache import BELADY, CacheRun

__all__ = ["cache_table"]


def cache_table(runs: Sequence[CacheRun], source: str) -> Group:
    """Of one capacity a row for each policy with all figures, of several a row for each. The best policies are bold."""
    capacities = list(dict.fromkeys(run.capacity for run in runs))
    best = {
        capacity: max((run.hit_rate for run in runs if run.capacity == capacity and run.policy != BELADY), default=0.0)
        for capacity in capacities
    }
    leaf_first = list(dict.fromkeys(run.policy for run in runs if run.leaf_first and run.policy != BELADY))
    held = f" of {capacities[0]:,} blocks" if len(capacities) == 1 else ""
    title = f"{source}: hit rate of one pool{held}" + (f"; leaf first: {', '.join(leaf_first)}" if leaf_first else "")
    table = _of_one_capacity(runs, best) if len(capacities) == 1 else _of_several(runs, capacities, best)
    return Group(Text(title, style="bold"), table)


def _of_one_capacity(runs: Sequence[CacheRun], best: dict[int, float]) -> Table:
    table = Table("policy")
    for heading in ("hit rate", "1st half", "2nd half", "evictions", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        halves = (f"{run.hit_rate_first_half:.4f}", f"{run.hit_rate_second_half:.4f}")
        table.add_row(_name(run.policy), _rate(run, best), *halves, f"{run.evictions:,}", f"{run.seconds:.1f} s")
    return table


def _of_several(runs: Sequence[CacheRun], capacities: Sequence[int], best: dict[int, float]) -> Table:
    table = Table()
    table.add_column("blocks", justify="right", no_wrap=True)
    for policy in dict.fromkeys(run.policy for run in runs):
        table.add_column(_name(policy), justify="right")
    for capacity in capacities:
        table.add_row(f"{capacity:,}", *(_rate(run, best) for run in runs if run.capacity == capacity))
    return table


def _name(policy: str) -> str:
    return "belady, limit" if policy == BELADY else policy


def _rate(run: CacheRun, best: dict[int, float]) -> str:
    text = f"{run.hit_rate:.4f}"
    return f"[bold]{text}[/bold]" if run.policy != BELADY and run.hit_rate == best[run.capacity] else text
