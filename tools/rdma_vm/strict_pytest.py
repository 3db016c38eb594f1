"""Pytest plugin for runs inside the VM: skipped tests count as failed, since they cannot run anywhere else.

A run that reached its time limit counts as interrupted, because some tests did not run.
"""

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a skipped test."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped inside the VM: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a skipped file."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped inside the VM: {report.longrepr}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report a run that `--session-timeout` ended as interrupted."""
    if session.shouldfail:
        session.exitstatus = pytest.ExitCode.INTERRUPTED
