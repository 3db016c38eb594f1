"""Costs of a dense GQA transformer derived from its shape and the machine's data sheet instead of measurements.

Compute follows Mooncake (arXiv 2407.00079, FAST'25): flops(n) = layers * (4 n^2 d + 22 n d^2). Reusing p tokens saves
flops(p), so each of the new * (p + new / 2) pairs costs 8 d flops per layer. A decode step reads the weights and all KV
once and computes for every sequence; the two times are added although a GPU overlaps them, so the sum is an upper
bound.
"""

from dataclasses import dataclass

from worker.policy.cost_profile import CostProfile, DecodeCost, PrefillCost, Range, TransferCost


@dataclass(frozen=True)
class AnalyticSetting:
    """A model, a machine, and the assumed fractions of the data sheet's rates."""

    name: str
    model: str
    hardware: str
    num_layers: int
    hidden_size: int
    kv_bytes_per_token: int
    weight_bytes: float
    flops_per_s: float  # data sheet, of the whole node
    memory_bytes_per_s: float  # data sheet, of the whole node
    memory_bytes: float
    compute_share: float  # of flops_per_s, reached by prefill and by decode's matrix products
    memory_share: float  # of memory_bytes_per_s, reached by a decode step
    step_overhead_s: float  # of every step: all-reduces and launches
    fetch_bytes_per_s: float  # one reader from one sender, over the network
    load_bytes_per_s: float  # from host memory to the GPUs
    ssd_bytes_per_s: float
    max_model_len: int
    max_batch: int
    made: str
    notes: tuple[str, ...]


def analytic_profile(setting: AnalyticSetting) -> CostProfile:
    """Return the cost profile of a setting."""
    layers, d = setting.num_layers, setting.hidden_size
    flops_per_s = setting.flops_per_s * setting.compute_share
    bytes_per_s = setting.memory_bytes_per_s * setting.memory_share
    token_s = layers * 22 * d**2 / flops_per_s
    capacity_tokens = int((setting.memory_bytes * 0.9 - setting.weight_bytes) / setting.kv_bytes_per_token)
    whole = Range(1, setting.max_model_len)
    most_bytes = Range(1, setting.max_model_len * setting.kv_bytes_per_token)
    paths = {"fetch": (5e-4, setting.fetch_bytes_per_s), "push": (5e-4, setting.fetch_bytes_per_s)}
    paths |= {"load": (2e-4, setting.load_bytes_per_s), "ssd_read": (1e-3, setting.ssd_bytes_per_s)}
    return CostProfile(
        name=setting.name,
        kind="analytic",
        made=setting.made,
        model=setting.model,
        model_fingerprint="",
        hardware=setting.hardware,
        kv_bytes_per_token=setting.kv_bytes_per_token,
        engine={
            "max_batch": setting.max_batch,
            "max_model_len": setting.max_model_len,
            "capacity_tokens": capacity_tokens,
            "block_tokens": 512,
        },
        prefill=PrefillCost(setting.step_overhead_s, token_s, layers * 8 * d / flops_per_s, whole, whole),
        decode=DecodeCost(
            setting.weight_bytes / bytes_per_s + setting.step_overhead_s,
            token_s,
            setting.kv_bytes_per_token / bytes_per_s,
            Range(1, setting.max_batch),
            Range(1, capacity_tokens),
        ),
        transfers={path: TransferCost(fixed_s, 1 / rate, most_bytes) for path, (fixed_s, rate) in paths.items()},
        notes=setting.notes,
    )


MOONCAKE_SETTING = AnalyticSetting(
    name="mooncake-70b-8xa800",
    model="dense 70B, GQA (80 layers, d 8192, 8 KV heads of 128, 16-bit)",
    hardware="8 x A800-SXM4-80GB, 4 x 200 Gbps RDMA (analytic: nothing here was measured)",
    num_layers=80,
    hidden_size=8192,
    kv_bytes_per_token=80 * 2 * 8 * 128 * 2,  # 320 KiB, as in the paper
    weight_bytes=138e9,
    flops_per_s=8 * 312e12,
    memory_bytes_per_s=8 * 2.039e12,
    memory_bytes=8 * 80e9,
    compute_share=0.5,
    memory_share=0.6,
    step_overhead_s=4e-3,
    fetch_bytes_per_s=87e9,
    load_bytes_per_s=100e9,
    ssd_bytes_per_s=12e9,
    max_model_len=131_072,
    max_batch=128,
    made="2026-11-22",
    notes=(
        "Analytic: derived from the model's shape and data sheets, not measured.",
        "Prefill: layers * (4 n^2 d + 22 n d^2) flops (Mooncake), at 50 % of 8 x 312 Tflop/s (bf16, dense).",
        "Decode step: 138 GB of weights and 320 KiB of KV per token of context at 60 % of 8 x 2039 GB/s, plus 22 d^2 "
        "flops per layer and sequence at 50 % of the peak, not overlapped, plus 4 ms for 160 all-reduces and launches.",
        "Network: 87 GB/s from one node to another, what Mooncake's Transfer Engine reached on 4 x 200 Gbps; 0.5 ms a "
        "batch. Host memory to GPUs: 100 GB/s, half of 8 x PCIe 4.0 x16; 0.2 ms. SSD: 12 GB/s, four NVMe drives of "
        "3 GB/s; 1 ms.",
        "KV room: 90 % of 640 GB less the weights. max_batch 128 and 128k tokens of context are assumptions.",
        "Prefill of 8k tokens: 0.92 s, of 128k: 48 s; decode step of 32 sequences of 8k: 0.030 s.",
    ),
)
