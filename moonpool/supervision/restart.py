"""Restart policy: back-off, and giving up on a process that never starts. Pure: time is an argument."""

from dataclasses import dataclass

CONFIG_EXIT_CODE = 2


@dataclass(frozen=True)
class RestartPolicy:
    """Bounds of the back-off."""

    first_delay_s: float = 0.2
    max_delay_s: float = 10.0
    healthy_after_s: float = 20.0  # after this time in the ready state the back-off is reset
    startup_attempts: int = 3  # attempts to become ready for the first time


@dataclass(frozen=True)
class Restart:
    """Decision to restart the process after `delay_s`."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """Decision not to restart the process."""

    reason: str


class RestartTracker:
    """History of one process: consecutive failures, and whether it was ever ready."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._ever_ready = False
        self._ready_since_ns: int | None = None

    def on_ready(self, now_ns: int) -> None:
        """Record that the process reported to be ready."""
        self._ever_ready = True
        self._ready_since_ns = now_ns

    def on_exit(self, now_ns: int, exit_code: int) -> Restart | GiveUp:
        """Decide after an unexpected exit; a negative exit code is a signal."""
        was_ready_s = 0.0 if self._ready_since_ns is None else (now_ns - self._ready_since_ns) / 1e9
        self._ready_since_ns = None
        if exit_code == CONFIG_EXIT_CODE:
            return GiveUp("rejected its configuration (exit code 2)")
        if was_ready_s >= self._policy.healthy_after_s:
            self._failures = 0
        self._failures += 1
        if not self._ever_ready and self._failures >= self._policy.startup_attempts:
            return GiveUp(f"ended {self._failures} times without becoming ready ({exit_text(exit_code)})")
        doubled = self._policy.first_delay_s * 2.0 ** min(self._failures - 1, 30)
        return Restart(min(doubled, self._policy.max_delay_s))


def exit_text(exit_code: int) -> str:
    """Return "exit code 1" or "killed by signal 9"."""
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
