"""Context of a client run: the running cluster, the client's folder, and its environment."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients.environments import Environment, offline
from benchmarks.clients.errors import ToolFailed

RUN_S = 900.0
_SHOWN_CHARS = 3000


@dataclass(frozen=True)
class Context:
    """Context of a client. `work`: folder of the client's files; `model`: folder of the model served as `name`."""

    url: str
    name: str
    model: Path
    work: Path
    home: Path
    """Hugging Face cache folder with the tokenizer; nothing is downloaded."""


def run_tool(context: Context, environment: Environment, *arguments: str) -> Path:
    """Run the tool in `context.work` and return the path of its log. Raises ToolFailed, ToolMissing."""
    context.work.mkdir(parents=True, exist_ok=True)
    log = context.work / f"{environment.tool}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [environment.command(), *arguments],
            cwd=context.work,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=offline(context.home),
            start_new_session=True,  # so that the tool's worker processes can be killed with it
        )
        try:
            status = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            raise ToolFailed(f"{environment.tool} did not end within {RUN_S:g} s; see {log}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status:
        end = log.read_text(errors="replace")[-_SHOWN_CHARS:]
        raise ToolFailed(f"{environment.tool} ended with exit code {status}; the end of {log}:\n{end}")
    return log
