"""The small-KV form: the engine computes the exported model as training did, in int8 too."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from engine import load_model
from tests.long_cases import others_long
from tools.training import checkpoint
from tools.training.errors import UnsuitableShape
from tools.training.evaluate import int8_report
from tools.training.export import export, load
from tools.training.int8 import fake_kept, fake_quantised
from tools.training.model import Llama, ModelShape
from tools.training.small import small_from
from tools.training.train import TrainingPlan, train

SMALL = ModelShape(
    layers=4, hidden=64, heads=4, kv_heads=1, head_dim=16, intermediate=96, positions=64,
    windows=(16, 0, 16, 0), owners=(0, 1, 0, 1), sinks=True,
)  # fmt: skip


@pytest.fixture(params=others_long([False, True], [True]), ids=["float32", "int8"])
def small(request: pytest.FixtureRequest) -> Llama:
    model = Llama(replace(SMALL, int8=request.param))
    model.initialise(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= 4 if name.endswith("proj.weight") else 1
            if name.endswith("sinks"):
                parameter += torch.linspace(-1, 3, 4)
    return model.eval()


@torch.no_grad()
def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return float(functional.cross_entropy(logits[:-1].double(), ids[1:].long()))


def exported(model: Llama, tmp_path: Path, cache: Path) -> Path:
    progress = checkpoint.TrainingProgress(20, 1, 0, 0, 0.0, "")
    checkpoint.save(tmp_path / "last.pt", progress, model, [])
    export(tmp_path / "last.pt", cache / "tokenizer", tmp_path / "hf")
    return tmp_path / "hf"


def test_the_served_loss_is_that_of_training(small: Llama, tmp_path: Path, cache: Path) -> None:
    folder = exported(small, tmp_path, cache)
    ids = torch.from_numpy(np.random.default_rng(2).integers(6, 2048, (8, 64)))
    served = load_model(folder, threads=1)
    with torch.no_grad():
        trained = small(ids)
        read_back = load(folder)(ids)
    for row, (expected, same) in enumerate(zip(trained, read_back, strict=True)):
        logits = torch.from_numpy(served.score(ids[row].numpy().astype(np.int32)))
        # Weights are stored in float16 where they are not in int8.
        assert loss_of(logits, ids[row]) == pytest.approx(loss_of(expected, ids[row]), abs=2e-2)
        assert loss_of(logits, ids[row]) == pytest.approx(loss_of(same, ids[row]), abs=1e-3)


def test_the_report_compares_training_serving_and_rounding(small: Llama, tmp_path: Path, cache: Path) -> None:
    folder = exported(small, tmp_path, cache)
    sources = [np.random.default_rng(seed).integers(6, 2048, 200).astype(np.uint16) for seed in (3, 4)]
    report = int8_report(folder, load(folder), sources)
    assert report["nats_served"] == pytest.approx(report["nats_in_training"], abs=1e-3)
    rounded = report.get("nats_served_after_rounding")
    assert (rounded is None) == small.shape.int8
    if rounded is not None:
        assert 1e-4 < abs(rounded - report["nats_served"]) < 0.5


def test_windows_sinks_and_owners_take_part(small: Llama) -> None:
    ids = torch.arange(6, 70)[None]
    with torch.no_grad():
        whole = small(ids)
        for change in ({"windows": (0,) * 4}, {"windows": (8, 0, 8, 0)}):
            other = Llama(replace(small.shape, **change))
            other.load_state_dict(small.state_dict())
            changed = (other(ids) - whole).abs().amax(-1)[0] > 1e-4
            assert changed[-1]
            assert not changed[:8].any()
        small.model.layers[0].get_parameter("self_attn.sinks").add_(3.0)
        assert (small(ids) - whole).abs().max() > 1e-3
    assert not any(
        f"layers.{layer}.self_attn.{kv}_proj" in name for name in small.state_dict() for layer in (2, 3) for kv in "kv"
    )


def test_rounding_passes_gradients_on_unchanged() -> None:
    for rounding in (fake_quantised, lambda x: fake_kept(x, 4)):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        rounded = rounding(x)
        assert 0 < (rounded - x).abs().max() < x.abs().max() / 200
        (rounded * torch.arange(8.0)).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [list(range(8))] * 3


@torch.no_grad()
def test_a_sibling_of_the_same_form_computes_the_same_and_one_head_is_the_mean_of_two() -> None:
    base = Llama(replace(SMALL, kv_heads=2, windows=(), owners=(), sinks=False))
    base.initialise(6)
    ids = torch.arange(6, 70)[None]
    assert torch.equal(small_from(base, base.shape)(ids), base(ids))
    for layer in range(4):
        for name in ("k_proj", "v_proj"):
            weight = base.attention_of(layer).get_parameter(f"{name}.weight")
            weight[16:] = weight[:16]
    one = small_from(base, replace(base.shape, kv_heads=1))
    torch.testing.assert_close(one(ids), base(ids))
    shared = small_from(base, replace(base.shape, kv_heads=1, owners=(0, 1, 2, 2)))
    found = shared.state_dict()["model.layers.2.self_attn.k_proj.weight"]
    both = [base.state_dict()[f"model.layers.{layer}.self_attn.k_proj.weight"][:16] for layer in (2, 3)]
    torch.testing.assert_close(found, (both[0] + both[1]) / 2)
    with pytest.raises(UnsuitableShape, match=r"hidden must be the base's \(64\), got 80"):
        small_from(base, replace(base.shape, hidden=80))


def test_a_sibling_trains_from_its_base(make_plan: Callable[..., TrainingPlan]) -> None:
    base = make_plan("base", steps=1)
    train(base)
    export(base.run / "last.pt", base.cache / "tokenizer", base.run / "hf")
    shape = replace(base.shape, kv_heads=1, windows=(16, 0, 16), owners=(0, 1, 0), sinks=True, int8=True)
    plan = replace(make_plan("small", steps=2), shape=shape, weights=base.run / "hf")
    train(plan)
    model = checkpoint.read(plan.run / "last.pt")[1]
    assert model.shape == shape
    before = small_from(load(base.run / "hf"), shape).state_dict()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert any((tensor != before[name]).any() for name, tensor in model.state_dict().items() if "sinks" in name)
