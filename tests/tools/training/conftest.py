"""A tiny cache folder (the bundled tokenizer, made-up tokens) and a tiny plan over it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tools.training.model import ModelShape
from tools.training.schedule import Phase, Stage
from tools.training.sources import SOURCES
from tools.training.train import TrainingPlan
from tools.training.windows import Mixture

BUNDLED = Path(__file__).parents[3] / "moonpool" / "data" / "model"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def bundled() -> Path:
    return BUNDLED


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Write the output of ``tools.training.prepare``, with 6,000 random tokens a source and one definition."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "data").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(BUNDLED / name, tmp_path / "tokenizer" / name)
    rng = np.random.default_rng(3)
    manifest = {}
    for source in SOURCES:
        for split in ("train", "held"):
            name = f"{source.name}.{split}.npy"
            np.save(tmp_path / "data" / name, rng.integers(6, 2048, 6000).astype(np.uint16))
            manifest[name] = {"tokens": 6000, "characters": 18000}
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "data" / "definitions.json").write_text(json.dumps([["tent", "a portable shelter"]]))
    return tmp_path


@pytest.fixture
def make_plan(cache: Path) -> Callable[..., TrainingPlan]:
    """A plan of a few steps of a three-layer model with windows of 64 tokens."""

    def make(run: str, **changes: object) -> TrainingPlan:
        shape = ModelShape(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=64, positions=64)
        settings: dict[str, object] = {
            "cache": cache,
            "run": cache / run,
            "deadline_s": 0.0,
            "steps": 6,
            "save_every_s": 1e9,
            "shape": shape,
            "schedule": Stage((Phase(1.0, 64, Mixture(reading=0.3, recall=0.3, copy=0.1)),)),
            **changes,
        }
        return TrainingPlan(**settings)  # type: ignore[arg-type]

    return make
