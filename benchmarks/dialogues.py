"""Inter-turn reuse: 2,000 long dialogues on servers whose memory holds a fifth of what they make, sticky or not.

    python benchmarks/dialogues.py [--policy NAME] [--dialogues N]

Virtual time, the pool's own eviction policies; the settings are the standard ones of `moonpool simulate dialogues`. The
mean history of a turn is 180 messages: questions and answers that come before its question in its dialogue, mean over
all turns. Figures are reused over prompt tokens. One JSON line at the end.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

# Scripts here may be named like packages: the repository's root comes first instead of this folder.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from simulator.dialogue_run import dialogue_table, simulate_dialogues  # noqa: E402
from simulator.dialogues import DialogueSettings, Routing  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=DialogueSettings().policy, help="what leaves a full pool")
    parser.add_argument("--dialogues", type=int, default=DialogueSettings().dialogues, help="fewer for a quick look")
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
