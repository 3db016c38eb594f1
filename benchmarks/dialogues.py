"""Reuse between turns of 2,000 long simulated dialogues, with and without stickiness.

    python benchmarks/dialogues.py [--policy NAME] [--dialogues N]

Uses virtual time, the pool's eviction policies and the default settings of `moonpool simulate dialogues`, whose servers
hold a fifth of the dialogues' KV. On average, a turn's question is preceded by 180 messages (questions and answers) in
its dialogue. Figures are reused tokens over prompt tokens. The last line of output is JSON.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from simulator.dialogue_run import dialogue_table, simulate_dialogues  # noqa: E402
from simulator.dialogues import DialogueSettings, Routing  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=DialogueSettings().policy, help="eviction policy of the pools")
    parser.add_argument("--dialogues", type=int, default=DialogueSettings().dialogues, help="number of dialogues")
    settings = DialogueSettings(**vars(parser.parse_args()))
    sticky = simulate_dialogues(settings)
    no_tails = simulate_dialogues(replace(settings, tails=False))
    random = simulate_dialogues(replace(settings, routing=Routing.RANDOM))
    Console().print(dialogue_table([sticky, no_tails, random]))
    figures = {
        "reused_sticky": sticky.reused,
        "reused_random": random.reused,
        "reused_sticky_no_tails": no_tails.reused,
        "reused_limit": sticky.reused_limit,
        "evicted_blocks": sticky.evicted_blocks,
        "dialogues": sticky.dialogues,
        "turns": sticky.turns,
        "mean_history_messages": sticky.mean_history_messages,
        "memory_share": sticky.blocks_held / sticky.blocks_made,
        "runs": [asdict(run) for run in (sticky, no_tails, random)],
    }
    print(json.dumps(figures, allow_nan=False))


if __name__ == "__main__":
    main()
