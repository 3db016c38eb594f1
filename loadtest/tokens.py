"""The model folder as the replay sees it: its tokenizer, whether prompts begin with BOS, its context length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loadtest.errors import TokenizerUnusable


@dataclass(frozen=True)
class ModelTokens:
    """A tokenizer with what is needed beside it. `bos`: the ids before a prompt's text, empty or one.
    `max_model_len`: of config.json, None where it does not say."""

    path: Path
    tokenizer: Any
    bos: tuple[int, ...]
    max_model_len: int | None

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def cut(self, text: str, num_tokens: int) -> str:
        """The beginning of a text that has `num_tokens` tokens, or the whole of one that has fewer."""
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= num_tokens else text[: offsets[num_tokens - 1][1]]


def load_model_tokens(model_path: Path, *, flag: str = "--model-path") -> ModelTokens:
    """Read a Hugging Face model folder's tokenizer. Raises TokenizerUnusable, naming `flag`."""
    file = model_path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerUnusable(f"no tokenizer at {file}; give the folder of the served model with {flag}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # `tokenizers` raises plain Exception
        raise TokenizerUnusable(f"{file} cannot be read as a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _json_object(model_path / "tokenizer_config.json")
    return ModelTokens(
        path=model_path,
        tokenizer=tokenizer,
        bos=_bos(tokenizer, settings),
        max_model_len=_context(_json_object(model_path / "config.json")),
    )


def _bos(tokenizer: Any, settings: dict[str, Any]) -> tuple[int, ...]:
    """The ids that the tokenizer puts before a text, by its own post-processor or by `add_bos_token`."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    marked = tokenizer.encode("a", add_special_tokens=True).ids
    if plain and plain[0] in marked and marked.index(plain[0]) > 0:
        return tuple(marked[: marked.index(plain[0])])
    if settings.get("add_bos_token"):
        token = settings.get("bos_token")
        token = token.get("content") if isinstance(token, dict) else token
        found = tokenizer.token_to_id(token) if isinstance(token, str) else None
        return () if found is None else (found,)
    return ()


def _context(config: dict[str, Any]) -> int | None:
    value = config.get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise TokenizerUnusable(f"{file} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
