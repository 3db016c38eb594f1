"""What chats were answered: the ids behind each answer's text, found again by what stood before it. Pure.

A client sends an answer back as text, in the history of its next turn. Tokenised anew, it may become other ids than
were generated, and from there on no KV block of the conversation would be found again. So the ids are remembered, under
a digest of whose chat it was, of the rendered chat up to the answer, and of the answer's text: an answer is recalled
only where the very same conversation led to the very same words.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from frontend.detokenizer import REPLACEMENT, Detokenizer

_KEY_NBYTES: Final = 16
_ENTRY_NBYTES: Final = 256  # what the interpreter needs for an entry beside its ids


@dataclass(frozen=True)
class Spelled:
    """Generated ids, and how many leading characters of the answer's text they spell: all, or all up to a cut."""

    token_ids: NDArray[np.int32]
    num_chars: int


class Trail:
    """Digests of the beginnings of one chat's text, in one pass over it."""

    def __init__(self, secret: bytes, scope: Sequence[str]) -> None:
        """`secret`: 32 bytes. `scope`: what must be equal beside the text, such as model and tenant."""
        self._hash = blake3(key=secret)
        for part in scope:
            raw = _raw(part)
            self._hash.update(len(raw).to_bytes(8, "little") + raw)

    def extend(self, text: str) -> bytes:
        """Go on by `text`; the place that is reached, 32 bytes."""
        return self._hash.update(_raw(text)).digest()


class AnswerMemory:
    """Bounded in bytes; what was neither remembered nor recalled for the longest time goes first. Thread-safe."""

    def __init__(self, max_nbytes: int) -> None:
        """`max_nbytes` 0: nothing is remembered."""
        self._max_nbytes = max_nbytes
        self._answers: OrderedDict[bytes, Spelled] = OrderedDict()
        self._nbytes = 0
        self._lock = Lock()

    @property
    def is_on(self) -> bool:
        """Whether anything can be remembered."""
        return self._max_nbytes > 0

    @property
    def nbytes(self) -> int:
        """What is held now."""
        return self._nbytes

    def remember(self, place: bytes, text: str, answer: Spelled) -> None:
        """Keep the ids of an answer `text` that was given at `place`; of one text at one place, the last."""
        key = _key(place, text)
        with self._lock:
            self._drop(key)
            self._answers[key] = answer
            self._nbytes += _nbytes(answer)
            while self._nbytes > self._max_nbytes:
                self._drop(next(iter(self._answers)))

    def recall(self, asked: Sequence[tuple[bytes, str]]) -> list[Spelled | None]:
        """The answers to one conversation's (place, text), in its order.

        Its first ones count as used last: without them the later ones are of no use.
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


def spelled(token_ids: Sequence[int], text: str, detokenizer: Detokenizer) -> Spelled:
    """The most leading ids that spell whole characters of `text` and nothing else.

    A stop string may have cut the last token's text, a limit its last character; a token without text (a special one)
    in the midst of an answer must not come back. `detokenizer` must be fresh.
    """
    num_ids = num_chars = at = 0
    for count, token_id in enumerate(token_ids, start=1):
        piece = detokenizer.feed(token_id)
        if REPLACEMENT in piece or not text.startswith(piece, at) or (not piece and detokenizer.is_whole):
            break
        at += len(piece)
        if detokenizer.is_whole:
            num_ids, num_chars = count, at
    return Spelled(np.array(token_ids[:num_ids], np.int32), num_chars)


def _key(place: bytes, text: str) -> bytes:
    return blake3(_raw(text), key=place).digest(_KEY_NBYTES)


def _nbytes(answer: Spelled) -> int:
    return _ENTRY_NBYTES + answer.token_ids.nbytes


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
