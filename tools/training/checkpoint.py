"""Checkpoints: the complete state for resuming a run without changing its result, written atomically."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tools.training.errors import CheckpointMismatch
from tools.training.model import Llama, ModelShape


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a stage. The seed, ``stage`` and ``step`` determine the next batch."""

    seed: int
    stage: int
    step: int
    tokens: int
    started_s: float
    tokenizer_sha256: str


def save(path: Path, progress: TrainingProgress, model: Llama, optimisers: list[torch.optim.Optimizer]) -> None:
    """Write the state to ``path`` atomically; after a crash, the old state remains."""
    state = {
        "shape": asdict(model.shape),
        "progress": asdict(progress),
        "model": model.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in optimisers],
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def read(path: Path) -> tuple[TrainingProgress, Llama, list[dict[str, Any]]]:
    """Return the progress, the model in float32, and the optimisers' states."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model = Llama(ModelShape(**state["shape"]))
    model.load_state_dict(state["model"])
    return TrainingProgress(**state["progress"]), model, state["optimisers"]


def require_same_run(progress: TrainingProgress, *, seed: int, stage: int, tokenizer_sha256: str, path: Path) -> None:
    """Raise CheckpointMismatch if the checkpoint has a different seed, stage or tokenizer."""
    if (progress.seed, progress.stage, progress.tokenizer_sha256) != (seed, stage, tokenizer_sha256):
        raise CheckpointMismatch(
            f"{path} was written with seed {progress.seed}, stage {progress.stage} and tokenizer "
            f"{progress.tokenizer_sha256[:12]}, but this run has seed {seed}, stage {stage} and tokenizer "
            f"{tokenizer_sha256[:12]}; give another folder with --run"
        )
