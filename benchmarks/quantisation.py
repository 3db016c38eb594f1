"""Loss of the bundled model with quantised weights, activations and KV, on a real text, and the bytes that they take.

The text is the licence in the model's folder. Formats that the engine loads or computes are loaded and computed by it:
W8A8 (int8 weights per channel, activations per token), packed weights of 8 and 4 bits, and KV in int8 in groups. FP8
(E4M3, a scale per channel) and NF4 (blocks of 64, Dettmers et al., "QLoRA", 2023) are compared in quality only: their
weights are rounded, and computed in float32. Bytes are counted from tensors, scales included; those of KV also for
heads of 128 dimensions. The last line of output is JSON. `--store` writes benchmarks/results/quantisation-DATE.json.

    python benchmarks/quantisation.py [--model FOLDER] [--store]
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.stored import store  # noqa: E402
from engine import Model, check_folder, load_model  # noqa: E402
from engine.folder import layer_parts  # noqa: E402
from engine.int8_linear import quantise_checkpoint  # noqa: E402
from engine.int8_rows import row_nbytes  # noqa: E402
from engine.packed_weights import pack_checkpoint  # noqa: E402
from engine.quantisation import INT8_ACTIVATIONS, INT8_WEIGHTS, PackedIntegers, quantization_config  # noqa: E402
from frontend.tokenizer import Tokenizer  # noqa: E402
from settings.worker import BUNDLED_MODEL  # noqa: E402

Tensors = dict[str, torch.Tensor]
GROUPS: Final = (8, 16, 32, 64)
PUBLISHED_HEAD_DIM: Final = 128
_FP8_LARGEST, _NF4_BLOCK, _NF4_OFFSET = 448.0, 64, 0.9677083


@dataclass(frozen=True)
class WeightFormat:
    """A format of the linear layers: how a checkpoint is converted, its quantization_config, its bits."""

    name: str
    convert: Callable[[Tensors, list[str]], Tensors]
    config: Mapping[str, Any] | None = None  # None: it is a checkpoint in floats
    bits: int | None = None  # of a weight, if they are not counted from the tensors
    num_scales: Callable[[torch.Tensor], int] = len  # of such a weight, in 16 bits


def rounded(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, list[str]], Tensors]:
    """Return the conversion that replaces each weight [outputs, inputs] of linear layers."""
    return lambda tensors, names: tensors | {name: function(tensors[name].float()).contiguous() for name in names}


def fp8(weights: torch.Tensor) -> torch.Tensor:
    """Return weights as E4M3 keeps them, with a scale per output channel."""
    scales = weights.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / _FP8_LARGEST
    return (weights / scales).to(torch.float8_e4m3fn).float() * scales


def nf4(weights: torch.Tensor) -> torch.Tensor:
    """Return weights as NF4 keeps them: the nearest of 16 quantiles of a normal distribution, by blocks."""
    normal = NormalDist()
    above = [normal.inv_cdf(p) for p in np.linspace(_NF4_OFFSET, 0.5, 9)[:-1]]
    below = [-normal.inv_cdf(p) for p in np.linspace(_NF4_OFFSET, 0.5, 8)[:-1]]
    levels = torch.tensor(sorted([*above, 0.0, *below])) / max(above)
    blocks = weights.reshape(-1, _NF4_BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    nearest = (blocks / scales).unsqueeze(-1).sub(levels).abs().argmin(dim=-1)
    return (levels[nearest] * scales).reshape(weights.shape)


def packed(bits: int, group: int) -> WeightFormat:
    """Return packed integers of so many bits; `group` 0: a scale per channel."""
    weights: dict[str, object] = {"num_bits": bits, "type": "int", "symmetric": True}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    name = f"int{bits} weights, {f'groups of {group}' if group else 'per channel'}"
    of = PackedIntegers(bits, group)
    return WeightFormat(name, lambda tensors, names: pack_checkpoint(tensors, names, of), quantization_config(weights))


FORMATS: Final = (
    WeightFormat("W8A8", quantise_checkpoint, quantization_config(INT8_WEIGHTS, INT8_ACTIVATIONS)),
    packed(8, 0),
    packed(4, 32),
    packed(4, 0),
    WeightFormat("FP8 weights (quality only)", rounded(fp8), bits=8),
    WeightFormat(
        "NF4 weights (quality only)", rounded(nf4), bits=4, num_scales=lambda weights: weights.numel() // _NF4_BLOCK
    ),
)


def loss(model: Model, ids: np.ndarray) -> float:
    """Return the mean negative log-likelihood of a text's tokens, in nats."""
    logits = torch.from_numpy(model.score(ids)[:-1]).double()
    return float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[1:]).long()))


