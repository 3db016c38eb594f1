"""Byte-level BPE tokenizer: training, and the files for transformers' AutoTokenizer."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 2048
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT)
BOS_ID, EOS_ID, PAD_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(len(SPECIAL))
MAX_POSITIONS = 2048

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_SPLIT = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's split with single digits. A line break always ends a word, so lines can be encoded separately."""


def train(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer with VOCABULARY entries; special tokens have ids 0-5 and encode() prepends BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_folder(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config = {
        **names,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    special = {**names, "additional_special_tokens": [SYSTEM, USER, ASSISTANT]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of plain text, without BOS."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
