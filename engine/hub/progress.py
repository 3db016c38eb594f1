"""Progress of a download: a bar on a terminal, otherwise a line per tenth."""

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from huggingface_hub.utils.tqdm import tqdm
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

_PARTS = 10


class Reporter:
    """Context that reports the bytes of one download to stderr.

    It makes SIGINT end the download's threads, for which `huggingface_hub` would otherwise wait until their files are
    complete.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._done = 0
        self._bar: Progress | None = None
        self._interrupted = False
        self._former_handler: Any = None

    def __enter__(self) -> "Reporter":
        if threading.current_thread() is threading.main_thread():
            self._former_handler = signal.signal(signal.SIGINT, self._interrupt)
        if sys.stderr.isatty():
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress("{task.description}", *columns, console=Console(stderr=True))
            self._bar.add_task(f"Downloading {self._name}", total=self._total)
            self._bar.start()
        else:
            self._print()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._former_handler is not None:
            signal.signal(signal.SIGINT, self._former_handler)
        if self._bar is not None:
            self._bar.stop()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def add(self, nbytes: int) -> None:
        """Count bytes that have arrived; the calls of several threads must not overlap.

        Raises KeyboardInterrupt, in the calling thread, once the download was interrupted.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        before, self._done = self._part(), self._done + nbytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif self._part() > before:
            self._print()

    def _part(self) -> int:
        return self._done * _PARTS // max(self._total, 1)

    def _print(self) -> None:
        share = self._done * 100 // max(self._total, 1)
        text = f"Downloading {self._name}: {decimal(self._done)} of {decimal(self._total)} ({share} %)"
        print(text, file=sys.stderr, flush=True)


def reporting_bars(reporter: Reporter | None) -> type[Any]:
    """Return the class of bars for `huggingface_hub`: invisible, they pass received bytes on to `reporter`."""

    class ReportingBar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]
            # The hub has a bar for received bytes, which compression makes fewer, one for files, and this one.
            self._counts = str(options.get("desc", "")).startswith("Reconstructing")

        def update(self, n: float | None = 1) -> bool | None:
            if reporter is not None and self._counts:
                with self.get_lock():
                    reporter.add(int(n or 0))
            return None

    return ReportingBar
