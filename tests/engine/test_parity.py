"""Logits agree with transformers over family, backend, page size, chunks and number format.

Usually a cover runs in which every pair of values of two dimensions occurs; nightly, all combinations do.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import ForwardBatch, Model, load_model
from engine.int8_linear import quantise_checkpoint
from engine.packed_weights import pack_checkpoint
from engine.quantisation import INT8_ACTIVATIONS, INT8_WEIGHTS, PackedIntegers, quantization_config
from tests.engine.conftest import FAMILIES
from tests.long_cases import others_long

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LENGTH = 41
TOLERANCE = 1e-4
SMALL_KL = 2e-3
QUANTISED = ("int8", "int4")
SCHEMES: dict[str, tuple[dict[str, object], dict[str, object] | None]] = {
    "int8": (INT8_WEIGHTS, INT8_ACTIVATIONS),
    "int4": ({"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}, None),
}
CHUNKS = {
    "whole": [LENGTH],
    "single tokens at the end": [LENGTH - 3, 1, 1, 1],
    "odd pieces": [7, 1, 13, 20],
    "beside another sequence": [11, 17, 13],
}
"""Lengths of a sequence's chunks."""


@dataclass(frozen=True)
class ParityCase:
    """One combination."""

    family: str
    backend: str
    block_tokens: int
    chunks: str
    form: str

    @property
    def is_possible(self) -> bool:
        return not (self.form == "bfloat16" and self.backend == "compiled")


def every_case() -> list[ParityCase]:
    backends = ["compiled", "torch", "triton"]
    grid = itertools.product(sorted(FAMILIES), backends, [1, 4, 16], CHUNKS, ["float32", "bfloat16", *QUANTISED])
    return [case for case in itertools.starmap(ParityCase, grid) if case.is_possible]


def pairs_of(case: ParityCase) -> set[tuple[Any, ...]]:
    values = list(vars(case).items())
    return set(itertools.combinations(values, 2))


def pairwise_cover(cases: list[ParityCase]) -> list[ParityCase]:
    """Return cases in which every pair of values occurs that occurs in any: the one with the most new pairs first."""
    wanted = set[tuple[Any, ...]]().union(*map(pairs_of, cases))
    chosen = []
    while wanted:
        best = max(cases, key=lambda case: len(pairs_of(case) & wanted))
        chosen.append(best)
        wanted -= pairs_of(best)
    return chosen


def kl(reference: np.ndarray, found: np.ndarray) -> float:
    """Return the median divergence of distributions over the vocabulary: a token of another expert differs widely."""
    p, q = (torch.from_numpy(logits).double().log_softmax(-1) for logits in (reference, found))
    return float((p.exp() * (p - q)).sum(-1).median())


class References:
    """Folders, models and the logits that they should have, each made once."""

    def __init__(self, model_folder: Any, reference: Any, root: Path) -> None:
        self._folder, self._logits, self._root = model_folder, reference, root
        self._models: dict[tuple[str, ...], Model] = {}

    def model(self, case: ParityCase) -> Model:
        key = (case.family, case.backend, case.form)
        if key not in self._models:
            dtype = "bfloat16" if case.form == "bfloat16" else "float32"
            device = "cpu" if case.backend == "compiled" else DEVICE
            folder = self._quantised(case) if case.form in QUANTISED else self._folder(case.family)
            self._models[key] = load_model(folder, dtype=dtype, backend=case.backend, device=device, threads=1)  # type: ignore[arg-type]
        return self._models[key]

    def _quantised(self, case: ParityCase) -> Path:
        """Return the family's folder with quantised linear layers."""
        source, folder = self._folder(case.family), self._root / f"{case.family}-{case.form}"
        if not folder.exists():
            folder.mkdir()
            raw = json.loads((source / "config.json").read_text())
            tensors = load_file(source / "model.safetensors")
            linear = [name for name in tensors if "_proj.weight" in name or ".experts." in name]
            routers = [name.removesuffix(".weight") for name in tensors if name.endswith(".gate.weight")]
            raw["quantization_config"] = quantization_config(*SCHEMES[case.form], ignore=routers)
            (folder / "config.json").write_text(json.dumps(raw))
            if case.form == "int8":
                tensors = quantise_checkpoint(tensors, linear)
            else:
                tensors = pack_checkpoint(tensors, linear, PackedIntegers(4, 16))
            save_file(tensors, folder / "model.safetensors")
        return folder

    def compare(self, case: ParityCase, ids: np.ndarray, found: np.ndarray) -> None:
        if case.form == "int8":
            # An activation that is rounded to the next integer changes what follows.
            assert kl(self.model(case).score(ids), found) < SMALL_KL
            return
        if case.form == "int4":  # `test_packed_weights.py` compares what is unpacked
            np.testing.assert_allclose(found, self.model(case).score(ids), atol=TOLERANCE, rtol=0)
            return
        want = self._logits(case.family, ids)
        if case.form == "float32":
            np.testing.assert_allclose(found, want, atol=TOLERANCE, rtol=0)
            return
        theirs = kl(want, self._logits(case.family, ids, torch.bfloat16))
        # Where experts are chosen, a rounding may choose another one, in transformers as here.
        factor = 3.25 if self.model(case).config.experts else 3
        assert kl(want, found) < factor * theirs + SMALL_KL


@pytest.fixture(scope="module")
def references(model_folder: Any, reference: Any, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(model_folder, reference, tmp_path_factory.mktemp("int8"))


def check(case: ParityCase, references: References, runner: Any) -> None:
    model = references.model(case)
    run = runner(model, [LENGTH, LENGTH], case.block_tokens)
    beside = case.chunks == "beside another sequence"
    found, at = [], 0
    for size in CHUNKS[case.chunks]:
        chunks = [run.chunk(sequence, at, size, every=True) for sequence in ([0, 1] if beside else [0])]
        found.append(model.forward(ForwardBatch(chunks), run.cache)[:size].cpu().numpy())
        at += size
    references.compare(case, run.sequences[0], np.concatenate(found))


def needs_triton(case: ParityCase) -> None:
    if case.backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed: `make test` installs it")


COVER = pairwise_cover(every_case())
FIRST = {case.family: case for case in reversed(COVER)}  # of each family


@pytest.mark.parametrize(
    "case",
    others_long(COVER, FIRST.values()),
    ids=lambda case: "-".join(map(str, vars(case).values())),
)
def test_a_cover_of_all_pairs_agrees(case: ParityCase, references: References, runner: Any) -> None:
    needs_triton(case)
    check(case, references, runner)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_all_combinations_agree(family: str, references: References, runner: Any) -> None:
    for case in every_case():
        if case.family == family:
            needs_triton(case)
            check(case, references, runner)


def test_the_cover_has_every_pair_and_is_small() -> None:
    every = every_case()
    assert set().union(*map(pairs_of, COVER)) == set().union(*map(pairs_of, every))
    assert len(COVER) < len(every) / 10
