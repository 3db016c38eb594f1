"""From token ids to text, a token at a time: what comes out is always whole characters. Pure.

Two ways, chosen by the tokenizer's decoder. A byte-level tokenizer's tokens are byte strings, so UTF-8 is decoded over
them. Any other is decoded over a window of recent tokens, and text is let out when it no longer ends in a half
character (the method of Hugging Face's text-generation-inference and vLLM).
"""

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Final, Protocol

REPLACEMENT: Final = "�"
CONTEXT_TOKENS: Final = 16  # of the prompt's end: decides whether the first token's leading space is kept
_MAX_UTF8_NBYTES: Final = 4
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """State of one choice's text."""

    @property
    def is_whole(self) -> bool:
        """Whether the text of all tokens so far is out."""

    def feed(self, token_id: int) -> str:
        """The characters that are complete now; may be empty."""

    def flush(self) -> str:
        """What is left when no more tokens come; an incomplete character shows as U+FFFD."""


class ByteLevelDetokenizer:
    """UTF-8 over the tokens' bytes; those in `skipped` have no text."""

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
    """Decodes the last few tokens again with each new one, for decoders whose text depends on neighbours.

    `decode` gives the text of a run of ids; ids in `skipped` have no text and are not looked at.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], skipped: Collection[int], prompt_ids: Sequence[int]
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        context = [token_id for token_id in prompt_ids[-CONTEXT_TOKENS:] if token_id not in skipped]
        # Half a character at the window's start would spoil the run of bytes that follows it.
        starts = range(len(context) + 1)
        self._window = next(context[start:] for start in starts if REPLACEMENT not in decode(context[start:]))
        self._num_told = len(self._window)  # leading tokens of the window whose text is out

    @property
    def is_whole(self) -> bool:
        return self._num_told == len(self._window)

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        told, text = self._decode(self._window[: self._num_told]), self._decode(self._window)
        num_pending = len(self._window) - self._num_told
        # A run longer than any character is no half character: it is invalid, and waiting would never end.
        if len(text) <= len(told) or (text.endswith(REPLACEMENT) and num_pending < _MAX_UTF8_NBYTES):
            return ""
        self._window = self._window[self._num_told :]
        self._num_told = len(self._window)
        return text[len(told) :]

    def flush(self) -> str:
        told, text = self._decode(self._window[: self._num_told]), self._decode(self._window)
        self._num_told = len(self._window)
        return text[len(told) :]


@cache
def byte_alphabet() -> dict[str, int]:
    """The byte that each character stands for in a byte-level vocabulary (GPT-2's bytes_to_unicode, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(rest)})
    return alphabet


def byte_level_token(token: str) -> bytes:
    """A vocabulary entry's bytes; an added token outside the alphabet stands for its own text."""
    alphabet = byte_alphabet()
    try:
        return bytes(alphabet[char] for char in token)
    except KeyError:
        return token.encode()


def piece_token(token: str) -> bytes:
    """A SentencePiece vocabulary entry's bytes: ▁ is a space, <0x0A> a byte."""
    if byte := _BYTE_PIECE.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace("▁", " ").encode()
