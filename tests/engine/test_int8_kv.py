"""Models whose KV is in int8: the bytes of both backends, and logits against the dense reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import (
    CacheMismatch,
    ConfigInvalid,
    ForwardBatch,
    KvGroupShape,
    Model,
    PagedCache,
    SequenceChunk,
    kernels,
    load_model,
)
from engine.config import parse_config
from engine.int8_rows import decode_rows, encode_rows, row_nbytes
from engine.random_model import RandomModelSpec, write_random_model

BACKENDS = ["compiled", "torch"]
MOST_FLIPS = {8: 0.25, 16: 0.5}
"""Share of logits that may differ by more than 1e-4, by the values that share a scale: a sum in another order may round
a value to the next step, which changes all logits after it."""
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def encoded(values: np.ndarray, group: int) -> np.ndarray:
    out = np.zeros(row_nbytes(len(values), group), np.uint8)
    kernels.encode_row(values, group, out)
    return out


@settings(max_examples=400, deadline=None)
@given(st.lists(FLOATS | st.floats(-4, 4, width=32), min_size=8, max_size=8), st.sampled_from([2, 4, 8]))
@example([0.0] * 8, 4)
@example([1e-45, -1e-45, 1e-8, -3e-6, 7.5e-6, 1e-5, 0.0, 2.0**-14 * 127], 8)
@example([65520.0 * 127, 1.0, 0, 0, 65503.0 * 127, -1.0, 3.0, 0.0], 4)
def test_the_kernels_write_and_read_the_same_bytes_as_torch(values: list[float], group: int) -> None:
    row = np.array(values, np.float32)
    theirs = encode_rows(torch.from_numpy(row), group)
    assert encoded(row, group).tolist() == theirs.tolist()
    out = np.zeros(8, np.float32)
    kernels.decode_rows(theirs.numpy(), 0, group, out, 0, 8, 1)
    np.testing.assert_array_equal(out, decode_rows(theirs, 8, group).numpy())
    finite = np.isfinite(out)
    for first in range(0, 8, group):
        part = slice(first, first + group)
        step = np.abs(row[part]).max() / 127
        if finite[part].all():
            assert np.abs(out[part] - row[part]).max() <= step * 0.51 + 2.0**-24 * 64


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_values_that_cannot_be_represented_are_read_back_as_not_finite(bad: float) -> None:
    row = np.array([1, 2, bad, 3, 4, 5, 6, 7], np.float32)
    for rows in (encode_rows(torch.from_numpy(row), 4), torch.from_numpy(encoded(row, 4))):
        read = decode_rows(rows, 8, 4)
        assert not read[:4].isfinite().any()
        assert read[4:].isfinite().all()


@pytest.mark.parametrize("group", [16, 32])
def test_long_rows_are_read_with_vectors(group: int) -> None:
    theirs = encode_rows(torch.randn(5, 64, generator=torch.Generator().manual_seed(2)), group)
    out = np.full((6, 64), 9, np.float32)
    kernels.decode_rows(theirs.numpy().ravel(), 2 * theirs.shape[1], group, out.ravel(), 64, 64, 3)
    np.testing.assert_array_equal(out[1:4], decode_rows(theirs[2:], 64, group).numpy())
    assert (out[[0, 4, 5]] == 9).all()


KINDS = ["sliding_attention", "full_attention"]
SHARED: dict[str, tuple[int, list[str], list[int]]] = {
    "far": (16, KINDS * 3, [0, 1, 2, 3, 0, 1]),
    "near": (32, sorted(KINDS * 3), [0, 0, 0, 3, 4, 4]),
}
"""Dimensions of a head, kinds and owners of layers: a layer uses the KV of one that is far, or of the one before."""


@pytest.fixture(scope="module")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a model with multi-query attention, windows, shared KV, sinks, and KV in int8."""

    def write(name: str) -> Path:
        head_dim, kinds, owners = SHARED[name]
        spec = RandomModelSpec(
            family="moonpool", layers=6, heads=4, kv_heads=1, head_dim=head_dim, vocab=200, max_len=256, window=24,
            scale=2.0,
            extra={"layer_types": kinds, "kv_owners": owners, "attention_sinks": True, "kv_dtype": "int8"},
        )  # fmt: skip
        return write_random_model(tmp_path_factory.mktemp(name), spec)

    return write


@pytest.fixture(scope="module")
def folder(write_model: Callable[[str], Path]) -> Path:
    return write_model("far")


@pytest.fixture(scope="module")
def near_folder(write_model: Callable[[str], Path]) -> Path:
    return write_model("near")


