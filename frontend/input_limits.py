"""Limits on the size of a model's inputs, derived from its context length and its tokenizer's longest token. Pure.

They bound the work and the memory that an input costs before its tokens are counted. No input that fits into the
context exceeds them; those of inputs that need not fit (texts to truncate or only to tokenise) are stated below.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from frontend.errors import BodyTooLarge, ContextLengthExceeded, InvalidRequest
from frontend.tokenizer import ORDINARY_NBYTES, Tokenizer, utf8_nbytes

_ESCAPED_NBYTES: Final = 12  # JSON's longest form of a character: two \uXXXX
_ID_NBYTES: Final = 12  # of a token id, with comma and space
_OTHER_NBYTES: Final = 1 << 20  # of a body: names of fields, tools, variables of a template
_CONTEXTS_TO_TOKENIZE: Final = 4
_CONTEXTS_TO_TRUNCATE: Final = 64
_MOST_TO_TRUNCATE_NBYTES: Final = 4 << 20
_LEAST_VALUES: Final = 128 << 10
_MOST_VALUES: Final = 1 << 20
_COUNTED_NBYTES: Final = 1 << 20


class InputLimits:
    """Limits of one model. While its context length is unknown, only the limit on all bodies applies."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: Callable[[], int],
        max_body_nbytes: int,
        endless_limit_tokens: int = 0,
    ) -> None:
        """`max_model_len` returns 0 while it is unknown. `endless_limit_tokens`: of requests with a rolling window."""
        self._endless_limit_tokens = endless_limit_tokens
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_body_nbytes = max_body_nbytes

    def text_body_nbytes(self) -> int:
        """Return the largest body of /tokenize."""
        text_nbytes = self._tokenizer.most_nbytes(self._max_model_len())
        return self._body(_ESCAPED_NBYTES * text_nbytes + _OTHER_NBYTES)

    def ids_body_nbytes(self) -> int:
        """Return the largest body of /detokenize."""
        return self._body(_ID_NBYTES * _CONTEXTS_TO_TOKENIZE * self._max_model_len() + _OTHER_NBYTES)

    def any_body_nbytes(self) -> int:
        """Return the largest body of all other endpoints."""
        return self._max_body_nbytes

    def body_values(self, max_prompts: int, *, takes_ids: bool) -> int:
        """Return the largest number of JSON values in a body: parsing many values holds the interpreter's lock.

        `takes_ids`: its prompt may be token ids, of an endless request also beyond the model's context length.
        """
        limit = self._max_model_len()
        endless = min(self._endless_limit_tokens, _MOST_VALUES) if takes_ids else 0
        return max(_LEAST_VALUES, min(max_prompts * limit, _MOST_VALUES), max(limit, endless) + _LEAST_VALUES)

    def check_tokenizable(self, text: str, param: str) -> None:
        """Raise ContextLengthExceeded for a text of /tokenize that is certainly longer than four contexts."""
        if limit := self._max_model_len():
            most = _CONTEXTS_TO_TOKENIZE * limit
            nbytes, most_nbytes = utf8_nbytes(text), self._tokenizer.most_nbytes(limit)
            if nbytes > most_nbytes or self._tokenizer.least_tokens(text, most) > most:
                raise ContextLengthExceeded(
                    f"{param} must have at most {most_nbytes} bytes and {most} tokens, {_CONTEXTS_TO_TOKENIZE} times "
                    f"the model's context length, got {nbytes} bytes: tokenize it in parts",
                    param=param,
                )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for more ids of /detokenize than four contexts have."""
        most = _CONTEXTS_TO_TOKENIZE * self._max_model_len()
        if most and len(ids) > most:
            raise InvalidRequest(
                f"{param} must have at most {most} token ids, {_CONTEXTS_TO_TOKENIZE} times the model's context "
                f"length, got {len(ids)}: detokenize them in parts",
                param=param,
            )

    @staticmethod
    def check_truncatable(texts: Sequence[str], param: str, limit: int) -> None:
        """Raise ContextLengthExceeded for a prompt that is too long even to be truncated to `limit` tokens; 0: unknown.

        It may have 64 times as many tokens of ordinary text and at most 4 MiB, but never less than `limit` tokens.
        """
        context_nbytes = ORDINARY_NBYTES * limit
        most = max(context_nbytes, min(_CONTEXTS_TO_TRUNCATE * context_nbytes, _MOST_TO_TRUNCATE_NBYTES))
        if most and (nbytes := sum(map(utf8_nbytes, texts))) > most:
            raise ContextLengthExceeded(
                f"{param} must have at most {most} bytes of text to be truncated to {limit} tokens, got "
                f"{nbytes}: send only the end of it",
                param=param,
            )

    def _body(self, nbytes: int) -> int:
        return min(nbytes, self._max_body_nbytes) if self._max_model_len() else self._max_body_nbytes


def check_values(body: bytes, most: int) -> None:
    """Raise BodyTooLarge for a JSON text of more than `most` values, without parsing it."""
    if body.count(b",") < most:
        return
    num_values = num_commas(body) + 1
    if num_values > most:
        raise BodyTooLarge(f"the body must have at most {most} JSON values, got {num_values} or more")


def num_commas(body: bytes) -> int:
    """Return the number of commas outside of strings in a JSON text."""
    plain = np.frombuffer(body.replace(rb"\\", b"__").replace(rb"\"", b"__"), np.uint8)
    count, is_inside = 0, False
    for start in range(0, len(plain), _COUNTED_NBYTES):
        piece = plain[start : start + _COUNTED_NBYTES]
        inside = np.logical_xor.accumulate(piece == ord('"')) ^ is_inside
        count += int(np.count_nonzero((piece == ord(",")) & ~inside))
        is_inside = bool(inside[-1])
    return count
