"""Single keys from the terminal, while they are waited for together with something else."""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_ARROWS: Final = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[5~": "page up", b"\x1b[6~": "page down"}
_MOST_NBYTES: Final = 64  # of a paste: the rest is read in the next turn


@contextmanager
def single_keys() -> Iterator[int]:
    """The terminal's descriptor; keys come as they are pressed, and are not shown. Ctrl-C stays what it is."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def key_or_event(keys: int, event: int) -> str | None:
    """Waits for either: the key's name ("q", "up"), or None once `event` can be read. A terminal that is gone: "q"."""
    readable, _, _ = select.select([keys, event], [], [])
    if keys not in readable:
        return None
    pressed = os.read(keys, _MOST_NBYTES)
    return name_of(pressed) if pressed else "q"


def name_of(pressed: bytes) -> str:
    """What was pressed; of several keys at once the first."""
    for sequence, name in _ARROWS.items():
        if pressed.startswith(sequence):
            return name
    return pressed[:1].decode("ascii", errors="ignore")
