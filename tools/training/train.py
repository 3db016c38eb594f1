"""Training loop. ``python -m tools.training.train --stage 1 --deadline 13:45`` starts or resumes a stage of a run.

The first stage starts from random weights with the written circuits, or for siblings from those of the base, every
other from the weights that the one before exported (``--weights``), with fresh optimisers. Writes ``last.pt``
(resumable state) and ``log.jsonl`` (one line every few steps) to the run folder.
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

from tools.training import checkpoint, runlog, schedule, sinks
from tools.training.checkpoint import TrainingProgress
from tools.training.corpus import Corpus
from tools.training.export import load
from tools.training.lookup import write_lookup
from tools.training.model import PRESETS, Llama, ModelShape
from tools.training.muon import Muon
from tools.training.prepare import CACHE, SEED
from tools.training.small import small_from
from tools.training.sources import sha256_of
from tools.training.windows import batch

MATRIX_RATE = 0.008
OTHER_RATE = 0.0015
TOKENS_PER_STEP = 4096
LOG_EVERY_STEPS = 10
HAS_BFLOAT16 = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
"""Elsewhere bfloat16 is converted to float32 for every operation, which is slower than float32 alone."""


@dataclass(frozen=True)
class TrainingPlan:
    """Folders, end, checkpoint interval and model shape of one stage.

    ``weights``: exported by the stage before, or by the model from which a sibling starts.
    """

    cache: Path
    run: Path
    deadline_s: float
    steps: int
    save_every_s: float
    shape: ModelShape
    schedule: schedule.Stage
    stage: int = 1
    weights: Path | None = None
    seed: int = SEED


def build_optimisers(model: Llama) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for embedding and norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return [
        Muon(matrices, lr=MATRIX_RATE),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """Return the weighted mean cross-entropy, and the plain mean of the targets whose weight is above 1, in nats.

    The second is NaN if there is none.
    """
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    weights = weights.flatten()
    return (losses * weights).sum() / weights.sum(), float(losses.detach()[weights > 1].mean())


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
            phase, rate = plan.schedule.phase(done), plan.schedule.rate(done)
            length = min(phase.context, plan.shape.positions)
            rng = np.random.default_rng((plan.seed, plan.stage, progress.step))
            windows = max(TOKENS_PER_STEP // length, 1)
            arrays = batch(rng, corpus, tokenizer, windows=windows, context=length, mixture=phase.mixture)
            loss, answer_loss = _step(model, optimisers, [torch.from_numpy(array) for array in arrays], rate)
            progress = replace(progress, step=progress.step + 1, tokens=progress.tokens + arrays[0].size)
            if progress.step % LOG_EVERY_STEPS == 0:
                losses = round(loss, 4), round(answer_loss, 4)
                runlog.write(log, runlog.Row(progress.step, progress.tokens, length, *losses, round(rate, 4), now()))
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
        checkpoint.require_same_run(
            progress, seed=plan.seed, stage=plan.stage, tokenizer_sha256=tokenizer_sha256, path=path
        )
        optimisers = build_optimisers(model)
        for optimiser, state in zip(optimisers, states, strict=True):
            optimiser.load_state_dict(state)
        return progress, model, optimisers
    if plan.weights is not None:
        model = load(plan.weights).train()
        if model.shape != plan.shape:
            model = small_from(model, plan.shape)
    else:
        model = Llama(plan.shape)
        model.initialise(plan.seed)
        write_lookup(model, plan.seed)
    progress = TrainingProgress(plan.seed, plan.stage, 0, 0, now_s, tokenizer_sha256)
    return progress, model, build_optimisers(model)


def _step(
    model: Llama, optimisers: list[torch.optim.Optimizer], tensors: list[Tensor], rate: float
) -> tuple[float, float]:
    inputs, targets, weights = tensors
    # bfloat16 does not represent products of a scale and an integer.
    with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16 and not model.shape.int8):
        entering = model.entering(inputs)
        logits = model.logits(entering[-1])
    loss, answer_loss = weighted_loss(logits, targets, weights)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser, base in zip(optimisers, (MATRIX_RATE, OTHER_RATE), strict=True):
        for group in optimiser.param_groups:
            group["lr"] = base * rate
        optimiser.step()
        optimiser.zero_grad()
    if not model.shape.sinks:
        sinks.hold(model, entering)
    return float(loss.detach()), answer_loss


def today_at(text: str) -> float:
    """Return the Unix seconds of HH:MM (UTC) today."""
    hour, minute = (int(part) for part in text.split(":"))
    return datetime.now(UTC).replace(hour=hour, minute=minute, second=0, microsecond=0).timestamp()


def main() -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder written by tools.training.prepare")
    parser.add_argument("--run", type=Path, default=CACHE / "run", help="folder of checkpoints and log")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="base", help="model size and stages")
    parser.add_argument("--stage", type=int, default=1, help="stage of the run, from 1")
    parser.add_argument(
        "--weights", type=Path, help="folder that the stage before exported, or the base's, whose siblings are trained"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--deadline", type=today_at, default=0.0, help="end of the schedule, HH:MM UTC today")
    end.add_argument("--steps", type=int, default=0, help="end of the schedule in steps (reproducible)")
    parser.add_argument("--save-every-s", type=float, default=180.0)
    given = parser.parse_args()
    stages = schedule.STAGES[given.preset]
    if not 1 <= given.stage <= len(stages):
        parser.error(f"--stage is {given.stage}, but {given.preset} has the stages 1 to {len(stages)}")
    if (given.weights is None) != (given.stage == 1 and given.preset not in ("small", "reports")):
        parser.error("--weights is for stages from 2 on, and for all stages of small and reports, which require it")
    torch.set_num_threads(given.threads)
    plan = TrainingPlan(
        cache=given.cache,
        run=given.run,
        deadline_s=given.deadline,
        steps=given.steps,
        save_every_s=given.save_every_s,
        shape=PRESETS[given.preset],
        schedule=stages[given.stage - 1],
        stage=given.stage,
        weights=given.weights,
    )
    train(plan)


if __name__ == "__main__":
    main()
