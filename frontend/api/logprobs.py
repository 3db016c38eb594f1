"""How log-probabilities look on the wire: OpenAI's for completions and for chats, and vLLM's of the prompt. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from frontend.logprobs import Candidate, Scored

_FLOOR: Final = -9999.0  # JSON has no minus infinity; vLLM's stand-in


def of_completion(scores: Sequence[Scored], num_top: int, *, as_ids: bool) -> dict[str, list[Any]]:
    """Parallel lists; the first token of a prompt has null in two of them."""
    return {
        "tokens": [_name(score.token_id, score.data, as_ids, "bytes:") for score in scores],
        "token_logprobs": [None if score.own is None else _finite(score.own) for score in scores],
        "top_logprobs": [None if score.own is None else _by_name(score, num_top, as_ids) for score in scores],
        "text_offset": [score.text_offset for score in scores],
    }


def of_chat(scores: Iterable[Scored], num_top: int, *, as_ids: bool) -> dict[str, Any]:
    """An entry per token."""
    content = [
        _entry(score.own, as_ids) | {"top_logprobs": [_entry(candidate, as_ids) for candidate in score.top[:num_top]]}
        for score in scores
        if score.own is not None
    ]
    return {"content": content, "refusal": None}


def of_prompt(scores: Iterable[Scored], num_top: int, *, as_ids: bool) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: by token id; null for the first token."""
    return [
        None
        if score.own is None
        else {
            str(candidate.token_id): {
                "logprob": _finite(candidate),
                "rank": candidate.rank,
                "decoded_token": _name(candidate.token_id, candidate.data, as_ids, ""),
            }
            for candidate in _first(score, num_top)
        }
        for score in scores
    ]


def _first(score: Scored, num_top: int) -> tuple[Candidate, ...]:
    """The likeliest `num_top`, and the token itself if it is none of them."""
    top = score.top[:num_top]
    if score.own is None or any(candidate.token_id == score.token_id for candidate in top):
        return top
    return (*top, score.own)


def _by_name(score: Scored, num_top: int, as_ids: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    for candidate in _first(score, num_top):
        # Two ids may have one text: the likelier one is told.
        found.setdefault(_name(candidate.token_id, candidate.data, as_ids, "bytes:"), _finite(candidate))
    return found


def _entry(candidate: Candidate, as_ids: bool) -> dict[str, Any]:
    name = _name(candidate.token_id, candidate.data, as_ids, "")
    return {"token": name, "logprob": _finite(candidate), "bytes": list(candidate.data)}


def _finite(candidate: Candidate) -> float:
    return candidate.logprob if candidate.logprob > _FLOOR else _FLOOR  # so no NaN either


def _name(token_id: int, data: bytes, as_ids: bool, prefix: str) -> str:
    """A token's text; of one that is part of a character the bytes, as OpenAI writes them: \\xf0\\x9f."""
    if as_ids:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)
