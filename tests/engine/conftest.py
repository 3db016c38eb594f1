"""Factories: model folders with random weights of enlarged scale, sequences cut into steps, the reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import ForwardBatch, Model, PagedCache, SequenceChunk, load_model
from engine.random_model import RandomModelSpec, write_random_model

WINDOW = 11
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-untied-biases": {
        "family": "llama",
        "tied": False,
        "head_dim": 24,
        "extra": {"attention_bias": True, "mlp_bias": True},
    },
    "llama-rope-llama3": {
        "family": "llama",
        "extra": {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    },
    "llama-rope-linear": {"family": "llama", "extra": {"rope_scaling": {"type": "linear", "factor": 3.0}}},
    "llama-rope-yarn": {
        "family": "llama",
        "extra": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    },
    "mistral": {"family": "mistral", "heads": 6, "kv_heads": 3, "hidden": 48},
    "mistral-window": {"family": "mistral", "window": WINDOW},
    "qwen2": {"family": "qwen2", "layers": 3, "tied": False},
    "qwen2-two-groups": {"family": "qwen2", "layers": 3, "window": WINDOW, "full_layers": 1},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "qwen3-layer-types": {
        "family": "qwen3",
        "layers": 4,
        "window": WINDOW,
        "extra": {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
    },
    "mixtral": {"family": "mixtral", "layers": 3},
    "mixtral-window": {"family": "mixtral", "window": WINDOW, "experts": 7, "tied": False},
    "qwen3-moe": {"family": "qwen3_moe", "layers": 3, "experts": 8, "head_dim": 32},
    "qwen3-moe-and-mlps": {
        "family": "qwen3_moe",
        "layers": 5,
        "extra": {
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 80,
        },
    },
    "gemma2": {"family": "gemma2", "layers": 3, "window": WINDOW, "extra": {"attn_logit_softcapping": 5.0}},
    "gemma3": {
        "family": "gemma3_text",
        "layers": 4,
        "window": WINDOW,
        "extra": {"sliding_window_pattern": 3, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    },
    "gemma3-rope-by-type": {
        "family": "gemma3_text",
        "window": WINDOW,
        "kv_heads": 1,
        "extra": {
            "layer_types": ["full_attention", "sliding_attention"],
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    },
}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
OWN_FAMILY: dict[str, dict[str, Any]] = {
    "shared-neighbours": {"family": "moonpool", "layers": 4, "extra": {"kv_owners": [0, 0, 2, 2]}},
    "shared-across-blocks": {
        "family": "moonpool",
        "layers": 5,
        "kv_heads": 1,
        "window": WINDOW,
        "extra": {"layer_types": _TYPES, "kv_owners": [0, 1, 0, 1, 4]},
    },
    "shared-last-layers": {
        "family": "moonpool",
        "layers": 5,
        "window": WINDOW,
        "extra": {"layer_types": _TYPES, "num_kv_shared_layers": 3, "attention_bias": True},
    },
    "sinks": {
        "family": "moonpool",
        "layers": 3,
        "window": WINDOW,
        "extra": {"layer_types": _TYPES[:3], "attention_sinks": True, "attention_bias": True},
    },
    "int8-kv": {
        "family": "moonpool",
        "layers": 3,
        "window": WINDOW,
        "extra": {"layer_types": _TYPES[:3], "attention_sinks": True, "kv_dtype": "int8", "kv_scale_group": 8},
    },
}
"""Models of the family that transformers does not know."""


@dataclass
class Runner:
    """Runs sequences through `Model.forward` in given pieces; slots are handed out in a shuffled order."""

    model: Model
    cache: PagedCache
    sequences: list[np.ndarray]
    tables: list[tuple[np.ndarray, ...]]

    def chunk(
        self, sequence: int, start: int, size: int, *, want_logits: bool = True, every: bool = False
    ) -> SequenceChunk:
        ids = self.sequences[sequence][start : start + size]
        return SequenceChunk(ids, start, self.tables[sequence], want_logits, every)

    def step(self, *pieces: tuple[int, int, int]) -> np.ndarray:
        """One forward of (sequence, start, size) pieces; logits of the last token of each."""
        chunks = [self.chunk(*piece) for piece in pieces]
        return self.model.forward(ForwardBatch(chunks), self.cache).cpu().numpy()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's random model, written once."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = root / name
        return (
            path
            if path.exists()
            else write_random_model(path, RandomModelSpec(scale=2.0, **(FAMILIES | OWN_FAMILY)[name]))
        )

    return folder


@pytest.fixture(scope="session")
def models(model_folder: Callable[[str], Path]) -> Callable[..., Model]:
    """Loaded models, one per (family, options)."""
    loaded: dict[Any, Model] = {}

    def load(name: str, **options: Any) -> Model:
        key = (name, *sorted(options.items()))
        if key not in loaded:
            loaded[key] = load_model(model_folder(name), threads=1, **options)
        return loaded[key]

    return load


@pytest.fixture(scope="session")
def runner() -> Callable[..., Runner]:
    """A runner over random sequences of the given lengths, whose unused cache bytes are NaN."""

    def build(model: Model, lengths: Sequence[int], block_tokens: int = 4, seed: int = 0) -> Runner:
        rng = np.random.default_rng(seed)
        sequences = [rng.integers(0, model.config.vocab_size, n).astype(np.int32) for n in lengths]
        blocks = [-(-length // block_tokens) for length in lengths]
        cache = model.new_cache((sum(blocks) + 3,) * len(model.kv_groups), block_tokens)
        cache.memory.fill_(255)
        ends = np.cumsum(blocks)
        orders = [rng.permutation(sum(blocks) + 3).astype(np.int32) for _ in model.kv_groups]
        tables = [tuple(order[end - n : end] for order in orders) for end, n in zip(ends, blocks, strict=True)]
        return Runner(model, cache, sequences, tables)

    return build


@pytest.fixture(scope="session")
def reference(model_folder: Callable[[str], Path]) -> Callable[..., np.ndarray]:
    """Logits [n, vocab] of transformers for a sequence."""
    from transformers import AutoModelForCausalLM  # slow to import: only for the tests that compare with it

    loaded: dict[Any, Any] = {}

    def logits(name: str, token_ids: np.ndarray, dtype: torch.dtype = torch.float32) -> np.ndarray:
        key = (name, dtype)
        if key not in loaded:
            loaded[key] = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=dtype).eval()
        with torch.inference_mode():
            found = loaded[key](torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0]
        result: np.ndarray = found.float().numpy()
        return result

    return logits


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Every family in turn."""
    name: str = request.param
    return name
