"""Training, interruption, export and evaluation of a tiny model, end to end."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tools.training import checkpoint, evaluate, runlog
from tools.training.errors import CheckpointMismatch
from tools.training.export import export
from tools.training.model import Llama
from tools.training.plot import draw, joined
from tools.training.train import TrainingPlan, train


class PowerCut(Exception):
    """Stands for whatever ends a process."""


@pytest.mark.nightly
def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(
    make_plan: Callable[..., TrainingPlan],
) -> None:
    whole, cut = make_plan("whole"), make_plan("cut", save_every_s=0.0)
    train(whole)
    calls = itertools.count()

    def failing_clock() -> float:
        call = next(calls)
        if call == 12:
            raise PowerCut
        return float(call)

    with pytest.raises(PowerCut):
        train(cut, now=failing_clock)
    assert 0 < checkpoint.read(cut.run / "last.pt")[0].step < cut.steps
    resumed = train(cut)
    expected = checkpoint.read(whole.run / "last.pt")[1].state_dict()
    found = checkpoint.read(cut.run / "last.pt")[1].state_dict()
    assert resumed.step == 6
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.nightly
def test_training_lowers_the_loss(make_plan: Callable[..., TrainingPlan]) -> None:
    plan = make_plan("run", steps=20)
    train(plan)
    rows = runlog.read(plan.run / "log.jsonl")
    assert [row.step for row in rows] == [10, 20]
    assert rows[-1].loss < rows[0].loss - 0.2


def test_a_checkpoint_of_another_seed_is_refused(make_plan: Callable[..., TrainingPlan]) -> None:
    plan = make_plan("run", steps=1)
    train(plan)
    with pytest.raises(CheckpointMismatch, match=r"seed 20, .* this run has seed 21"):
        train(replace(plan, seed=21))


def test_a_resumed_log_forgets_the_steps_after_the_checkpoint(make_plan: Callable[..., TrainingPlan]) -> None:
    plan = make_plan("run")
    plan.run.mkdir()
    path = plan.run / "log.jsonl"
    with runlog.resume(path, 0) as file:
        for step in (10, 20, 30):
            runlog.write(file, runlog.Row(step, step * 64, 64, 5.0, 5.0, 1.0, float(step)))
    with runlog.resume(path, 20) as file:
        runlog.write(file, runlog.Row(30, 1920, 64, 4.0, 4.0, 1.0, 40.0))
    assert [(row.step, row.time_s) for row in runlog.read(path)] == [(10, 10.0), (20, 20.0), (30, 40.0)]
    twice = joined([runlog.read(path), runlog.read(path)])
    assert [row.tokens for row in twice] == [640, 1280, 1920, 2560, 3200, 3840]
    draw(twice, plan.run / "loss.svg")
    assert "tokens seen" in (plan.run / "loss.svg").read_text()


def test_transformers_computes_the_exported_model_as_training_did(make_plan: Callable[..., TrainingPlan]) -> None:
    plan = make_plan("run", steps=2)
    train(plan)
    folder = plan.run / "hf"
    export(plan.run / "last.pt", plan.cache / "tokenizer", folder)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours: Llama = evaluate.load(folder)
    ids = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(folder).bos_token_id == 0


def test_a_stage_goes_on_from_the_weights_that_the_one_before_exported(make_plan: Callable[..., TrainingPlan]) -> None:
    first = make_plan("first", steps=2)
    train(first)
    folder = first.run / "hf"
    export(first.run / "last.pt", first.cache / "tokenizer", folder)
    second = make_plan("second", steps=3, stage=2, weights=folder, schedule=replace(first.schedule, decays=True))
    train(second)
    before, after = evaluate.load(folder).state_dict(), checkpoint.read(second.run / "last.pt")[1].state_dict()
    changes = [float((before[name] - after[name]).abs().max()) for name in before]
    assert 0 < max(changes) < 0.1
    with pytest.raises(CheckpointMismatch, match=r"stage 2 .* this run has seed 20, stage 3"):
        train(replace(second, stage=3))
