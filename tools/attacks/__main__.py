"""Carry out attacks on a running cluster that `moonpool serve` started with the keys file of `write_keys_file`.

    python -m tools.attacks READY_FILE SECONDS ATTACK [ATTACK ...]

Attacks are named as in `tools.attacks.catalogue` and repeated until SECONDS are over or SIGTERM comes; the last is then
cut off. "attacking" on standard error announces the begin. The last line of output is a JSON object: what the attacker
saw, by outcome.
"""

import asyncio
import contextlib
import json
import signal
import sys
from collections import Counter
from pathlib import Path

from tools.attacks.catalogue import ATTACKS
from tools.attacks.target import AttackedCluster

PAUSE_S = 0.5  # after each attack: a flood by volume is not what is tried


async def repeat(names: list[str], target: AttackedCluster, seconds: float) -> Counter[str]:
    """Carry out the attacks again and again for `seconds`; return what the attacker saw in complete runs."""
    found: Counter[str] = Counter()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(seconds):
            print("attacking", file=sys.stderr, flush=True)
            while True:
                for name in names:
                    found += await ATTACKS[name].run(target)
                    await asyncio.sleep(PAUSE_S)
    return found


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(f"{__doc__}\nAttacks: {', '.join(ATTACKS)}")
    ready_file, seconds, *names = sys.argv[1:]
    if unknown := set(names) - ATTACKS.keys():
        sys.exit(f"unknown attacks {sorted(unknown)}; expected some of: {', '.join(ATTACKS)}")
    target = AttackedCluster(json.loads(Path(ready_file).read_text())["url"], Path(ready_file))
    print(json.dumps(asyncio.run(repeat(names, target, float(seconds)))))


if __name__ == "__main__":
    main()
