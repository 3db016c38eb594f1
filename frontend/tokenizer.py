"""Tokenizer of a model folder, with end tokens and limits, and incremental detokenisation to whole characters.

Detokenisation depends on the tokenizer's decoder. A byte-level tokenizer's tokens are byte strings, which are decoded
as UTF-8. Other tokenizers decode a window of recent tokens and release text once it no longer ends in an incomplete
character (the method of Hugging Face's text-generation-inference and vLLM).
"""

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

import blake3
from tokenizers import Tokenizer as FastTokenizer

from frontend.chat_rendering import ChatTemplate
from frontend.errors import InvalidRequest, ModelFilesError

REPLACEMENT: Final = "�"
CONTEXT_TOKENS: Final = 16  # at the prompt's end; they decide whether the first token's leading space is kept
_MAX_UTF8_NBYTES: Final = 4
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """Incremental detokeniser of one choice."""

    @property
    def is_whole(self) -> bool:
        """True if the text of all tokens so far was returned."""

    def feed(self, token_id: int) -> str:
        """Take one token; return the characters that are now complete, possibly none."""

    def flush(self) -> str:
        """Return the remaining text after the last token; an incomplete character becomes U+FFFD."""


class ByteLevelDetokenizer:
    """UTF-8 decoder over the tokens' bytes; ids in `skipped` have no text."""

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: Collection[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_whole(self) -> bool:
        return not self._decoder.getstate()[0]

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokeniser that decodes the last few tokens again with each new one; for decoders that depend on neighbours.

    `decode` returns the text of consecutive ids; ids in `skipped` have no text and are ignored.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], skipped: Collection[int], prompt_ids: Sequence[int]
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        context = [token_id for token_id in prompt_ids[-CONTEXT_TOKENS:] if token_id not in skipped]
        # An incomplete character at the window's start would corrupt the bytes that follow it.
        starts = range(len(context) + 1)
        self._window = next(context[start:] for start in starts if REPLACEMENT not in decode(context[start:]))
        self._num_returned = len(self._window)  # leading tokens of the window whose text was returned

    @property
    def is_whole(self) -> bool:
        return self._num_returned == len(self._window)

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        before, text = self._decode(self._window[: self._num_returned]), self._decode(self._window)
        num_pending = len(self._window) - self._num_returned
        # More pending tokens than any character has bytes are invalid UTF-8, and waiting would never end.
        if len(text) <= len(before) or (text.endswith(REPLACEMENT) and num_pending < _MAX_UTF8_NBYTES):
            return ""
        self._window = self._window[self._num_returned :]
        self._num_returned = len(self._window)
        return text[len(before) :]

    def flush(self) -> str:
        before, text = self._decode(self._window[: self._num_returned]), self._decode(self._window)
        self._num_returned = len(self._window)
        return text[len(before) :]


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary (the inverse of GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(rest)})
    return alphabet


def byte_level_token(token: str) -> bytes:
    """Return a byte-level vocabulary entry's bytes; an added token outside the alphabet has its own text."""
    alphabet = byte_alphabet()
    try:
        return bytes(alphabet[char] for char in token)
    except KeyError:
        return token.encode()


def piece_token(token: str) -> bytes:
    """Return a SentencePiece vocabulary entry's bytes: ▁ is a space, <0x0A> a byte."""
    if byte := _BYTE_PIECE.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace("▁", " ").encode()


