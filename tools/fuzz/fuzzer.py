"""Fuzzing of one target in this process: corpus, cases and verdicts. Hangs and deaths are `process`'s business."""

import logging
import random
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from tools.fuzz.coverage import LineCoverage
from tools.fuzz.target import ROOT, FuzzTarget, LoggedErrors, Misjudged

_ALWAYS_TRACED = 300
_TRACED_ONE_IN = 8
_MAX_CORPUS = 4000
_FRESH_ONE_IN = 4  # cases derived from a seed instead of a corpus entry


@dataclass(frozen=True)
class Defect:
    """A case with a forbidden outcome. `where` identifies the defect: further cases with the same one are only counted.

    `kind` is the exception's type, or hang, death or memory.
    """

    kind: str
    where: str
    detail: str
    case: bytes = field(repr=False)


@dataclass
class Findings:
    """Counters and defects of one target's run."""

    cases: int = 0
    refused: int = 0
    seconds: float = 0.0
    lines: int = 0
    num_lines: int = 0
    corpus: int = 0
    repeats: int = 0
    defects: dict[str, Defect] = field(default_factory=dict)


class Fuzzer:
    """Fuzzer of one target, which must be open. The seed determines the cases, if the target is deterministic."""

    def __init__(self, target: FuzzTarget, seed: str) -> None:
        self.target = target
        self.findings = Findings()
        self._rng = random.Random(f"{seed}:{target.name}")
        self._coverage = LineCoverage(target.covers)
        self.findings.num_lines = self._coverage.num_lines()
        self._log = LoggedErrors()
        self._seeds = list(target.seeds())
        self._corpus = list(self._seeds)

    def run(
        self,
        *,
        cases: int = 1 << 62,
        seconds: float = float("inf"),
        before: Callable[[int, bytes], None] = lambda number, case: None,
        on_defect: Callable[[Defect], None] = lambda defect: None,
        stop_at_first: bool = False,
    ) -> Findings:
        """Run up to `cases` cases for up to `seconds`; the seeds come first, and must not be refused.

        `before(number, case)` is called before each case, `on_defect` for each new defect.
        """
        root, findings = logging.getLogger(), self.findings
        handlers, level = root.handlers[:], root.level
        root.handlers[:], begun_s = [self._log], time.monotonic()
        root.setLevel(logging.WARNING)
        try:
            for number in range(cases):
                if time.monotonic() - begun_s >= seconds:
                    break
                case = self._seeds[number] if number < len(self._seeds) else self._next()
                before(number, case)
                defect = self._try(case, is_seed=number < len(self._seeds))
                findings.seconds = time.monotonic() - begun_s
                if defect is not None and defect.where not in findings.defects:
                    findings.defects[defect.where] = defect
                    on_defect(defect)
                    if stop_at_first:
                        break
                elif defect is not None:
                    findings.repeats += 1
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
        return findings

    def _next(self) -> bytes:
        rng = self._rng
        pool = self._seeds if rng.randrange(_FRESH_ONE_IN) == 0 else self._corpus
        return self.target.mutate(rng, rng.choice(pool), rng.choice(self._corpus))

    def _try(self, case: bytes, *, is_seed: bool) -> Defect | None:
        findings, coverage = self.findings, self._coverage
        traced = findings.cases < _ALWAYS_TRACED or findings.cases % _TRACED_ONE_IN == 0
        seen, peak = coverage.num_seen, _peak_nbytes()
        findings.cases += 1
        error: BaseException | None = None
        if traced:
            coverage.start()
        try:
            self.target.run(case)
        except self.target.allowed as refusal:
            findings.refused += 1
            error = Misjudged(f"a valid case was refused: {refusal!r}") if is_seed else None
        except Exception as caught:
            error = caught
        except BaseException as caught:  # such as a panic of a library in Rust
            if isinstance(caught, KeyboardInterrupt | SystemExit):
                raise
            error = caught
        finally:
            if traced:
                coverage.stop()
        logged = self._log.take()
        if error is None and not isinstance(logged, self.target.allowed):
            error = logged
        findings.lines = coverage.num_seen
        if coverage.num_seen > seen and not is_seed and len(self._corpus) < _MAX_CORPUS:
            self._corpus.append(case)
        findings.corpus = len(self._corpus)
        if error is not None:
            self._log.take()
            return defect_of(error, case)
        growth = _peak_nbytes() - peak
        if growth > self.target.max_growth_nbytes:
            detail = f"the process's peak memory grew by {growth >> 20} MiB in one case"
            return Defect("memory", "memory", detail, case)
        return None


def _peak_nbytes() -> int:
    """Return this process's peak memory. That of getrusage() may be the peak of the process that started this one."""
    try:
        with open("/proc/self/status", "rb") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(b"VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def defect_of(error: BaseException, case: bytes) -> Defect:
    """Return the defect that an exception shows, identified by its type and the project's innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(str(ROOT)) and "/.venv/" not in frame.filename]
    parsers = [frame for frame in ours if "/tools/fuzz/" not in frame.filename] or ours
    place = ""
    if parsers:
        place = f"{parsers[-1].filename.removeprefix(str(ROOT) + '/')}:{parsers[-1].lineno}"
    kind = type(error).__name__
    text = "".join(traceback.format_exception(error))
    where = f"{kind} at {place}" if not isinstance(error, Misjudged) else f"{kind}: {str(error)[:60]}"
    return Defect(kind, where, text[-6000:], case)
