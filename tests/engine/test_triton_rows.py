"""Triton's operations on rows compute what those of torch compute. On machines without a GPU they run in Triton's
interpreter.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.backends.interface import RowPlaces
from engine.backends.torch_rows import TorchRows
from engine.cache import PagedCache
from engine.int8_rows import encode_rows, row_nbytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton", reason="Triton is not installed: `make test` installs it")
from engine.backends.triton_rows import TritonRows  # noqa: E402

FLOATS = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-5}  # values are about 1, and bfloat16 is rounded several times
BLOCK_TOKENS, SLOTS = 3, 5


def values(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = DEVICE
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(found: torch.Tensor, want: torch.Tensor) -> None:
    assert found.dtype == want.dtype
    tolerance = TOLERANCES[want.dtype]
    torch.testing.assert_close(found.float(), want.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("size", [1, 48, 64])
def test_norms_and_sums_are_those_of_torch(size, dtype, weight_dtype, models):
    config = models("gemma2").config
    x, h = (values(3, size, seed=seed, dtype=dtype) for seed in (0, 1))
    weight, post = (values(size, seed=seed, dtype=weight_dtype) for seed in (2, 3))
    theirs, ours = (kind(config, None) for kind in (TorchRows, TritonRows))
    assert_close(ours.norm(x, weight), theirs.norm(x, weight))
    for before in (post, post[:0]):
        kept = x.clone()
        for found, want in zip(
            ours.add_and_norm(x, h, before, weight), theirs.add_and_norm(x, h, before, weight), strict=True
        ):
            assert_close(found, want)
        assert torch.equal(x, kept)


class Heads:
    """Queries, keys and values of rows, and a cache of NaN into which each implementation writes them."""

    def __init__(self, config: Any, dtype: torch.dtype, device: str = DEVICE) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        norms = [values(config.num_layers, config.head_dim, seed=s, dtype=dtype, device=device) for s in (4, 5)]
        self.weights: Any = SimpleNamespace(q_norm=norms[0], k_norm=norms[1])
        self.qkv = values(7, config.q_size + 2 * config.kv_size, dtype=dtype, device=device)
        angles = values(len(config.ropes), 7, config.head_dim // 2, seed=6, device=device)
        slots = torch.tensor([[4, 0, 0, 3, 2, 1, 4], [1, 1, 0, 3, 2, 1, 3]], dtype=torch.int32, device=device)
        offsets = torch.tensor([1, 0, 2, 1, 0, 2, 2], dtype=torch.int32, device=device)
        self.places = RowPlaces(angles.cos(), angles.sin(), slots, offsets)

    def placed(self, kind: Any, layer: int = 0, width: int | None = None) -> tuple[torch.Tensor, PagedCache]:
        """Return the queries and the cache."""
        groups = self.config.kv_groups(str(self.dtype).removeprefix("torch."))
        cache = PagedCache(groups, (SLOTS,) * len(groups), BLOCK_TOKENS, device=self.device)
        cache.memory.fill_(255)
        rows = kind(self.config, self.weights)
        return rows.place_heads(layer, self.qkv[:, :width].contiguous(), self.places, cache), cache


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("family", ["llama-untied-biases", "qwen3-layer-types", "mistral", "gemma3-rope-by-type"])
def test_heads_are_turned_and_placed_as_by_torch(family, dtype, models):
    heads = Heads(models(family).config, dtype)
    for layer in (0, heads.config.num_layers - 1):
        (ours, cache), (theirs, expected) = (heads.placed(kind, layer) for kind in (TritonRows, TorchRows))
        assert_close(ours, theirs)
        assert torch.equal(cache.flat.isnan(), expected.flat.isnan())
        assert_close(cache.flat.nan_to_num(0.0), expected.flat.nan_to_num(0.0))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's of NaN and infinity
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale_group", [4, 8, 12, 24])
def test_rows_in_int8_are_rounded_to_the_same_bits(scale_group, dtype, models):
    """Without a rotation, keys are not rounded before they are stored. Values never are.

    The reference runs on the CPU: on CUDA, torch divides by a number as it multiplies by its reciprocal.
    """
    config = replace(models("llama-untied-biases").config, kv_scale_group=scale_group, head_dim=24)
    caches = []
    for kind, device in ((TritonRows, DEVICE), (TorchRows, "cpu")):
        heads = Heads(config, dtype, device)
        places = heads.places
        heads.places = replace(places, cos=torch.ones_like(places.cos), sin=torch.zeros_like(places.sin))
        kv = heads.qkv[:, config.q_size :]
        kv *= torch.logspace(-9, 5, len(kv), device=device)[:, None].to(dtype)
        kv[0, 3], kv[1, 30], kv[2, :24] = torch.nan, torch.inf, 0.0
        caches.append(heads.placed(kind)[1])
    assert caches[0].views[0].shape[-1] == row_nbytes(24, scale_group)
    assert torch.equal(caches[0].memory.cpu(), caches[1].memory)
    value = kv[3, config.kv_size :][: config.head_dim]
    assert torch.equal(caches[1].views[0][3, 0, 0, 1, 1], encode_rows(value, scale_group))


@pytest.mark.parametrize("family", ["int8-kv", "qwen3-layer-types"])
def test_rows_of_padding_are_not_written(family, models):
    heads = Heads(models(family).config, torch.float32)
    heads.places.slots[:, 5:] = -1
    found = heads.placed(TritonRows)[1]
    heads.qkv, places = heads.qkv[:5], heads.places
    heads.places = RowPlaces(places.cos[:, :5], places.sin[:, :5], places.slots[:, :5], places.offsets[:5])
    assert torch.equal(found.memory, heads.placed(TritonRows)[1].memory)


def test_a_layer_that_uses_the_keys_of_another_one_writes_none(models):
    config = models("shared-across-blocks").config
    heads = Heads(config, torch.float32)
    (ours, cache), (theirs, _) = (heads.placed(kind, 2, config.q_size) for kind in (TritonRows, TorchRows))
    assert config.kv_owners[2] != 2
    assert_close(ours, theirs)
    assert bool((cache.memory == 255).all())
