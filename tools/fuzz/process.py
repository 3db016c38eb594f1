"""One target in a process of its own: a case may hang, end the process, or take all memory.

Before each case, the child writes its number, its time and the case to a shared file; the parent watches the number,
kills a child whose case takes too long, and keeps the case as a defect. A child that died is replaced by another with a
further seed. The child reports counters and defects as JSON lines.
"""

import argparse
import base64
import faulthandler
import importlib
import json
import mmap
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.fuzz.fuzzer import Defect, Findings, Fuzzer
from tools.fuzz.target import ROOT, FuzzTarget

_CURRENT = struct.Struct("<q?q")  # number of the case, whether it is running, its size; then the case
_CURRENT_NBYTES = 16 << 20
_REPORT_S = 1.0
_LOOK_S = 0.2
_ADDRESS_SPACE_NBYTES = 48 << 30
_START_S = 300.0
_MAX_RESTARTS = 20


def load(place: str) -> FuzzTarget:
    """Return the target that `place`, "module:Class", names."""
    module, _, name = place.partition(":")
    target: FuzzTarget = getattr(importlib.import_module(module), name)()
    return target


class TargetProcess:
    """Runs of one target, restarted after hangs and deaths. Call `run`, from any thread, once."""

    def __init__(self, place: str, folder: Path, seed: int) -> None:
        """`place` as of `load`; `folder` receives the defects' cases and the case that is running."""
        self.findings = Findings()
        self._place, self._folder, self._seed = place, folder, seed
        self._deadline_s = load(place).deadline_s
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, *, cases: int, seconds: float) -> Findings:
        """Run cases in child processes until the number or the time is used up."""
        begun_s = time.monotonic()
        for life in range(_MAX_RESTARTS):
            left_s = seconds - (time.monotonic() - begun_s)
            if self.findings.cases >= cases or left_s <= 0:
                break
            self._one_life(f"{self._seed}.{life}", cases - self.findings.cases, left_s)
        return self.findings

    def _one_life(self, seed: str, cases: int, seconds: float) -> None:
        shared = self._folder / "current"
        shared.write_bytes(b"")
        os.truncate(shared, _CURRENT_NBYTES)
        words = [self._place, str(self._folder), seed, str(cases), repr(seconds)]
        with (self._folder / "log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "tools.fuzz.process", *words],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"},
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )
        earlier = Findings(**{**vars(self.findings), "defects": dict(self.findings.defects)})
        killed = ""
        assert child.stdout is not None
        rest, watched, waited_s, looked_s = b"", 0, 0.0, time.monotonic()
        with (
            child.stdout,
            shared.open("rb") as file,
            mmap.mmap(file.fileno(), _CURRENT_NBYTES, prot=mmap.PROT_READ) as current,
        ):
            while True:
                if select.select([child.stdout], [], [], _LOOK_S)[0]:
                    piece = os.read(child.stdout.fileno(), 1 << 16)
                    if not piece:
                        break
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line), earlier)
                number, is_running, _ = _CURRENT.unpack_from(current)
                now_s = time.monotonic()
                # Both may have been stopped for a while: at most a few looks of it count.
                waited_s = waited_s + min(now_s - looked_s, 5 * _LOOK_S) if number == watched else 0.0
                watched, looked_s = number, now_s
                if not killed and waited_s > (self._deadline_s if is_running else _START_S):
                    killed = "hang"
                    os.killpg(child.pid, signal.SIGKILL)
            number, _, nbytes = _CURRENT.unpack_from(current)
            case = current[_CURRENT.size : _CURRENT.size + nbytes]
        status = child.wait()
        if status != 0:
            self.findings.cases = max(self.findings.cases, earlier.cases + number)
            log_text = (self._folder / "log").read_text(errors="replace")[-4000:]
            detail = f"took longer than {self._deadline_s:g} s" if killed else f"the process ended with status {status}"
            kind = killed or "death"
            self._keep(Defect(kind, f"{kind} {_frame(log_text)}", f"{detail}\n{log_text}", case))

    def _take(self, report: dict[str, Any], earlier: Findings) -> None:
        if "where" in report:
            self._keep(Defect(**{**report, "case": base64.b64decode(report["case"])}))
            return
        found = self.findings
        for name in ("cases", "refused", "repeats", "seconds"):
            setattr(found, name, getattr(earlier, name) + report[name])
        found.lines, found.corpus = max(found.lines, report["lines"]), max(found.corpus, report["corpus"])
        found.num_lines = report["num_lines"]

    def _keep(self, defect: Defect) -> None:
        """Store a new defect: the case and its description, with the command that replays it."""
        if defect.where in self.findings.defects:
            self.findings.repeats += 1
            return
        self.findings.defects[defect.where] = defect
        stem = self._folder / f"defect-{len(self.findings.defects):03}"
        stem.with_suffix(".case").write_bytes(defect.case)
        command = f"python -m tools.fuzz --replay {stem.with_suffix('.case')} --target {self._folder.name}"
        stem.with_suffix(".txt").write_text(f"{command}\n\n{defect.where}\n\n{defect.detail}\n", errors="replace")


def _frame(log: str) -> str:
    """Return the innermost line of the project in a traceback that faulthandler wrote; "" if there is none."""
    for line in log.splitlines():
        if f'File "{ROOT}/' in line and "/tools/fuzz/" not in line and "/.venv/" not in line:
            name, _, rest = line.partition(f'File "{ROOT}/')[2].partition('", line ')
            return f"at {name}:{rest.split()[0]}"
    return ""


def main() -> None:
    """Run one target's cases: the child's side."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.process")
    for name, kind in (("place", str), ("folder", Path), ("seed", str), ("cases", int), ("seconds", float)):
        parser.add_argument(name, type=kind)
    asked = parser.parse_args()
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_NBYTES, resource.RLIM_INFINITY))
    reports, sys.stdout = os.fdopen(os.dup(1), "w", buffering=1), sys.stderr
    target = load(asked.place)
    target.open()
    fuzzer = Fuzzer(target, asked.seed)
    last_s = armed_s = 0.0

    def report() -> None:
        counted = {name: value for name, value in asdict(fuzzer.findings).items() if name != "defects"}
        print(json.dumps(counted), file=reports)

    def found(defect: Defect) -> None:
        print(json.dumps({**vars(defect), "case": base64.b64encode(defect.case).decode()}), file=reports)

    with (
        (asked.folder / "current").open("r+b") as file,
        mmap.mmap(file.fileno(), _CURRENT_NBYTES) as current,
    ):

        def before(number: int, case: bytes) -> None:
            nonlocal last_s, armed_s
            _CURRENT.pack_into(current, 0, number, False, 0)
            now_s = time.monotonic()
            if now_s - last_s > _REPORT_S:
                last_s = now_s
                report()
            if now_s - armed_s > 0.2 * target.deadline_s:  # not for each case: it starts a thread
                armed_s = now_s
                faulthandler.dump_traceback_later(0.8 * target.deadline_s, exit=False)
            shown = case[: _CURRENT_NBYTES - _CURRENT.size]
            current[_CURRENT.size : _CURRENT.size + len(shown)] = shown
            _CURRENT.pack_into(current, 0, number + 1, True, len(shown))

        fuzzer.run(cases=asked.cases, seconds=asked.seconds, before=before, on_defect=found)
        faulthandler.cancel_dump_traceback_later()
        _CURRENT.pack_into(current, 0, fuzzer.findings.cases, False, 0)
    report()
    target.close()
    reports.flush()
    os._exit(0)  # threads of servers under test may still be waiting for their peers


if __name__ == "__main__":
    main()
