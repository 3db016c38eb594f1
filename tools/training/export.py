"""Export of a checkpoint as a Hugging Face folder with checksums, and its reading.

Run ``python -m tools.training.export CHECKPOINT FOLDER``.
"""

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.folder import SCALE_SUFFIX
from engine.int8_linear import quantise_checkpoint
from engine.quantisation import INT8_ACTIVATIONS, INT8_WEIGHTS, quantization_config
from tools.training import checkpoint
from tools.training import tokenizer as bpe
from tools.training.model import Llama, ModelShape
from tools.training.prepare import CACHE
from tools.training.sources import sha256_of

TOKENIZER_FILES = ("tokenizer.json", "special_tokens_map.json")
TOKENIZER_CONFIG = "tokenizer_config.json"


_QUANTIZATION = quantization_config({**INT8_WEIGHTS, "dynamic": False}, INT8_ACTIVATIONS)


def config_of(shape: ModelShape) -> dict[str, object]:
    """Return the config.json of LlamaForCausalLM, with the rotary base under its old and new (transformers 5) key.

    The small-KV form is a MoonpoolForCausalLM.
    """
    small: dict[str, object] = {}
    if shape.windows:
        types = ["sliding_attention" if window else "full_attention" for window in shape.windows]
        small |= {"sliding_window": max(shape.windows), "layer_types": types}
    if shape.owners:
        small["kv_owners"] = list(shape.owners)
    if shape.sinks:
        small["attention_sinks"] = True
    if shape.int8:
        small |= {"kv_dtype": "int8", "kv_scale_group": shape.kv_scale_group, "quantization_config": _QUANTIZATION}
    if small:
        small |= {"architectures": ["MoonpoolForCausalLM"], "model_type": "moonpool"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": bpe.BOS_ID,
        "eos_token_id": bpe.EOS_ID,
        "pad_token_id": bpe.PAD_ID,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "float16",
        **small,
    }


def export(path: Path, tokenizer_folder: Path, folder: Path) -> None:
    """Write a checkpoint's model; see `write`."""
    _, model, _ = checkpoint.read(path)
    write(model, tokenizer_folder, folder)


def write(model: Llama, tokenizer_folder: Path, folder: Path) -> None:
    """Write config, weights (float16, or int8 if the model computes in it) and tokenizer files into ``folder``.

    Other files in it are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_stored(model), folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"bos_token_id": bpe.BOS_ID, "eos_token_id": bpe.EOS_ID, "pad_token_id": bpe.PAD_ID}
    (folder / "config.json").write_text(json.dumps(config_of(model.shape), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({**generation, "do_sample": False}, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_folder / name, folder / name)
    settings = json.loads((tokenizer_folder / TOKENIZER_CONFIG).read_text())
    settings["model_max_length"] = model.shape.positions
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    write_sums(folder)


def _stored(model: Llama) -> dict[str, Tensor]:
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    in_int8 = [name for name in tensors if model.shape.int8 and name.endswith("proj.weight")]
    rounded, in_floats = quantise_checkpoint(tensors, in_int8), tensors.keys() - in_int8
    return {name: tensor.half() if name in in_floats else tensor for name, tensor in rounded.items()}


def load(folder: Path) -> Llama:
    """Load an exported model in float32."""
    config = json.loads((folder / "config.json").read_text())
    types = config.get("layer_types", [])
    shape = ModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        windows=tuple(config["sliding_window"] if kind == "sliding_attention" else 0 for kind in types),
        owners=tuple(config.get("kv_owners", ())),
        sinks=config.get("attention_sinks", False),
        int8=config.get("kv_dtype") == "int8",
    )
    model = Llama(shape)
    stored = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in [name for name in stored if name.endswith(SCALE_SUFFIX)]:
        stored[name.removesuffix(SCALE_SUFFIX)] *= stored.pop(name)
    model.load_state_dict(stored)
    return model.eval()


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of the model's files, in the format of ``sha256sum --check``."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja"))
    (folder / "SHA256SUMS").write_text("".join(f"{sha256_of(folder / name)}  {name}\n" for name in names))


def main() -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=CACHE / "tokenizer")
    given = parser.parse_args()
    export(given.checkpoint, given.tokenizer, given.folder)


if __name__ == "__main__":
    main()