@pytest.fixture(params=[(backend, name) for backend in BACKENDS for name in SHARED], ids=" ".join)
def model(request: pytest.FixtureRequest, folder: Path, near_folder: Path) -> Model:
    backend, name = request.param
    return load_model({"far": folder, "near": near_folder}[name], backend=backend, threads=1)


def paged(model: Model, ids: np.ndarray, cuts: list[int], block_tokens: int) -> np.ndarray:
    blocks = -(-len(ids) // block_tokens)
    cache = model.new_cache((blocks + 3,) * len(model.kv_groups), block_tokens)
    cache.memory.fill_(0xFF)  # scales of unused tokens are not numbers
    table = np.random.default_rng(1).permutation(blocks + 3)[:blocks].astype(np.int32)
    tables = (table,) * len(model.kv_groups)
    found, start = [], 0
    for end in [*cuts, len(ids)]:
        used = tuple(each[: -(-end // block_tokens)] for each in tables)
        chunk = SequenceChunk(ids[start:end], start, used, want_logits=True, every=True)
        found.append(model.forward(ForwardBatch([chunk]), cache).numpy())
        start = end
    return np.concatenate(found)


@pytest.mark.parametrize("block_tokens", [4, 16, 50])
@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 40], [33], list(range(1, 90, 7))], ids=str)
def test_logits_are_the_dense_references_in_any_cuts_and_pages(
    model: Model, cuts: list[int], block_tokens: int
) -> None:
    ids = np.random.default_rng(3).integers(0, 200, 90).astype(np.int32)
    off = np.abs(paged(model, ids, cuts, block_tokens) - model.score(ids))
    assert (off > 1e-4).mean() <= MOST_FLIPS[model.kv_groups[0].scale_group]
    assert off.max() < 0.05


def test_a_step_that_stops_between_layers_gives_the_same_bits(near_folder: Path) -> None:
    """As where layers wait for reused KV: layers that share KV with the one before read what that has decoded."""
    model, ids = load_model(near_folder, threads=1), np.random.default_rng(5).integers(0, 200, 41).astype(np.int32)
    found, layers = [], list[int]()
    for before_layer in (None, layers.append):
        cache = model.new_cache((6,) * len(model.kv_groups), 8)
        for start, end in ((0, 40), (40, 41)):
            table = np.arange(-(-end // 8), dtype=np.int32)
            chunk = SequenceChunk(ids[start:end], start, (table,) * len(model.kv_groups), want_logits=True)
            logits = model.forward(ForwardBatch([chunk]), cache, before_layer=before_layer).numpy()
        found.append(logits)
    assert layers == [0, 1, 2] * 2
    np.testing.assert_array_equal(found[0], found[1])


def test_a_batch_of_sequences_gives_what_each_gives_alone(model: Model) -> None:
    rng = np.random.default_rng(4)
    sequences = [rng.integers(0, 200, n).astype(np.int32) for n in (3, 20, 41)]
    cache = model.new_cache((40,) * len(model.kv_groups), 8)
    tables = [np.arange(i * 10, i * 10 + 6, dtype=np.int32) for i in range(3)]

    def chunk(i: int, start: int, end: int) -> SequenceChunk:
        used = (tables[i][: -(-end // 8)],) * len(model.kv_groups)
        return SequenceChunk(sequences[i][start:end], start, used, want_logits=True)

    model.forward(ForwardBatch([chunk(i, 0, len(ids) - 1) for i, ids in enumerate(sequences)]), cache)
    last = model.forward(ForwardBatch([chunk(i, len(ids) - 1, len(ids)) for i, ids in enumerate(sequences)]), cache)
    for ids, logits in zip(sequences, last.numpy(), strict=True):
        np.testing.assert_allclose(logits, model.score(ids)[-1], atol=0.05)


@pytest.mark.parametrize("new_tokens", [1, 5])
def test_a_step_of_few_rows_gives_the_bits_that_each_sequence_gives_alone(near_folder: Path, new_tokens: int) -> None:
    model = load_model(near_folder, threads=1)
    rng = np.random.default_rng(6)
    sequences = [rng.integers(0, 200, n).astype(np.int32) for n in (60, 9, 33)]
    cache = model.new_cache((40,) * len(model.kv_groups), 8)

    def chunk(i: int, start: int, end: int) -> SequenceChunk:
        table = np.arange(i * 10, i * 10 - (-end // 8), dtype=np.int32)
        return SequenceChunk(sequences[i][start:end], start, (table,) * len(model.kv_groups), want_logits=True)

    for i, ids in enumerate(sequences):
        model.forward(ForwardBatch([chunk(i, 0, len(ids) - new_tokens)]), cache)
    before = cache.memory.clone()
    chunks = [chunk(i, len(ids) - new_tokens, len(ids)) for i, ids in enumerate(sequences)]
    together = model.forward(ForwardBatch(chunks), cache).numpy()
    for each, logits in zip(chunks, together, strict=True):
        cache.memory.copy_(before)
        np.testing.assert_array_equal(model.forward(ForwardBatch([each]), cache).numpy()[0], logits)


def test_the_cache_takes_a_byte_per_value_and_two_per_scale(folder: Path) -> None:
    model = load_model(folder, threads=1)
    lasting, windowed = model.kv_groups
    assert (lasting.dtype, lasting.scale_group, lasting.layers, windowed.layers) == ("int8", 8, (1, 3), (0, 2))
    assert PagedCache.required_nbytes(model.kv_groups, (1, 1), 16) == 2 * (2 * 2 * 16 * (16 + 2 * 2))


def test_int8_changes_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"family": "moonpool", "layers": 2, "vocab": 50, "max_len": 64}
    plain = write_random_model(tmp_path / "plain", RandomModelSpec(**spec))
    other = write_random_model(tmp_path / "int8", RandomModelSpec(**spec, extra={"kv_dtype": "int8"}))
    assert load_model(plain, threads=1).fingerprint != load_model(other, threads=1).fingerprint


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"kv_dtype": "int4"}, "kv_dtype must be int8, or auto for the dtype of the computation, got 'int4'"),
        ({"kv_dtype": "int8", "kv_scale_group": 5}, r"kv_scale_group must divide head_dim \(16\), got 5"),
        ({"kv_scale_group": 4}, "kv_scale_group is for kv_dtype int8, got kv_dtype auto"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_its_key(extra: dict[str, Any], said: str) -> None:
    raw = {
        "architectures": ["MoonpoolForCausalLM"], "model_type": "moonpool", "vocab_size": 8, "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
    }  # fmt: skip
    with pytest.raises(ConfigInvalid, match=said):
        parse_config({**raw, **extra}, {}, where="config.json")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 40]], ids=str)
def test_any_models_kv_can_be_in_int8(
    family: str, backend: str, cuts: list[int], model_folder: Callable[[str], Path]
) -> None:
    """Rounded in groups of four, against the dense reference that rounds in the same way."""
    model = load_model(model_folder(family), threads=1, backend=backend, kv_scale_group=4)
    assert {group.scale_group for group in model.kv_groups} == {4}
    ids = np.random.default_rng(3).integers(0, 200, 60).astype(np.int32)
    off = np.abs(paged(model, ids, cuts, 8) - model.score(ids))
    exact = load_model(model_folder(family), threads=1)
    error = np.abs(exact.score(ids) - model.score(ids))
    assert np.median(off) < np.median(error) / 4, "it is the rounding that the reference has, too"
    assert exact.fingerprint != model.fingerprint


@pytest.mark.parametrize("scale_group", [0, 8])
def test_groups_of_an_int8_model_are_its_own(folder: Path, scale_group: int) -> None:
    assert load_model(folder, threads=1, kv_scale_group=scale_group).config.kv_scale_group == 8


def test_groups_that_do_not_suit_the_model_are_refused(folder: Path, model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigInvalid, match=r"\(kv_scale_group\) must be that of the model, 8, or omitted, got 4"):
        load_model(folder, threads=1, kv_scale_group=4)
    with pytest.raises(
        ConfigInvalid, match=r"must divide the model's head_dim \(16\), got 5: use one of 1, 2, 4, 8, 16"
    ):
        load_model(model_folder("llama"), threads=1, kv_scale_group=5)


def test_groups_of_a_cache_with_scales_that_do_not_fit_are_refused() -> None:
    good = KvGroupShape("full", 0, (0,), 1, 8, "int8", 4)
    for wrong in (
        KvGroupShape("full", 0, (0,), 1, 8, "int8", 3),
        KvGroupShape("full", 0, (0,), 1, 8, "float32", 4),
        KvGroupShape("full", 0, (0,), 1, 8, "int8"),
    ):
        with pytest.raises(CacheMismatch, match="scale_group must divide head_dim"):
            PagedCache((wrong,), (1,))
    with pytest.raises(CacheMismatch, match="must share one dtype and scale_group"):
        PagedCache((good, KvGroupShape("window", 8, (1,), 1, 8, "int8", 8)), (1, 1))
