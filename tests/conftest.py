"""What all tests have in common."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Machines are shared and noisy: no example is judged by its time. Failures must come back when they are looked into.
settings.register_profile("moonpool", deadline=None, derandomize=True)
settings.load_profile("moonpool")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path is short enough for unix sockets inside, which `tmp_path` need not be."""
    path = Path(tempfile.mkdtemp(prefix="mp-"))
    yield path
    shutil.rmtree(path)
