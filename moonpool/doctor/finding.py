"""What a check is and what it can find. No check lives here."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How serious a finding is: only FAIL means that what was asked for cannot be served here."""

    OK = "ok"
    NOTE = "note"  # good to know; nothing is wrong
    WARN = "warn"  # works, but worse than it could, or only as long as nothing unusual happens
    FAIL = "fail"


class Purpose(StrEnum):
    """What the machine is for, beyond a cluster on its CPU: makes what is optional needed."""

    PREFILL = "prefill"
    DECODE = "decode"
    POOL = "pool"
    RDMA = "rdma"
    GPU = "gpu"


@dataclass(frozen=True)
class Finding:
    """What one check found; `advice`, one sentence on what to do, is empty where nothing is to be done."""

    check: str
    level: Level
    found: str
    advice: str = ""


Needs = frozenset[Purpose]
Verdict = tuple[Level, str, str]  # level, found, advice


@dataclass(frozen=True)
class Check:
    """A named pair of halves: `observe` may block or raise, `judge` is pure."""

    name: str
    observe: Callable[[], Any]
    judge: Callable[[Any, Needs], Verdict]

    def look(self, needs: Needs) -> Finding:
        """Observe and judge."""
        return Finding(self.name, *self.judge(self.observe(), needs))


def optional(needs: Needs, *purposes: Purpose) -> Level:
    """FAIL for what is missing and needed for one of the purposes asked for; else a NOTE."""
    return Level.FAIL if needs & set(purposes) else Level.NOTE


def size_text(nbytes: float) -> str:
    """ "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
