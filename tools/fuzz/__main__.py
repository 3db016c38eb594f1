"""Command line of the fuzzer: all targets, or those named, for a number of seconds or cases.

The exit status is 1 if a defect was found; its case and a description are in OUT/TARGET.
"""

import argparse
import logging
import secrets
import sys
from pathlib import Path

from tools.fuzz.campaign import campaign
from tools.fuzz.fuzzer import defect_of
from tools.fuzz.process import load
from tools.fuzz.report import write_report
from tools.fuzz.target import LoggedErrors
from tools.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description="Fuzz what the cluster parses.")
    parser.add_argument("--seconds", type=float, help="time for all targets together (60 without --cases)")
    parser.add_argument("--cases", type=int, help="cases per target")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, help="random seed of the cases; drawn, and reported, if not given")
    parser.add_argument("--processes", type=int, default=2, help="targets at a time (%(default)d)")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"), help="folder of the report and of defects' cases")
    parser.add_argument("--replay", type=Path, help="run this one case of --target here and show its outcome")
    asked = parser.parse_args()
    names = asked.target or list(TARGETS)
    if asked.replay is not None:
        if len(names) != 1:
            parser.error("--replay needs exactly one --target")
        return replay(names[0], asked.replay)
    seed = secrets.randbits(32) if asked.seed is None else asked.seed
    seconds = asked.seconds if asked.seconds is not None else float("inf") if asked.cases else 60.0
    found = campaign(
        names, seed=seed, cases=asked.cases or 1 << 62, seconds=seconds, processes=asked.processes, out=asked.out
    )
    write_report(found, seed=seed, out=asked.out)
    return int(any(findings.defects for findings in found.values()))


def replay(name: str, path: Path) -> int:
    """Run one stored case in this process; a defect is raised with its traceback."""
    target, logged = load(TARGETS[name]), LoggedErrors()
    logging.getLogger().addHandler(logged)
    target.open()
    case = path.read_bytes()
    error: BaseException | None = None
    try:
        target.run(case)
        print("accepted")
    except target.allowed as refusal:
        print(f"refused: {type(refusal).__name__}: {refusal}")
    except Exception as caught:
        error = caught
    error = error or logged.take()
    if error is not None:
        print(defect_of(error, case).detail)
    target.close()
    return int(error is not None)


if __name__ == "__main__":
    sys.exit(main())
