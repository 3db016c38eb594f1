"""Training loop. ``python -m tools.training.train --deadline 13:45`` starts or resumes a run.

Writes ``last.pt`` (resumable state) and ``log.jsonl`` (one object every few steps) to the run folder.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from tools.training import checkpoint, runlog, schedule
from tools.training.checkpoint import TrainingProgress
from tools.training.lookup import write_lookup
from tools.training.model import PRESETS, Llama, ModelShape
from tools.training.prepare import CACHE, SEED
from tools.training.sources import sha256_of
from tools.training.windows import Corpus, batch

MATRIX_RATE = 0.008
OTHER_RATE = 0.0015
TOKENS_PER_STEP = 4096
LOG_EVERY_STEPS = 10


@dataclass(frozen=True)
class TrainingPlan:
    """Folders, end, checkpoint interval and model shape of a run."""

    cache: Path
    run: Path
    deadline_s: float
    steps: int
    save_every_s: float
    shape: ModelShape
    seed: int = SEED


def build_optimisers(model: Llama) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for embedding and norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01, momentum=0.95, nesterov=True),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean cross-entropy in nats."""
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def train(plan: TrainingPlan, now: Callable[[], float] = time.time) -> TrainingProgress:
    """Train until the schedule ends; save and return the final progress. ``now`` returns Unix seconds."""
    tokenizer_path = plan.cache / "tokenizer" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    corpus = Corpus.load(plan.cache / "data", "train")
    plan.run.mkdir(parents=True, exist_ok=True)
    path = plan.run / "last.pt"
    progress, model, optimisers = _begin(plan, path, sha256_of(tokenizer_path), now())
    clock = schedule.Clock(progress.started_s, plan.deadline_s, plan.steps)
    saved_s = now()
    with runlog.resume(plan.run / "log.jsonl", progress.step) as log:
        while (done := clock.progress(now(), progress.step)) < 1.0:
            length, rate = min(schedule.context(done), plan.shape.positions), schedule.rate(done)
            rng = np.random.default_rng((plan.seed, progress.step))
            windows = max(TOKENS_PER_STEP // length, 1)
            copied = schedule.copy_share(done)
            arrays = batch(rng, corpus, tokenizer, windows=windows, context=length, copy_share=copied)
            loss = _step(model, optimisers, [torch.from_numpy(array) for array in arrays], rate)
            progress = replace(progress, step=progress.step + 1, tokens=progress.tokens + arrays[0].size)
            if progress.step % LOG_EVERY_STEPS == 0:
                row = runlog.Row(progress.step, progress.tokens, length, round(loss, 4), round(rate, 4), now())
                runlog.write(log, row)
            if now() - saved_s > plan.save_every_s:
                checkpoint.save(path, progress, model, optimisers)
                saved_s = now()
    checkpoint.save(path, progress, model, optimisers)
    return progress


def _begin(
    plan: TrainingPlan, path: Path, tokenizer_sha256: str, now_s: float
) -> tuple[TrainingProgress, Llama, list[torch.optim.Optimizer]]:
    if path.exists():
        progress, model, states = checkpoint.read(path)
        checkpoint.require_same_run(progress, seed=plan.seed, tokenizer_sha256=tokenizer_sha256, path=path)
        optimisers = build_optimisers(model)
        for optimiser, state in zip(optimisers, states, strict=True):
            optimiser.load_state_dict(state)
        return progress, model, optimisers
    model = Llama(plan.shape)
    model.initialise(plan.seed)
    write_lookup(model, plan.seed)
    progress = TrainingProgress(plan.seed, 0, 0, now_s, tokenizer_sha256)
    return progress, model, build_optimisers(model)


def _step(model: Llama, optimisers: list[torch.optim.Optimizer], tensors: list[Tensor], rate: float) -> float:
    inputs, targets, weights = tensors
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs)
    loss = weighted_loss(logits, targets, weights)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser, base in zip(optimisers, (MATRIX_RATE, OTHER_RATE), strict=True):
        for group in optimiser.param_groups:
            group["lr"] = base * rate
        optimiser.step()
        optimiser.zero_grad()
    return float(loss.detach())


def today_at(text: str) -> float:
    """Return the Unix seconds of HH:MM (UTC) today."""
    hour, minute = (int(part) for part in text.split(":"))
    return datetime.now(UTC).replace(hour=hour, minute=minute, second=0, microsecond=0).timestamp()


def main() -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder written by tools.training.prepare")
    parser.add_argument("--run", type=Path, default=CACHE / "run", help="folder of checkpoints and log")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="bundled", help="model size of a new run")
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--deadline", type=today_at, default=0.0, help="end of the schedule, HH:MM UTC today")
    end.add_argument("--steps", type=int, default=0, help="end of the schedule in steps (reproducible)")
    parser.add_argument("--save-every-s", type=float, default=180.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    train(TrainingPlan(given.cache, given.run, given.deadline, given.steps, given.save_every_s, PRESETS[given.preset]))


if __name__ == "__main__":
    main()
