"""`moonpool droidspeak profile` finds the layers that must be computed, and refuses models that cannot share KV.

The sender is the nano model with a changed second layer: which layers the receiver must compute is known.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from settings.worker import BUNDLED_MODEL
from tools.training.facts import Fact, draw_fact
from worker.errors import ProfileError
from worker.policy.reuse_profile import ReuseProfile, load_reuse_profile

pytestmark = pytest.mark.long

NANO = Path(__file__).parents[2] / "data" / "nano-model"
CONTEXTS, QUESTIONS = 12, 3


def chats() -> list[dict[str, Any]]:
    """Chats that state facts and ask for each of them."""
    rng = np.random.default_rng(5)
    lines = []
    for _ in range(CONTEXTS):
        facts: dict[tuple[str, str], Fact] = {}
        while len(facts) < QUESTIONS:
            fact = draw_fact(rng, taken=set(facts), held_out=True)
            if fact is not None:
                facts[fact.key] = fact
        told = " ".join(fact.answer_stem + fact.answer_value for fact in facts.values())
        context = [{"role": "user", "content": told}, {"role": "assistant", "content": "Understood."}]
        for fact in facts.values():
            answer = {"role": "assistant", "content": fact.answer_stem + fact.answer_value}
            lines.append({"messages": [*context, {"role": "user", "content": fact.question}, answer]})
    return lines


def write_data(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], model: Path = NANO) -> Path:
    """Return a copy of a model with changed weights."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def scramble(weights: dict[str, torch.Tensor], part: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if part in name and tensor.dim() == 2:
            spread = tensor.float().std()
            weights[name] = (torch.randn(tensor.shape, generator=generator) * spread).to(tensor.dtype)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "chats.jsonl", chats())


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(tmp_path_factory.mktemp("sender") / "sibling", lambda weights: scramble(weights, "layers.1."))


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "moonpool", "droidspeak", "profile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_it_finds_the_layers_that_differ(sender: Path, data: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "reuse.json", tmp_path / "reuse.svg"
    done = run(sender, NANO, data, "--out", out, "--plot", plot)
    assert done.returncode == 0, done.stderr
    profile = load_reuse_profile(out)
    best = profile.points[-1]  # nothing is asked of the KV of the last layer
    assert (best.first, best.last, best.quality_loss) == (1, 1, 0.0)
    assert best.accuracy == profile.accuracy.receiver >= 0.9
    assert profile.accuracy.sender <= 0.2
    assert profile.input_layers == (1,)
    assert (profile.contexts, profile.questions) == (CONTEXTS, CONTEXTS * QUESTIONS)
    groups = {(each["first"], each["last"]): each for each in json.loads(done.stdout.splitlines()[-1])["groups"]}
    assert set(groups) == {(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)}
    assert all(0 < each["cost"] < 1 for each in groups.values())
    assert groups[(0, 0)]["cost"] < groups[(0, 1)]["cost"] < groups[(1, 2)]["cost"] * 1.5
    assert plot.read_text(encoding="utf-8").startswith("<?xml")


def test_a_random_sender_is_refused(data: Path, tmp_path: Path) -> None:
    sender = changed(tmp_path / "random", lambda weights: scramble(weights, ""), BUNDLED_MODEL)
    done = run(sender, BUNDLED_MODEL, data, "--out", tmp_path / "reuse.json")
    assert done.returncode == 2
    assert "no group of layers costs at most 67% of a prefill and loses at most 5.0%" in " ".join(done.stderr.split())
    assert not (tmp_path / "reuse.json").exists()


def _other_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes() + b"\n")


def _other_rope(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["rope_parameters"]["rope_theta"] = raw["rope_theta"] = 500.0
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: None, "the same model"),
        (_other_tokenizer, "tokenizer.json"),
        (_other_rope, "ropes"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
)
def test_models_that_cannot_share_kv_are_refused(
    spoil: Callable[[Path], object], message: str, data: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(NANO, tmp_path / "other"))
    spoil(other)
    done = run(other, NANO, data, "--out", tmp_path / "reuse.json")
    assert done.returncode == 2
    assert message in done.stderr


def _turn(role: str, content: str = "a") -> Mapping[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("", "has no examples"),
        (json.dumps({"messages": [_turn("user"), _turn("assistant")]}), "at least three"),
        (json.dumps({"messages": [_turn("user")] * 3}), "the last message must be the assistant's"),
        (json.dumps({"messages": [_turn("user"), {"role": "user"}, _turn("assistant")]}), "messages.1"),
        (json.dumps({"messages": [_turn("user", "a " * 3000), _turn("user"), _turn("assistant")]}), "at most 2048"),
        (json.dumps({"messages": [_turn("tool"), _turn("user"), _turn("assistant")]}), "template rejects"),
    ],
)
def test_unusable_data_is_refused(line: str, message: str, sender: Path, tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text(line)
    done = run(sender, NANO, data, "--out", tmp_path / "reuse.json")
    assert done.returncode == 2
    assert message in done.stderr


def test_data_that_both_models_answer_are_refused(data: Path, tmp_path: Path) -> None:
    sender = changed(
        tmp_path / "close", lambda weights: weights.update({"model.norm.weight": weights["model.norm.weight"] * 1.5})
    )
    done = run(sender, NANO, data, "--out", tmp_path / "reuse.json")
    assert done.returncode == 2
    assert "too close to measure" in done.stderr


def valid() -> dict[str, Any]:
    point = {"first": 1, "last": 2, "cost": 0.4, "accuracy": 0.9, "quality_loss": 0.0, "loss_interval": [0.0, 0.0]}
    return {
        "sender": "a",
        "sender_fingerprint": "0" * 32,
        "receiver": "b",
        "receiver_fingerprint": "1" * 32,
        "tokenizer": "t",
        "dtype": "float32",
        "num_layers": 3,
        "hidden_size": 64,
        "made": "2026-01-01",
        "data_sha256": "2" * 64,
        "contexts": 1,
        "questions": 1,
        "context_tokens": 10.0,
        "accuracy": {"sender": 0.1, "receiver": 0.9, "all_reused": 0.2},
        "max_quality_loss": 0.05,
        "points": [point],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": []}, "points"),
        ({"points": [valid()["points"][0] | {"last": 3}]}, "layers 0..2"),
        ({"points": [valid()["points"][0] | {"quality_loss": 0.06}]}, "max_quality_loss"),
        ({"points": valid()["points"] * 2}, "costlier and better"),
        ({"receiver_fingerprint": "0" * 32}, "must differ"),
        ({"sender_fingerprint": "x"}, "sender_fingerprint"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_damaged_profile_is_refused_by_the_field(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "reuse.json"
    content = {"format": "moonpool-reuse-profile", "version": 1, "profile": valid()}
    file.write_text(json.dumps(content))
    assert isinstance(load_reuse_profile(file), ReuseProfile)
    file.write_text(json.dumps(content | {"profile": valid() | change}))
    with pytest.raises(ProfileError, match=message):
        load_reuse_profile(file)
    file.write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(ProfileError, match="version"):
        load_reuse_profile(file)
