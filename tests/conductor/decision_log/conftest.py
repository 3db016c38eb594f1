"""Cores with a decision log, and what stands in it."""

import json

import numpy as np
import pytest

from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.decision_log.files import numbered, read_lines
from conductor.policy.events import NS, NodeJoined
from settings.keys import assemble


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now_ns = 1000 * NS

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def start(tmp_path, make):
    """Cores with a log in tmp_path/log, a prefill and a decode node; all are closed at the end."""
    started = []

    def begin(*, clock=None, log=None, **config):
        core = Core(
            assemble(ConductorConfig, listen="none", decision_log=tmp_path / "log", **(log or {}), **config),
            clock=clock or Clock(),
        )
        started.append(core)
        for view in (make.node("prefill-0", "prefill"), make.node("decode-0", "decode")):
            core.handle(NodeJoined(view))
        return core

    yield begin
    for core in started:
        core.close()


@pytest.fixture
def records(tmp_path):
    """All records in tmp_path/log, in their order."""

    def read():
        paths = numbered(tmp_path / "log", "decisions").values()
        return [json.loads(line) for path in paths for _, line in read_lines(path)]

    return read


@pytest.fixture
def chain():
    """`chain((part, count), ...)`: the keys of a prompt of such parts."""

    def keys(*parts):
        values = [value for part, count in parts for value in range(part * 1000, part * 1000 + count)]
        return np.array(values, np.uint64)

    return keys
