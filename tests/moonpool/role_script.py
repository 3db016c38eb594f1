"""A stand-in for a role: a real process that behaves as its first argument says. Started by the supervisor's tests.

serve           ready, then waits for SIGTERM and ends with 0
refuse          says why, and ends with 2
crash           ends with 1 before it is ready
deaf            ready, and ignores SIGTERM
parent          as `deaf`, with a child process of its own whose pid it announces
silent          never ready
chatty          ready, then one very long line and a warning in the log format
drained         as `serve`; at SIGUSR1 it says that it was drained, and ends with 0
once MARKER     crashes if the file MARKER does not exist, and makes it; else as `serve`
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from moonpool.supervision.parent_death import die_with_supervisor


def ready(**more: object) -> None:
    print("MOONPOOL_READY " + json.dumps({"target": "unix:/test", "pid": os.getpid(), **more}), flush=True)


def wait_for_ever() -> None:
    while True:
        time.sleep(60)


def main(mode: str, *arguments: str) -> int:
    die_with_supervisor()
    if mode in ("deaf", "parent"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if mode == "refuse":
        print("the frobnicator is missing", file=sys.stderr, flush=True)
        return 2
    if mode == "crash":
        print("about to crash", file=sys.stderr, flush=True)
        return 1
    if mode == "once" and not Path(arguments[0]).exists():
        Path(arguments[0]).touch()
        return 1
    if mode == "drained":
        signal.signal(signal.SIGUSR1, lambda *_: (print("MOONPOOL_DRAINED", flush=True), sys.exit(0)))
    if mode == "silent":
        print("thinking", flush=True)
    elif mode == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        ready(child=child.pid)
    else:
        ready(environment={key: value for key, value in os.environ.items() if key.startswith(("MOONPOOL_", "OMP_"))})
    if mode == "chatty":
        print("x" * (3 << 20), flush=True)
        print("12:00:00.000 WARNING chatty-0 test: careful", file=sys.stderr, flush=True)
        print("12:00:00.000 INFO    chatty-0 test: all is well", file=sys.stderr, flush=True)
    wait_for_ever()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
