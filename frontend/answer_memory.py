"""Memory of chat answers' token ids, so that a conversation's history keeps the ids it was generated with. Pure.

A client sends an answer back as text in the history of its next turn. Tokenising it again may give different ids, and
from there on no KV block of the conversation would be reused. The ids are therefore remembered under a digest of the
scope (model, tenant), the rendered chat up to the answer, and the answer's text: an answer is recalled only if the same
conversation led to the same text.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from frontend.tokenizer import REPLACEMENT, Detokenizer

_KEY_NBYTES: Final = 16
_ENTRY_NBYTES: Final = 256  # the interpreter's memory for an entry besides its ids


@dataclass(frozen=True)
class AnswerTokens:
    """Generated ids and the number of leading characters of the answer's text that they decode to."""

    token_ids: NDArray[np.int32]
    num_chars: int


class ChatDigest:
    """Incremental digest of a chat's text."""

    def __init__(self, secret: bytes, scope: Sequence[str]) -> None:
        """`secret` is 32 bytes. `scope` holds further strings that must be equal, such as model and tenant."""
        self._hash = blake3(key=secret)
        for part in scope:
            raw = _raw(part)
            self._hash.update(len(raw).to_bytes(8, "little") + raw)

    def extend(self, text: str) -> bytes:
        """Append `text`; return the digest of all text so far, 32 bytes."""
        return self._hash.update(_raw(text)).digest()


class AnswerMemory:
    """Least-recently-used memory of answers' ids, bounded in bytes. Thread-safe."""

    def __init__(self, max_nbytes: int) -> None:
        """Create a memory of at most `max_nbytes` bytes; 0 turns it off."""
        self._max_nbytes = max_nbytes
        self._answers: OrderedDict[bytes, AnswerTokens] = OrderedDict()
        self._nbytes = 0
        self._lock = Lock()

    @property
    def is_on(self) -> bool:
        """True if the memory can hold anything."""
        return self._max_nbytes > 0

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._nbytes

    def remember(self, place: bytes, text: str, answer: AnswerTokens) -> None:
        """Store the ids of the answer `text` given at `place`; a later answer with the same text replaces it."""
        key = _key(place, text)
        with self._lock:
            self._drop(key)
            self._answers[key] = answer
            self._nbytes += _nbytes(answer)
            while self._nbytes > self._max_nbytes:
                self._drop(next(iter(self._answers)))

    def recall(self, asked: Sequence[tuple[bytes, str]]) -> list[AnswerTokens | None]:
        """Return the remembered answer, or None, for each (place, text) of a conversation, in order.

        Early answers are marked as most recently used, because later ones are useless without them.
        """
        keys = [_key(place, text) for place, text in asked]
        with self._lock:
            for key in reversed(keys):
                if key in self._answers:
                    self._answers.move_to_end(key)
            return [self._answers.get(key) for key in keys]

    def _drop(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._nbytes -= _nbytes(answer)


def answer_tokens(token_ids: Sequence[int], text: str, detokenizer: Detokenizer) -> AnswerTokens:
    """Return the longest prefix of the ids that decodes to whole characters of `text` and nothing else.

    A stop string may have cut the last token's text, or a limit its last character. The prefix also ends before a token
    without text (a special token). `detokenizer` must be fresh.
    """
    num_ids = num_chars = at = 0
    for count, token_id in enumerate(token_ids, start=1):
        piece = detokenizer.feed(token_id)
        if REPLACEMENT in piece or not text.startswith(piece, at) or (not piece and detokenizer.is_whole):
            break
        at += len(piece)
        if detokenizer.is_whole:
            num_ids, num_chars = count, at
    return AnswerTokens(np.array(token_ids[:num_ids], np.int32), num_chars)


def _key(place: bytes, text: str) -> bytes:
    return blake3(_raw(text), key=place).digest(_KEY_NBYTES)


def _nbytes(answer: AnswerTokens) -> int:
    return _ENTRY_NBYTES + answer.token_ids.nbytes


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
