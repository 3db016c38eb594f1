"""The log of what peers do wrong is bounded, however many they are and whatever they do."""

import logging

import pytest

from telemetry import limited_log
from telemetry.limited_log import LimitedLog


def test_each_peer_has_one_line_a_minute_and_all_together_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock_s = [1000.0]
    monkeypatch.setattr(limited_log.time, "monotonic", lambda: clock_s[0])
    limited = LimitedLog(logging.getLogger("test"))
    for _ in range(100):
        limited.warning("a", "%s did %d", "a", 1)
    assert caplog.messages == ["a did 1"]
    for number in range(100):
        limited.warning(f"peer {number}", "another")
    assert len(caplog.messages) == 32
    clock_s[0] += 60
    limited.warning("a", "again")
    assert caplog.messages[32:] == ["again"]