def converted(source: Path, of: WeightFormat, folder: Path) -> tuple[Path, float]:
    """Write a model's checkpoint in a format; return its folder and the bits of a linear layer's weight."""
    shutil.copytree(source, folder)
    raw = json.loads((source / "config.json").read_text())
    config = check_folder(source)
    names = [
        f"{part.in_layer(layer)}"
        for layer in range(config.num_layers)
        for part in layer_parts(config, layer)
        if len(part.shape) == 2
    ]
    tensors = load_file(source / "model.safetensors")
    found = of.convert({name: tensor.float() for name, tensor in tensors.items()}, names)
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw | ({"quantization_config": of.config} if of.config else {})))
    values = sum(tensors[name].numel() for name in names)
    stored = sum(
        tensor.nbytes
        for key, tensor in found.items()
        if any(key.startswith(name) for name in names) and not key.endswith("_shape")
    )
    if of.bits is not None:
        return folder, of.bits + 16 * sum(of.num_scales(tensors[name]) for name in names) / values
    return folder, 8 * stored / values


def measure(source: Path, ids: np.ndarray) -> dict[str, Any]:
    """Return the loss and the bytes of each format."""
    model = load_model(source, threads=1)
    exact, head_dim = loss(model, ids), model.config.head_dim
    weights, kv = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, of in enumerate(FORMATS):
            path, bits = converted(source, of, Path(folder) / str(number))
            found = loss(load_model(path, threads=1), ids) - exact
            weights.append({"format": of.name, "loss_added": found, "bits_per_weight": bits})
            print(f"{of.name}: {found:+.4f} nats", file=sys.stderr, flush=True)
    for group in (group for group in GROUPS if head_dim % group == 0):
        found = loss(load_model(source, threads=1, kv_scale_group=group), ids) - exact
        saved = 2 * PUBLISHED_HEAD_DIM / row_nbytes(PUBLISHED_HEAD_DIM, group)
        kv.append({"format": f"KV in int8, groups of {group}", "loss_added": found, "tokens_to_16_bits": saved})
        print(f"KV in groups of {group}: {found:+.5f} nats", file=sys.stderr, flush=True)
    return {"model": source.name, "tokens": len(ids), "loss": exact, "weights": weights, "kv": kv}


def show(result: dict[str, Any]) -> None:
    """Print a row for each format."""
    table = Table(title=f"loss of {result['tokens']:,} tokens: {result['loss']:.4f} nats per token in float32")
    for heading in ("format", "loss added", "bits per weight", "KV of as many bytes as in 16 bits"):
        table.add_column(heading)
    for row in result["weights"]:
        table.add_row(row["format"], f"{row['loss_added']:+.4f}", f"{row['bits_per_weight']:.2f}", "")
    for row in result["kv"]:
        table.add_row(
            row["format"], f"{row['loss_added']:+.5f}", "", f"{row['tokens_to_16_bits']:.2f} times the tokens"
        )
    Console(file=sys.stderr, width=120).print(table)


def main() -> None:
    """Measure, print a table and the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="folder of a model in floats, one file")
    parser.add_argument("--text", type=Path, default=BUNDLED_MODEL / "LICENSE", help="text whose loss is measured")
    parser.add_argument("--store", action="store_true", help="store the result")
    args = parser.parse_args()
    ids = np.array(Tokenizer(args.model).encode(args.text.read_text(), add_special_tokens=True), np.int32)
    result = measure(args.model, ids[: check_folder(args.model).max_positions])
    show(result)
    if args.store:
        store("quantisation", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
