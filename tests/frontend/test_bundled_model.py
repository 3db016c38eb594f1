"""The frontend's half of the bundled model: its tokenizer, its end tokens, its chats."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import moonpool
from frontend.errors import InvalidRequest
from frontend.tokenizer import Tokenizer


@cache
def _bundled() -> Tokenizer:
    return Tokenizer(Path(moonpool.__file__).parent / "data" / "model")


@pytest.fixture
def bundled() -> Tokenizer:
    return _bundled()


def test_it_has_limits_and_end_tokens(bundled: Tokenizer) -> None:
    assert bundled.max_positions > 0
    assert bundled.eos_token_ids
    assert max(bundled.eos_token_ids) < bundled.vocab_size


@pytest.mark.parametrize("text", ["In the beginning", "naïve 你好 🎉👩‍👩‍👧", "\x00\t\n", "a  b   c "])
def test_text_streams_back_unchanged(bundled: Tokenizer, text: str) -> None:
    ids = bundled.encode(text, add_special_tokens=False)
    detokenizer = bundled.detokenizer([])
    assert "".join([*map(detokenizer.feed, ids), detokenizer.flush()]) == text


@given(st.text())
@example(" " * 500)
@example("=" * 500)
@example("<|assistant|>" * 40)
def test_no_text_has_fewer_tokens_than_it_must_have(text: str) -> None:
    tokenizer = _bundled()
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.least_tokens(text, 0) <= num_tokens
    assert tokenizer.least_tokens(text, num_tokens) <= num_tokens
    assert len(text.encode()) <= tokenizer.most_nbytes(num_tokens)
    assert tokenizer.least_tokens(text * 100, 0) >= len(text)  # 100 characters make no token


def test_chats_are_rendered_and_unknown_roles_refused(bundled: Tokenizer) -> None:
    template = bundled.chat_template
    assert template is not None
    text = template.render([{"role": "user", "content": "Who wrote it?"}], {}, add_generation_prompt=True)
    assert "Who wrote it?" in text
    special = bundled.encode(text, add_special_tokens=False)
    assert "Who wrote it?" in bundled.decode(special, skip_special_tokens=True)
    with pytest.raises(InvalidRequest, match="roles are"):
        template.render([{"role": "robot", "content": "hi"}], {}, add_generation_prompt=True)
