"""Layers that use other layers' keys and values, windows and learned sinks, against a plain model written here."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine import ConfigInvalid, ForwardBatch, TensorMismatch, load_model
from engine.config import parse_config
from engine.random_model import RandomModelSpec, write_random_model

TOLERANCE = 1e-4
BACKENDS = ["compiled", "torch"]
OWNERS = {
    "shared-neighbours": [0, 0, 2, 2],
    "shared-across-blocks": [0, 1, 0, 1, 4],
    "shared-last-layers": [0, 1, 0, 1, 0],
}


def plain_logits(folder: Path, owners: list[int], token_ids: np.ndarray) -> np.ndarray:
    """Logits by loops over layers, positions and heads; each owner's keys and values are kept in a dictionary."""
    raw, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    n, heads, kv_heads, size = len(token_ids), raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    types = raw.get("layer_types", ["full_attention"] * raw["num_hidden_layers"])
    turn = torch.outer(torch.arange(n).float(), raw["rope_theta"] ** (-torch.arange(0, size, 2).float() / size))
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + raw["rms_norm_eps"]).sqrt() * weights[name]

    def projected(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].t() + weights.get(f"{name}.bias", torch.zeros(()))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., : size // 2], x[..., size // 2 :]
        c, s = turn.cos()[:, None], turn.sin()[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    x = weights["model.embed_tokens.weight"][torch.from_numpy(token_ids).long()]
    for layer, owner in enumerate(owners):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm.weight")
        q = rotated(projected(h, f"{at}.self_attn.q_proj").view(n, heads, size))
        if owner == layer:
            k = rotated(projected(h, f"{at}.self_attn.k_proj").view(n, kv_heads, size))
            kept[layer] = k, projected(h, f"{at}.self_attn.v_proj").view(n, kv_heads, size)
        k, v = kept[owner]
        mixed = torch.empty(n, heads, size)
        for position in range(n):
            first = max(0, position - raw["sliding_window"] + 1) if types[layer] == "sliding_attention" else 0
            for head in range(heads):
                kv = head // (heads // kv_heads)
                scores = k[first : position + 1, kv] @ q[position, head] / math.sqrt(size)
                mixed[position, head] = scores.softmax(0) @ v[first : position + 1, kv]
        x = x + projected(mixed.flatten(1), f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm.weight")
        gated = torch.nn.functional.silu(projected(h, f"{at}.mlp.gate_proj")) * projected(h, f"{at}.mlp.up_proj")
        x = x + projected(gated, f"{at}.mlp.down_proj")
    return (norm(x, "model.norm.weight") @ weights["model.embed_tokens.weight"].t()).numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(OWNERS))
def test_shared_kv_in_any_cut_agrees_with_a_plain_model(name, backend, models, model_folder, runner):
    model = models(name, backend=backend)
    assert list(model.config.kv_owners) == OWNERS[name]
    for block_tokens in (1, 4, 16):
        run = runner(model, [50, 31], block_tokens=block_tokens)
        want = [plain_logits(model_folder(name), OWNERS[name], ids) for ids in run.sequences]
        np.testing.assert_allclose(model.score(run.sequences[0]), want[0], atol=TOLERANCE, rtol=0)
        for step in ([(0, 0, 33)], [(1, 0, 5), (0, 33, 1)], [(0, 34, 16), (1, 5, 25)], [(1, 30, 1)]):
            for (sequence, start, size), logits in zip(step, run.step(*step), strict=True):
                np.testing.assert_allclose(logits, want[sequence][start + size - 1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", sorted(OWNERS))
def test_only_owners_have_a_cache_and_weights_for_keys(name, models, model_folder):
    model = models(name)
    owners = sorted(set(OWNERS[name]))
    assert model.config.kv_layers == tuple(owners)
    assert sorted(layer for group in model.kv_groups for layer in group.layers) == list(range(len(owners)))
    stored = load_file(model_folder(name) / "model.safetensors")
    assert {int(key.split(".")[2]) for key in stored if "k_proj.weight" in key} == set(owners)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(1, 3), (30, 12)])
def test_hooks_are_called_for_the_layers_that_own_kv(backend, sizes, models, runner):
    run = runner(models("shared-across-blocks", backend=backend), sizes)
    before, after = list[int](), list[int]()
    chunks = [run.chunk(i, 0, size) for i, size in enumerate(sizes)]
    run.model.forward(ForwardBatch(chunks), run.cache, after.append, before.append)
    assert before == after == [0, 1, 2]


def gpt_oss_logits(folder: Path, token_ids: np.ndarray) -> np.ndarray:
    """Logits of transformers' Llama with the attention of its gpt-oss."""
    from transformers import LlamaConfig, LlamaForCausalLM  # slow to import
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    class SinkAttention(GptOssAttention):
        """Llama's rotary tables repeat their first half, and its mask has no window."""

        def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
            n = hidden_states.shape[1]
            distance = torch.arange(n)[:, None] - torch.arange(n)[None]
            hidden = (distance < 0) | (distance >= (self.sliding_window or n))
            mask = torch.zeros(n, n).masked_fill(hidden, -torch.inf)[None, None]
            return super().forward(
                hidden_states, tuple(table[..., : self.head_dim // 2] for table in position_embeddings), mask
            )

    raw = json.loads((folder / "config.json").read_text())
    types = raw.pop("layer_types")
    config = LlamaConfig(**{key: value for key, value in raw.items() if key not in ("model_type", "architectures")})
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    config.layer_types = types
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = SinkAttention(config, index)
    found = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["lm_head.weight"], [])
    model.eval().tie_weights()
    with torch.inference_mode():
        logits: np.ndarray = model(torch.from_numpy(token_ids).long()[None], use_cache=False).logits[0].numpy()
    return logits


@pytest.mark.parametrize("backend", BACKENDS)
def test_learned_sinks_and_windows_agree_with_gpt_oss_of_transformers(backend, models, model_folder, runner):
    model = models("sinks", backend=backend)
    run = runner(model, [60])
    want = gpt_oss_logits(model_folder("sinks"), run.sequences[0])
    np.testing.assert_allclose(model.score(run.sequences[0]), want, atol=TOLERANCE, rtol=0)
    for start, size in ((0, 41), (41, 1), (42, 3), (45, 15)):
        np.testing.assert_allclose(run.step((0, start, size))[0], want[start + size - 1], atol=TOLERANCE, rtol=0)


ONE_WINDOW = ["sliding_attention", "full_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_owners": [0, 2, 1, 3]}, r"kv_owners\[1\] must be 1 or an earlier layer that owns its KV, got 2"),
        ({"kv_owners": [0, 0, 1, 3]}, r"kv_owners\[2\] must be 2 or an earlier layer that owns its KV, got 1"),
        ({"kv_owners": [0, -1, 2, 3]}, r"kv_owners\[1\] must be 1"),
        ({"kv_owners": [0, 0, 2]}, r"kv_owners must have num_hidden_layers \(4\) layer numbers"),
        ({"kv_owners": [0, True, 2, 3]}, "kv_owners must have"),
        ({"kv_owners": "all"}, "kv_owners must be a list"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers must be 0 to 3, got 4"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be 0 to 3"),
        (
            {"kv_owners": [0, 0, 2, 3], "sliding_window": 8, "layer_types": ONE_WINDOW},
            r"kv_owners\[1\] is 0, which has a window of 8, but layer 1 has full attention",
        ),
        (
            {"num_kv_shared_layers": 1, "sliding_window": 8, "layer_types": ONE_WINDOW[::-1]},
            "none of the layers before the last 1 has a window of 8",
        ),
        ({"attention_sinks": 1}, "attention_sinks must be true or false"),
    ],
)
def test_maps_of_owners_that_make_no_sense_are_refused(changes, message):
    raw = RandomModelSpec(family="moonpool", layers=4).config() | changes
    with pytest.raises(ConfigInvalid, match=message):
        parse_config(raw, {}, where="config.json")


def test_weights_for_the_keys_of_a_layer_that_owns_none_are_refused(tmp_path):
    folder = write_random_model(tmp_path, RandomModelSpec(family="moonpool", layers=2))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"kv_owners": [0, 0]}))
    with pytest.raises(TensorMismatch, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_model(folder)
