import io

from moonpool.supervision.terminal import TerminalView


def shown(view: TerminalView, stream: io.StringIO, *lines: str) -> list[str]:
    stream.truncate(0)
    stream.seek(0)
    for line in lines:
        view.on_line("a", line)
    return [line.removeprefix("[a] ") for line in stream.getvalue().splitlines()]


INFO = "12:00:00.000 INFO    a x: fine"
WARNING = "12:00:00.000 WARNING a x: careful"
ERROR = "12:00:00.000 ERROR   a x: bad"


def test_warnings_are_shown_only_between_start_and_stop() -> None:
    stream = io.StringIO()
    view = TerminalView(stream, verbose=False)
    assert shown(view, stream, INFO, WARNING, ERROR) == [ERROR]
    view.started()
    assert shown(view, stream, INFO, WARNING, ERROR) == [WARNING, ERROR]
    view.stopping()
    assert shown(view, stream, INFO, WARNING, ERROR) == []


def test_a_traceback_is_shown_with_the_record_that_it_belongs_to() -> None:
    stream = io.StringIO()
    view = TerminalView(stream, verbose=False)
    lines = (
        "raw before any record",
        INFO,
        "  of the info",
        ERROR,
        "Traceback (most recent call last):",
        "  File",
        INFO,
    )
    expected = ["raw before any record", ERROR, "Traceback (most recent call last):", "  File"]
    assert shown(view, stream, *lines) == expected


def test_verbose_shows_every_line() -> None:
    stream = io.StringIO()
    view = TerminalView(stream, verbose=True)
    view.stopping()
    assert shown(view, stream, INFO, WARNING) == [INFO, WARNING]


def test_a_terminal_that_is_gone_does_not_stop_the_cluster() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    TerminalView(Gone(), verbose=True).on_line("a", INFO)
