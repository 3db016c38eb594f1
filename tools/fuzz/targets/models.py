"""Targets: model folders. Configurations, checkpoint headers, tokenizers and chat templates."""

import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import find_tokenizer
from engine.config import read_config
from engine.errors import EngineError
from engine.folder import check_tensors, stored_tensors, tensor_shapes
from frontend.errors import InvalidRequest, ModelFilesError
from frontend.tokenizer import Tokenizer
from tools.fuzz import mutation
from tools.fuzz.target import ROOT, FuzzTarget, Misjudged, scratch_folder

_BUNDLED = ROOT / "moonpool" / "data" / "model"
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": [1, 2],
    "torch_dtype": "float32", "bos_token_id": 0, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
_VARIANTS: tuple[dict[str, Any], ...] = (
    _LLAMA,
    {**_LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {**_LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}},
    {**_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16},
    {**_LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
     "max_window_layers": 1, "sliding_window": 8},
    {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 4, "use_sliding_window": True,
     "layer_types": ["full_attention", "sliding_attention"]},
    {**_LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 3,
     "num_experts_per_tok": 2},
    {**_LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
     "num_experts_per_tok": 1, "moe_intermediate_size": 8, "mlp_only_layers": [0], "norm_topk_prob": True},
    {**_LLAMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0},
    {**_LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window_pattern": 2,
     "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
    {**_LLAMA, "architectures": ["MoonpoolForCausalLM"], "model_type": "moonpool", "sliding_window": 8,
     "kv_owners": [0, 0], "attention_sinks": True, "kv_dtype": "int8", "kv_scale_group": 4},
    {**_LLAMA, "architectures": ["MoonpoolForCausalLM"], "model_type": "moonpool", "num_kv_shared_layers": 1},
)  # fmt: skip
_WORDS = (
    *_LLAMA, "rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "layer_types", "head_dim", "yarn",
    "llama3", "linear", "kv_owners", "num_kv_shared_layers", "attention_sinks", "kv_dtype", "kv_scale_group", "int8",
    "num_experts", "num_experts_per_tok", "mlp_only_layers", "decoder_sparse_step",
    "final_logit_softcapping",
    "full_attention", "sliding_attention", "quantization_config", "mlp_bias", "float16", 2, 4,
)  # fmt: skip


class ModelFolderTarget(FuzzTarget):
    """Base of targets that check a model folder, which is rewritten for each case."""

    def open(self) -> None:
        """Make the folder."""
        self._folder = scratch_folder()
        self.path = Path(self._folder.name)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()


class ModelConfiguration(ModelFolderTarget):
    """config.json and generation_config.json: a JSON object with both, or the bytes of config.json."""

    name = "model-config"
    covers: tuple[str, ...] = ("engine/config.py", "engine/folder.py")
    allowed: tuple[type[BaseException], ...] = (EngineError,)

    def seeds(self) -> Sequence[bytes]:
        return [json.dumps({"config": one, "generation": {"eos_token_id": [1, 3]}}).encode() for one in _VARIANTS]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate the values."""
        return mutation.mutate_json(rng, case, other, (), _WORDS)

    def run(self, case: bytes) -> None:
        """Read the configuration; what the engine derives from a valid one must be well-formed."""
        both = mutation.from_json(case)
        if isinstance(both, dict) and "config" in both and "\\ud" not in case.decode("latin-1"):
            (self.path / "config.json").write_text(json.dumps(both["config"]))
            (self.path / "generation_config.json").write_text(json.dumps(both.get("generation", {})))
        else:
            (self.path / "config.json").write_bytes(case)
        config = read_config(self.path)
        if min(config.vocab_size, config.hidden_size, config.num_layers, config.head_dim, config.max_positions) < 1:
            raise Misjudged("a size below 1")
        if len(config.layer_windows) != config.num_layers or config.num_heads % config.num_kv_heads:
            raise Misjudged("layers or heads that do not fit")
        if config.bos_token_id is not None and type(config.bos_token_id) is not int:
            raise Misjudged("bos_token_id is not an integer")
        if any(type(each) is not int for each in config.eos_token_ids):
            raise Misjudged("an end token is not an integer")
        if config.num_layers <= 64:
            tensor_shapes(config)
            if sum(len(group.layers) for group in config.kv_groups("float16")) != len(config.kv_layers):
                raise Misjudged("a KV layer in no group, or in two")


class CheckpointHeaders(ModelFolderTarget):
    """model.safetensors, or an index with shards: the length of the index, the index, and a safetensors file."""

    name = "checkpoint"
    covers: tuple[str, ...] = ("engine/folder.py",)
    allowed: tuple[type[BaseException], ...] = (EngineError,)
    tokens: tuple[bytes, ...] = (
        b'"shape"',
        b'"dtype"',
        b'"data_offsets"',
        b"[0,",
        b"F32",
        b"BF16",
        b"__metadata__",
        b"1e400",
        b"-1",
        b"null",
    )

    def open(self) -> None:
        """Write the configuration that the headers must fit."""
        super().open()
        (self.path / "config.json").write_text(json.dumps(_LLAMA))
        self._config = read_config(self.path)

    def seeds(self) -> Sequence[bytes]:
        entries, at = {}, 0
        for name, shape in tensor_shapes(self._config).items():
            size = 4 * _product(shape)
            entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        index = json.dumps({"weight_map": dict.fromkeys(entries, "shard.safetensors")}).encode()
        return [_checkpoint(entries, at, b""), _checkpoint({"__metadata__": {"a": "b"}, **entries}, at, index)]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate the header as JSON, with a right or a wrong length, the index, or bytes."""
        parts = _parts(case)
        if parts is None or rng.random() < 0.2:
            return mutation.mutate_bytes(rng, case, other, self.tokens)
        index, header, rest = parts
        if index and rng.random() < 0.4:
            index = mutation.mutate_json(rng, index, index, self.tokens, ("shard.safetensors", "weight_map", "../x"))
        else:
            header = mutation.mutate_json(
                rng, header, header, self.tokens, ("shape", "dtype", "data_offsets", "F16", 8)
            )
        if rng.random() < 0.1:
            rest = rest[: rng.randrange(len(rest) + 1)]
        return _joined(index, header, rest)

    def run(self, case: bytes) -> None:
        """Check the folder's tensors."""
        parts = _parts(case)
        index = b"" if parts is None else parts[0]
        body = case if parts is None else case[4 + len(index) :]
        single, listed = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if index:
            single.unlink(missing_ok=True)
            listed.write_bytes(index)
            (self.path / "shard.safetensors").write_bytes(body)
        else:
            single.write_bytes(body)
        check_tensors(self.path, self._config, stored_tensors(self.path))


def _product(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def _checkpoint(entries: dict[str, Any], nbytes: int, index: bytes) -> bytes:
    return _joined(index, json.dumps(entries).encode(), bytes(nbytes))


def _joined(index: bytes, header: bytes, rest: bytes) -> bytes:
    return struct.pack("<I", len(index)) + index + struct.pack("<Q", len(header)) + header + rest


def _parts(case: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Return index, header and data of a case; None if its lengths do not fit."""
    if len(case) < 4:
        return None
    at = 4 + int(struct.unpack_from("<I", case)[0])
    if at + 8 > len(case):
        return None
    end = at + 8 + int(struct.unpack_from("<Q", case, at)[0])
    return (case[4:at], case[at + 8 : end], case[end:]) if end <= len(case) else None


_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True},
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
              "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
              "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3, "\u0120": 4}, "merges": [["a", "b"]]},
}  # fmt: skip
_CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab a"}]
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<a>{% endif %}"
)


class TokenizerFiles(ModelFolderTarget):
    """A tokenizer's folder: one JSON object with the contents of its files."""

    name = "tokenizer"
    covers: tuple[str, ...] = ("frontend/tokenizer.py", "frontend/chat_rendering.py")
    allowed: tuple[type[BaseException], ...] = (ModelFilesError, InvalidRequest, EngineError)
    deadline_s = 20.0
    _words = (
        "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "chat_template",
        "chat_template.jinja", "eos_token", "eos_token_id", "vocab_size", "max_position_embeddings", "content", "type",
        "ByteLevel", "Metaspace", "WordLevel", "Unigram", "decoder", "model", "merges", "vocab", "added_tokens", "a",
        "{% for a in messages %}", "{{ messages }}", "{{ messages[9] }}", "{{ raise_exception('x') }}", "{{ 1/0 }}",
        "{{ ''.__class__ }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ strftime_now('%Y') }}", "{{ strftime_now(1) }}", "{{ messages | tojson }}", "{% break %}", "{{ x.y.z }}",
    )  # fmt: skip

    def seeds(self) -> Sequence[bytes]:
        files = {
            "tokenizer.json": _TOKENIZER,
            "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "b"}, "chat_template": _TEMPLATE},
            "config.json": {"vocab_size": 5, "max_position_embeddings": 64, "eos_token_id": 2},
            "generation_config.json": {"eos_token_id": [1, 2]},
        }
        named = {"chat_template": [{"name": "default", "template": _TEMPLATE}]}
        return [
            json.dumps(files).encode(),
            json.dumps(files | {"chat_template.jinja": _TEMPLATE}).encode(),
            json.dumps(files | {"tokenizer_config.json": named}).encode(),
        ]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate one of the files, or several."""
        return mutation.mutate_json(rng, case, other, (), self._words)

    def run(self, case: bytes) -> None:
        """Load the tokenizer, encode and decode with it, and render a chat."""
        for old in self.path.iterdir():
            old.unlink()
        files = mutation.from_json(case)
        if not isinstance(files, dict):
            files = {"tokenizer.json": case.decode("utf-8", "replace")}
        for name, content in files.items():
            if name and len(name) < 64 and "/" not in name and "\0" not in name and name not in (".", ".."):
                text = content if isinstance(content, str) else json.dumps(content)
                (self.path / name.encode("utf-8", "replace").decode()).write_bytes(
                    text.encode("utf-8", "surrogatepass")
                )
        tokenizer = Tokenizer(self.path)
        find_tokenizer(self.path)
        ids = tokenizer.encode("ab a", add_special_tokens=True)
        tokenizer.decode(ids, skip_special_tokens=False)
        tokenizer.tokens([*ids, 10**6])
        detokenizer = tokenizer.detokenizer(ids)
        for token_id in ids:
            detokenizer.feed(token_id)
        detokenizer.flush()
        tokenizer.least_tokens("ab a", 1)
        if tokenizer.chat_template is not None:
            tokenizer.chat_template.render(_CHAT, {}, add_generation_prompt=True)
