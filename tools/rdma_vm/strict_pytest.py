"""A pytest plugin for the inside of the VM: what is skipped there has failed, for there is nowhere else to run it.

And a run that its time limit cut short was interrupted, not failed: there are tests that nobody ran.
"""

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips itself."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped inside the VM: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that skips itself."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped inside the VM: {report.longrepr}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """`--session-timeout` ends a run as a failure would."""
    if session.shouldfail:
        session.exitstatus = pytest.ExitCode.INTERRUPTED
