"""Incremental detokenisation: whole characters only, and together exactly the tokenizer's own text."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers

from frontend.tokenizer import REPLACEMENT, Tokenizer, byte_alphabet, byte_level_token, piece_token

TEXT = st.text(st.sampled_from("ab é🎉😀👩‍👩‍👧你好界ﷺ\n\x00ß𝄞"), max_size=40)
FAST = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def spm_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A Llama-2-like tokenizer: ▁ for spaces, bytes as tokens of their own, the first space stripped."""
    path = tmp_path_factory.mktemp("spm")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abé", "▁a", "▁ab", "ab"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "a"), ("▁a", "b"), ("a", "b")]
    fast = FastTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(["<s>", "</s>"])
    fast.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"vocab_size": len(tokens)}))
    return Tokenizer(path)


def pieces_of(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt or [])
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


@FAST
@given(TEXT)
@example("🎉")
@example("👩‍👩‍👧")
def test_byte_level_text_comes_back_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    pieces = pieces_of(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert REPLACEMENT not in "".join(pieces)
    assert pieces[-1] == ""


@FAST
@given(st.lists(st.integers(0, 345), max_size=30))
def test_any_byte_level_tokens_give_the_tokenizers_own_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@FAST
@given(TEXT, TEXT)
@example("ß\n\u200d\u200d𝄞𝄞", "\n")  # the window of prompt tokens begins inside a character
def test_windowed_text_follows_its_prompt(spm_tokenizer: Tokenizer, prompt: str, text: str) -> None:
    prompt_ids = spm_tokenizer.encode("a" + prompt, add_special_tokens=False)
    whole = spm_tokenizer.encode("a" + prompt + text, add_special_tokens=False)
    if whole[: len(prompt_ids)] != prompt_ids:
        return  # the border fell inside a token
    pieces = pieces_of(spm_tokenizer, whole[len(prompt_ids) :], prompt_ids)
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces)


def test_windowed_first_space_is_kept_after_a_prompt_and_dropped_without(spm_tokenizer: Tokenizer) -> None:
    ids = spm_tokenizer.encode("ab", add_special_tokens=False)
    assert "".join(pieces_of(spm_tokenizer, ids, ids)) == " ab"
    assert "".join(pieces_of(spm_tokenizer, ids)) == "ab"


def test_half_a_character_shows_as_replacement_only_at_the_end(tokenizer: Tokenizer, spm_tokenizer: Tokenizer) -> None:
    for each in (tokenizer, spm_tokenizer):
        ids = each.encode("a😀", add_special_tokens=False)[:-1]
        *pieces, last = pieces_of(each, ids)
        assert REPLACEMENT not in "".join(pieces)
        assert set(last) == {REPLACEMENT}


def test_a_run_of_invalid_bytes_does_not_wait_for_ever(spm_tokenizer: Tokenizer) -> None:
    detokenizer = spm_tokenizer.detokenizer([])
    out = "".join(detokenizer.feed(3 + 0xFF) for _ in range(64))
    assert len(out) >= 60


def test_special_tokens_have_no_text(tokenizer: Tokenizer, spm_tokenizer: Tokenizer) -> None:
    for each, special in ((tokenizer, 3), (spm_tokenizer, 2)):
        ids = each.encode("ab", add_special_tokens=False)
        assert "".join(pieces_of(each, [special, *ids, special])) == "ab"


def test_byte_alphabet_is_a_bijection() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert byte_level_token("Ġa") == b" a"
    assert byte_level_token("<a b>") == b"<a b>"


def test_identity_follows_the_tokenizers_content(tmp_path: Path, model_path: Path, tokenizer: Tokenizer) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((model_path / name).read_bytes())
    assert Tokenizer(tmp_path).identity == tokenizer.identity
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert Tokenizer(tmp_path).identity != tokenizer.identity


@pytest.mark.parametrize(
    ("piece", "data"),
    [("▁the", b" the"), ("<0x0A>", b"\n"), ("<0xf0>", b"\xf0"), ("<0x1F600>", b"<0x1F600>"), ("é", "é".encode())],
)
def test_a_sentencepiece_entry_is_told_as_its_bytes(piece: str, data: bytes) -> None:
    assert piece_token(piece) == data


def test_a_tokens_bytes_are_told_whether_or_not_its_text_is_shown(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(3) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""
    ids = [*tokenizer.encode("naïve 🎉", add_special_tokens=False), 3]
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "naïve 🎉<|im_end|>"
    for skip, text in ((True, "naïve 🎉"), (False, "naïve 🎉<|im_end|>")):
        detokenizer = tokenizer.detokenizer([], skip_special_tokens=skip)
        assert "".join(map(detokenizer.feed, ids)) + detokenizer.flush() == text
