"""What the front door needs of a model's folder: tokenizer, end tokens, limits. No transformers, no weights."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import blake3
from tokenizers import Tokenizer as FastTokenizer

from frontend.chat_template import ChatTemplate
from frontend.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer, byte_level_token, piece_token
from frontend.errors import ModelFolderError

_MANY_TOKENS: Final = 1024


class Tokenizer:
    """Encodes, decodes and renders chats. Thread-safe; long texts are worked on without the GIL.

    That is done by the library's calls for batches, and only by those: with its others a prompt of 100,000 tokens
    would stop every thread for half a second.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelFolderError when the folder has no usable tokenizer.json or config.json."""
        if not path.is_dir():
            raise ModelFolderError(f"model folder {path} does not exist")
        raw = _read(path / "tokenizer.json")
        try:
            self._fast = FastTokenizer.from_buffer(raw)
        except Exception as error:  # the binding raises bare Exception
            raise ModelFolderError(f"{path / 'tokenizer.json'} is no tokenizer: {error}") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self.identity = blake3.blake3(raw).hexdigest()
        config = _read_json(path / "config.json")
        generation = _read_json(path / "generation_config.json", optional=True)
        settings = _read_json(path / "tokenizer_config.json", optional=True)
        self.vocab_size = _count(config, "vocab_size", path) or self._fast.get_vocab_size()
        self.max_positions = _count(config, "max_position_embeddings", path)
        self.eos_token_ids = self._eos_ids(config, generation, settings)
        self.chat_template = ChatTemplate.find(path, settings)
        added = self._fast.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        parts = json.loads(raw)
        self._is_byte_level = (parts.get("decoder") or {}).get("type") == "ByteLevel"
        self._longest = self._longest_token(parts)
        self.token_bytes = lru_cache(maxsize=None)(self._bytes_of)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The text's token ids."""
        ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, without the work of tokenising; 0 where nothing is known."""
        return -(-len(text) // self._longest) if self._longest else 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The ids' text; ids that the vocabulary lacks have none."""
        ids = list(token_ids)
        if len(ids) < _MANY_TOKENS:  # a batch costs more than it gives
            return str(self._fast.decode(ids, skip_special_tokens=skip_special_tokens))
        return str(self._fast.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])

    def spells(self, token_ids: Sequence[int], text: str) -> bool:
        """Whether the ids, special ones included, spell exactly `text`; for a decoder whose text depends on neighbours,
        what the text's own ids spell."""
        if self._is_byte_level:
            return b"".join(map(self.token_bytes, token_ids)) == text.encode()
        own = self.encode(text, add_special_tokens=False)
        return self.decode(token_ids, skip_special_tokens=False) == self.decode(own, skip_special_tokens=False)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The ids' vocabulary entries."""
        return [self._fast.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """Fresh state for text that follows `prompt_ids`; special tokens show their text only if not skipped."""
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        if self._is_byte_level:
            return ByteLevelDetokenizer(self.token_bytes, skipped)
        return WindowDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), skipped, prompt_ids
        )

    def _bytes_of(self, token_id: int) -> bytes:
        """A token's text by itself, in UTF-8; may be part of a character. b"" for an id of no token."""
        entry = self._fast.id_to_token(token_id) or ""
        if token_id in self._added_ids:
            return entry.encode()
        return byte_level_token(entry) if self._is_byte_level else piece_token(entry)

    def _longest_token(self, parts: dict[str, Any]) -> int:
        """The most characters of a text that one token can stand for; 0 where that has no bound."""
        takes_spaces = any(token.lstrip or token.rstrip for token in self._fast.get_added_tokens_decoder().values())
        drops_text = "Removed" in json.dumps(parts.get("pre_tokenizer"))
        if not self._is_byte_level or parts.get("normalizer") or takes_spaces or drops_text:
            return 0
        return max(map(len, self._fast.get_vocab(with_added_tokens=True)), default=0)

    def _eos_ids(self, *sources: dict[str, Any]) -> tuple[int, ...]:
        """All end tokens that the folder's files name: generation_config.json often knows more than config.json."""
        found: set[int] = set()
        for source in sources:
            value = source.get("eos_token_id")
            found.update(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
            text = source.get("eos_token")
            text = text.get("content") if isinstance(text, dict) else text
            if isinstance(text, str) and (token_id := self._fast.token_to_id(text)) is not None:
                found.add(token_id)
        return tuple(sorted(found))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelFolderError(f"cannot read {path}: {error.strerror or error}") from error


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise ModelFolderError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds no JSON object")
    return value


def _count(config: dict[str, Any], name: str, path: Path) -> int:
    value = config.get(name, 0)
    if type(value) is not int or value < 0:
        raise ModelFolderError(f"{name} in {path / 'config.json'} is {value!r}: expected a positive integer")
    return value
