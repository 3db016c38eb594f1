"""Compile the kernels of rows, attention and sampling for a generation of GPUs, without a GPU:

    python compile_triton_steps.py CAPABILITY KIND...

CAPABILITY: 80 (A100), 90 (H100); KIND: fp32, fp16 or bf16. The script fails if a kernel does not compile, or if one of
sampling contains a fused multiplication and addition of float64. It prints the names of the kernels.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine import triton_sampling_kernels as sampling
from engine.backends import triton_kernels as attention
from engine.backends import triton_row_kernels as rows

TILES = {"tables": "*i32", "tiles": "*i32", "tops": "*fp32", "sums": "*fp32", "rows_in_step": "i32"}
HEADS = {"KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_TOKENS": 16}
PLACES = {"cos": "*fp32", "sin": "*fp32", "slots": "*i32", "offsets": "*i32", "slot_size": "i64", "eps": "fp32"}


class Compiler:
    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.names = set[str]()

    def compile(self, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> str:
        """Compile a kernel for arguments of these types and return its PTX."""
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        indexed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature=signature, constexprs=indexed)
        self.names.add(kernel.__name__)
        ptx: str = triton.compile(source, target=self._target, options=options).asm["ptx"]
        return ptx


def compile_rows(compiler: Compiler, kind: str) -> None:
    names = ("x", "h", "post_weight", "weight", "total", "normed")
    for adds, post in ((True, True), (True, False), (False, False)):
        shape = {"SIZE": 3000, "WIDTH": 4096, "ADDS": adds, "POST_NORM": post}
        compiler.compile(rows.add_and_norm, dict.fromkeys(names, f"*{kind}") | {"eps": "fp32"}, shape)
    for int8 in (False, True):
        names = ("qkv", "q_weight", "k_weight", "q", "kv")
        types = dict.fromkeys(names, f"*{kind}") | PLACES | ({"kv": "*u8"} if int8 else {})
        units = {"UNIT": 64, "UNITS": 2, "UNIT_WIDTH": 64} if int8 else {"UNIT": 128, "UNITS": 1, "UNIT_WIDTH": 128}
        shape = HEADS | units | {"HEADS": 32, "ROW": 132 if int8 else 128, "INT8": int8, "NORM": True}
        compiler.compile(rows.place_heads, types, shape, num_warps=1)


def compile_attention(compiler: Compiler, kind: str) -> None:
    for splits in (1, 8):
        out = {"out": f"*{kind}" if splits == 1 else "*fp32"}
        types = TILES | out | {"q": f"*{kind}", "kv": f"*{kind}", "sinks": "*fp32", "slot_size": "i64", "scale": "fp32"}
        shape = {"WINDOW": 1024, "SHARED": 4, "WIDTH": 128, "ROW": 128, "SCALE_GROUP": 0, "QUERIES": 16, "KEYS": 64}
        kinds = {"SPLITS": splits, "HAS_SINKS": True, "SOFTCAP": 30.0, "WIDEN": False}
        compiler.compile(attention.attend_tiles, types, HEADS | shape | kinds)
    types = {name: TILES[name] for name in ("tops", "sums", "tiles", "rows_in_step")}
    shape = {"HEADS": 32, "HEAD_DIM": 128, "WIDTH": 128, "SPLITS": 8, "SPLITS_WIDTH": 8}
    compiler.compile(attention.merge_splits, types | {"parts": "*fp32", "out": f"*{kind}"}, shape)


def compile_sampling(compiler: Compiler) -> None:
    common = {"logits": "*fp32", "tops": "*fp32", "draws": "*i64"}
    scored = common | {"ids": "*i64", "scores": "*fp64", "weights": "*fp64", "count": "i32"}
    launches: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
        (sampling.bound_scores, common | {"bounds": "*fp32", "vocab_size": "i32"}, {"PAIRS": 512}),
        (sampling.score_candidates, scored, {"WIDTH": 128, "WEIGHS": True}),
        (sampling.sum_weights, common | {"sums": "*i64", "vocab_size": "i32"}, {"UNIT": 2.0**40, "WIDTH": 1024}),
    ]
    for kernel, types, shape in launches:
        own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        ptx = compiler.compile(kernel, own, shape, enable_fp_fusion=False)
        assert "fma.rn.f64" not in ptx, kernel.__name__


def main(capability: str, *kinds: str) -> None:
    compiler = Compiler(int(capability))
    for kind in kinds:
        compile_rows(compiler, kind)
        compile_attention(compiler, kind)
    compile_sampling(compiler)
    print(*sorted(compiler.names))


if __name__ == "__main__":
    main(*sys.argv[1:])
