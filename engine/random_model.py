"""Model folders with random weights, for load tests where no trained weights are at hand.

`python -m engine.random_model DIR --family llama --layers 2 --hidden 64 ...` or `write_random_model`.
"""

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.config import parse_config
from engine.folder import tensor_shapes

_ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write_random_model(
    path: Path | str,
    *,
    family: str = "llama",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    vocab: int = 256,
    max_len: int = 2048,
    window: int = 0,
    full_layers: int = 0,
    tied: bool = True,
    eos: int | None = None,
    scale: float = 1.0,
    seed: int = 0,
    tokenizer: Path | str | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Writes config.json, generation_config.json and model.safetensors (float32); returns the folder.

    Matrices are normal with deviation `scale` / sqrt(inputs): a scale of 3 or more gives confident, clear logits.
    `window` > 0 gives layers from `full_layers` on a sliding window (mistral: all layers). `tokenizer` is a
    folder whose tokenizer files are copied. `extra` are further keys of config.json. Equal arguments give equal files.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    raw: dict[str, Any] = {
        "architectures": [_ARCHITECTURE[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate or 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
    }
    if family != "llama":
        raw["sliding_window"] = window or None
    if family in ("qwen2", "qwen3"):
        raw |= {"use_sliding_window": window > 0, "max_window_layers": full_layers}
    raw |= extra or {}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    generation = {} if eos is None else {"eos_token_id": eos}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(parse_config(raw, generation, where=str(folder)))
    save_file(
        {name: _random(name, shapes[name], scale, generator) for name in sorted(shapes)}, folder / "model.safetensors"
    )
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
    """The command line: every keyword of `write_random_model` as a flag."""
    parser = argparse.ArgumentParser(prog="python -m engine.random_model", description=__doc__)
    parser.add_argument("path", type=Path, metavar="DIR", help="folder to write")
    parser.add_argument("--family", choices=sorted(_ARCHITECTURE), default="llama")
    for name, default in (("layers", 2), ("hidden", 64), ("heads", 4), ("kv-heads", 2), ("vocab", 256)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--head-dim", type=int, help="default hidden / heads")
    parser.add_argument("--intermediate", type=int, help="default 3 * hidden")
    parser.add_argument("--max-len", type=int, default=2048, help="longest sequence, default %(default)s")
    parser.add_argument("--window", type=int, default=0, help="sliding window in tokens, default none")
    parser.add_argument("--full-layers", type=int, default=0, help="qwen: first layers that keep full attention")
    parser.add_argument("--untied", dest="tied", action="store_false", help="give the output head weights of its own")
    parser.add_argument("--eos", type=int, help="end-of-sequence id, default none")
    parser.add_argument("--scale", type=float, default=1.0, help="deviation of the weights, default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="copy the tokenizer files found there")
    arguments = vars(parser.parse_args())
    print(write_random_model(arguments.pop("path"), **arguments))


if __name__ == "__main__":
    main()
