"""A small real model for the workers' tests."""

from pathlib import Path

import pytest

from engine import Model, load_model
from engine.random_model import write_random_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), layers=2, vocab=256, max_len=512, scale=3.0, seed=3)


@pytest.fixture(scope="session")
def model(model_path: Path) -> Model:
    return load_model(model_path, threads=1)
