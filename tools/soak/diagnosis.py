"""Diagnosis of an operation, written to stderr while the operation stalls."""

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from messenger import Messenger
from tools.soak.fleet import Member

__all__ = ["diagnose"]


def diagnose(what: str, member: Member, messenger: Messenger) -> None:
    """Write the stacks of both processes and the state of their connections in the kernel and the proxy."""
    _say(f"{what}; recent faults: {member.lately()}")
    _say(f"caller: {messenger.validate() or 'nothing pending'}, {messenger.counters()}")
    for thread in threading.enumerate():
        _say(f"thread 0x{thread.ident or 0:016x} is {thread.name}")
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    _say(f"proxy: {member.line()}")
    pid = member.pid()
    if pid is not None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may be replaced meanwhile
            _say(f"{member.node_id} is process {pid}, in state {_state(pid)}")
            os.kill(pid, signal.SIGUSR1)  # makes it print its stacks (tools.soak.peer)
    if shutil.which("ss") is not None:
        shown = subprocess.run(["ss", "-tinmopH"], capture_output=True, text=True, timeout=10, check=False).stdout
        ports = [f":{port} " for port in member.ports()]
        connections = shown.replace("\n\t", " ").splitlines()
        _say("\n".join(one for one in connections if any(port in one for port in ports)) or "no tcp connections")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _state(pid: int) -> str:
    """Return the process state as in proc(5), for example T for stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
