"""Model folders with random weights, for load tests without trained weights.

Use `python -m engine.random_model DIR --family llama --layers 2 --hidden 64 ...` or `write_random_model`.
"""

import argparse
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.config import parse_config
from engine.families import FAMILIES
from engine.folder import SCALE_SUFFIX, int8_tensors, layer_parts, tensor_shapes
from engine.int8_linear import quantise_checkpoint
from engine.packed_weights import pack_checkpoint

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, kw_only=True)
class RandomModelSpec:
    """Architecture and seed of a generated model. Equal specs give equal files."""

    family: str = "llama"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None  # None: hidden / heads
    intermediate: int | None = None  # None: 3 * hidden
    vocab: int = 256
    max_len: int = 2048
    window: int = 0  # > 0: sliding window of the layers from `full_layers` on (mistral, mixtral, qwen3_moe: of all)
    experts: int = 4  # of mixtral and qwen3_moe, of which each token uses two; their size is `intermediate`
    full_layers: int = 0
    tied: bool = True
    eos: int | None = None
    scale: float = 1.0  # matrices have the standard deviation scale / sqrt(inputs); 3 or more gives confident logits
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)  # further keys of config.json

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        raw: dict[str, Any] = {
            "architectures": [FAMILIES[self.family].architecture],
            "model_type": self.family,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate or 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim or self.hidden // self.heads,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
            "dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": self.eos,
        }
        if self.family != "llama":
            raw["sliding_window"] = self.window or None
        if FAMILIES[self.family].is_gemma:
            raw |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24}
        if self.family == "gemma3_text":
            del raw["rope_theta"]
        if self.family in ("qwen2", "qwen3", "qwen3_moe"):
            raw |= {"use_sliding_window": self.window > 0, "max_window_layers": self.full_layers}
        if self.family in ("mixtral", "qwen3_moe"):
            raw |= {"num_local_experts": self.experts, "num_experts_per_tok": min(2, self.experts)}
            raw["moe_intermediate_size"] = raw["intermediate_size"]
        return raw | dict(self.extra)


_DEFAULT_SPEC = RandomModelSpec()


def write_random_model(
    path: Path | str, spec: RandomModelSpec = _DEFAULT_SPEC, *, tokenizer: Path | str | None = None
) -> Path:
    """Write config.json, generation_config.json and model.safetensors (float32) and return the folder.

    `tokenizer` is a folder whose tokenizer files are copied.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    raw = spec.config()
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    generation = {} if spec.eos is None else {"eos_token_id": spec.eos}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(spec.seed)
    config = parse_config(raw, generation, where=str(folder))
    shapes, in_int8 = tensor_shapes(config), int8_tensors(config)
    for name in in_int8:
        del shapes[name + SCALE_SUFFIX]
    packed = {
        part.in_layer(layer): part.shape
        for layer in range(config.num_layers)
        for part in layer_parts(config, layer)
        if part.packed is not None
    }
    shapes = {name: shape for name, shape in shapes.items() if name[: name.rfind("_")] not in packed} | packed
    tensors = {name: _random(name, shapes[name], spec.scale, generator) for name in sorted(shapes)}
    if config.packed_weights:
        tensors = pack_checkpoint(tensors, packed, config.packed_weights)
    save_file(quantise_checkpoint(tensors, in_int8), folder / "model.safetensors")
    if tokenizer is not None:
        for name in _TOKENIZER_FILES:
            if (Path(tokenizer) / name).is_file():
                shutil.copyfile(Path(tokenizer) / name, folder / name)
    return folder


def _random(name: str, shape: tuple[int, ...], scale: float, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * values
    if name.endswith("bias"):
        return 0.2 * scale * values
    return values.mul(scale / math.sqrt(shape[-1]))


def main() -> None:
    """Run the command line, which has a flag for each field of `RandomModelSpec`."""
    parser = argparse.ArgumentParser(prog="python -m engine.random_model", description=__doc__)
    parser.add_argument("path", type=Path, metavar="DIR", help="folder to write")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="llama")
    for name, default in (("layers", 2), ("hidden", 64), ("heads", 4), ("kv-heads", 2), ("vocab", 256)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--head-dim", type=int, help="default hidden / heads")
    parser.add_argument("--intermediate", type=int, help="default 3 * hidden")
    parser.add_argument("--experts", type=int, default=4, help="mixtures: number of experts, default %(default)s")
    parser.add_argument("--max-len", type=int, default=2048, help="longest sequence, default %(default)s")
    parser.add_argument("--window", type=int, default=0, help="sliding window in tokens, default none")
    parser.add_argument("--full-layers", type=int, default=0, help="qwen: number of first layers with full attention")
    parser.add_argument("--untied", dest="tied", action="store_false", help="separate weights for the output head")
    parser.add_argument("--eos", type=int, help="end-of-sequence id, default none")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="scale of the weights' standard deviation, default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="copy the tokenizer files of this folder")
    parser.add_argument("--extra", type=json.loads, default={}, metavar="JSON", help="further keys of config.json")
    arguments = vars(parser.parse_args())
    path, tokenizer = arguments.pop("path"), arguments.pop("tokenizer")
    print(write_random_model(path, RandomModelSpec(**arguments), tokenizer=tokenizer))


if __name__ == "__main__":
    main()