def utf8_nbytes(text: str) -> int:
    """Return the size of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


_MANY_TOKENS: Final = 1024
ORDINARY_NBYTES: Final = 8  # per token; most texts have fewer
_DROPPED: Final = 4
_PIECE_CHARS: Final = 64 << 10


class Tokenizer:
    """Tokenizer, vocabulary and chat template of one model. Thread-safe; long texts are processed without the GIL.

    Only the library's batch calls release the GIL. With its other calls, a prompt of 100,000 tokens would block every
    thread for half a second.
    """

    def __init__(self, path: Path) -> None:
        """Load the folder. Raises ModelFilesError if it has no usable tokenizer.json or config.json."""
        if not path.is_dir():
            raise ModelFilesError(f"model folder {path} does not exist")
        raw = _read(path / "tokenizer.json")
        try:
            self._fast = FastTokenizer.from_buffer(raw)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the binding raises bare Exception, and for panics a BaseException
            raise ModelFilesError(f"{path / 'tokenizer.json'} is not a valid tokenizer: {error}") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self.identity = blake3.blake3(raw).hexdigest()
        config = _read_json(path / "config.json")
        generation = _read_json(path / "generation_config.json", optional=True)
        settings = _read_json(path / "tokenizer_config.json", optional=True)
        self.vocab_size = _count(config, "vocab_size", path) or self._fast.get_vocab_size()
        self.max_positions = _count(config, "max_position_embeddings", path)
        self.may_have_windows = bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False
        self.eos_token_ids = self._eos_ids(config, generation, settings)
        self.chat_template = ChatTemplate.find(path, settings)
        added = self._fast.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        parts = _read_json(path / "tokenizer.json")
        decoder = parts.get("decoder")
        self._is_byte_level = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
        self._keeps_bytes = self._is_exact(parts)
        # A character of a byte-level vocabulary's entry is a byte; those of added tokens and of others are text.
        vocabulary = self._fast.get_vocab(with_added_tokens=True).items()
        self._longest_nbytes = max(
            1,
            *(
                len(token) if self._is_byte_level and token_id not in self._added_ids else utf8_nbytes(token)
                for token, token_id in vocabulary
            ),
        )
        self.token_bytes = lru_cache(maxsize=None)(self._bytes_of)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the text's token ids. Raises InvalidRequest for a text that the vocabulary cannot express."""
        try:
            ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except Exception as error:  # the binding raises no other class
            raise InvalidRequest(f"the model's tokenizer cannot encode this text: {error}") from error
        return ids

    def most_nbytes(self, num_tokens: int) -> int:
        """Return the size of the longest text, in UTF-8, that can have `num_tokens` tokens.

        It is exact for byte-level tokenizers. Others may drop any part of a text: for them it is four times as much.
        """
        return num_tokens * self._longest_nbytes * (1 if self._keeps_bytes else _DROPPED)

    def least_tokens(self, text: str, enough: int) -> int:
        """Return a lower bound on the text's number of tokens, which costs at most the tokenising of `enough` tokens.

        A bound above `enough` comes from the text's size or, for a text of uncommonly many bytes for `enough` tokens,
        from a tokenised part of it: as that is cut at other places than tokens end, a quarter is subtracted.
        """
        nbytes = utf8_nbytes(text)
        bound = -(-nbytes // self.most_nbytes(1))
        if bound > enough or nbytes <= ORDINARY_NBYTES * enough:
            return bound
        counted = 0
        for start in range(0, len(text), _PIECE_CHARS):
            counted += len(self.encode(text[start : start + _PIECE_CHARS], add_special_tokens=False))
            if counted * 3 // 4 > enough:
                return counted * 3 // 4
        return bound

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the ids' text; ids outside the vocabulary have none."""
        ids = list(token_ids)
        if len(ids) < _MANY_TOKENS:  # a batch call would cost more than it saves
            return str(self._fast.decode(ids, skip_special_tokens=skip_special_tokens))
        return str(self._fast.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])

    def spells(self, token_ids: Sequence[int], text: str) -> bool:
        """Return True if the ids, including special ones, decode to exactly `text`.

        For a decoder that depends on neighbours, they must decode to the same text as the text's own ids.
        """
        if self._is_byte_level:
            return b"".join(map(self.token_bytes, token_ids)) == text.encode()
        own = self.encode(text, add_special_tokens=False)
        return self.decode(token_ids, skip_special_tokens=False) == self.decode(own, skip_special_tokens=False)

    def num_within(self, token_ids: Sequence[int], start: str) -> int:
        """Return the number of leading ids whose text lies within `start`, with which the text of all ids begins.

        A special token before it, which the tokenizer adds itself, counts, too. For a decoder that depends on
        neighbours, the number is an estimate: one less than `start` alone has.
        """
        if not start:
            return 0
        if not self._is_byte_level:
            return max(0, len(self.encode(start, add_special_tokens=False)) - 1)
        left = start.encode()
        left_nbytes = len(left)
        for count, token_id in enumerate(token_ids):
            text = self.token_bytes(token_id)
            if count == 0 and token_id in self._special_ids and not left.startswith(text):
                continue
            left_nbytes -= len(text)
            if left_nbytes < 0:
                return count
        return len(token_ids)

    def added_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of those texts that are tokens added to the vocabulary, special or not."""
        ids = ((text, self._fast.token_to_id(text)) for text in texts)
        return {text: token_id for text, token_id in ids if token_id in self._added_ids}

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return the ids' vocabulary entries."""
        return [self._fast.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True, shown_ids: Collection[int] = ()
    ) -> Detokenizer:
        """Return a fresh detokeniser for text that follows `prompt_ids`; of special tokens, it shows `shown_ids`."""
        skipped = self._special_ids.difference(shown_ids) if skip_special_tokens else frozenset[int]()
        if self._is_byte_level:
            return ByteLevelDetokenizer(self.token_bytes, skipped)
        return WindowDetokenizer(
            # Skipped ids are never decoded.
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens and not shown_ids),
            skipped,
            prompt_ids,
        )

    def _bytes_of(self, token_id: int) -> bytes:
        """Return a single token's text in UTF-8, possibly part of a character; b"" for an id outside the vocabulary."""
        entry = self._fast.id_to_token(token_id) or ""
        if token_id in self._added_ids:
            return entry.encode()
        return byte_level_token(entry) if self._is_byte_level else piece_token(entry)

    def _is_exact(self, parts: dict[str, Any]) -> bool:
        """Return True if each byte of a text is in one token."""
        takes_spaces = any(token.lstrip or token.rstrip for token in self._fast.get_added_tokens_decoder().values())
        drops_text = "Removed" in json.dumps(parts.get("pre_tokenizer"))
        return self._is_byte_level and not (parts.get("normalizer") or takes_spaces or drops_text)

    def _eos_ids(self, *sources: dict[str, Any]) -> tuple[int, ...]:
        """Return all end tokens in the folder's files; generation_config.json often has more than config.json."""
        found: set[int] = set()
        for source in sources:
            value = source.get("eos_token_id")
            found.update(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
            text = source.get("eos_token")
            text = text.get("content") if isinstance(text, dict) else text
            # JSON can hold half of a surrogate pair, which is no text.
            if isinstance(text, str) and _is_text(text) and (token_id := self._fast.token_to_id(text)) is not None:
                found.add(token_id)
        return tuple(sorted(found))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelFilesError(f"cannot read {path}: {error.strerror or error}") from error


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} must contain a JSON object")
    return value


def _count(config: dict[str, Any], name: str, path: Path) -> int:
    value = config.get(name, 0)
    if type(value) is not int or value < 0:
        raise ModelFilesError(f"{name} in {path / 'config.json'} must be a positive integer, got {value!r}")
    return value
