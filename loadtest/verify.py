"""Verification of answers: re-scoring by teacher forcing, or exact comparison for paced engines.

For every output position, the sampler's noise for the request's seed is added to the reference model's logits (dense,
no cache) after the prompt and the answer so far. The sampler chooses the token with the largest noisy score. A token is
*wrong* if its noisy score is below the largest by more than the tolerance, and a *near-tie* if it is below by less. The
tolerance is needed because floating-point results differ between batch shapes. The tokens of a paced engine are known
exactly and need no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loadtest.errors import VerificationError
from loadtest.record import RequestRecord, SendOutcome
from loadtest.server import ServerInfo
from loadtest.tokens import TokenIds

if TYPE_CHECKING:
    from engine import SamplingRow


PACED = "paced:"


class PacedReference:
    """Reference for paced engines. Does not import torch."""

    def __init__(self, model_path: Path) -> None:
        """Read the model's configuration. Raises VerificationError."""
        from engine import EngineError
        from engine.config import read_config
        from worker.paced.tokens import PacedTokens

        try:
            config = read_config(model_path)
        except EngineError as error:
            raise VerificationError(f"cannot verify: {error}") from error
        self._ends = frozenset(config.eos_token_ids)
        self._tokens = PacedTokens.of(model_path, config, 0)

    def judged(self, prompt: TokenIds, record: RequestRecord) -> list[tuple[int, float]]:
        """Return (expected token, margin) per token of the answer; the margin is 0 or infinite.

        An end-of-sequence token at the end counts as correct, because its position is a setting of the server.
        """
        from worker.paced.tokens import Draw

        found = record.token_ids
        expected = self._tokens.answer(prompt, Draw(record.seed, record.temperature, 0), len(found))
        if found[-1] in self._ends:
            expected[-1] = found[-1]
        return [(right, 0.0 if token == right else float("inf")) for right, token in zip(expected, found, strict=True)]


def paced_notice(stand_ins: tuple[str, ...]) -> list[str]:
    """Return the report's notices for a server with paced engines."""
    if not stand_ins:
        return []
    named = ", ".join(stand_ins)
    return [f"the server's engine is a stand-in ({named}): it computes nothing, and its step times come from a profile"]


# The engine is imported in functions, because importing torch takes seconds and is needed only for verification.
TOLERANCE = 1e-3
_SHOWN_WRONG = 20


class Scorer(Protocol):
    """Interface of the reference model (`engine.Model`).

    `fingerprint`: hex, of the weights and the kind of computation.
    """

    fingerprint: str

    def score(self, token_ids: TokenIds) -> NDArray[np.float32]:
        """Return the logits of every position, float32 [n, vocab]."""


Reference: TypeAlias = Scorer | PacedReference


@dataclass(frozen=True)
class WrongToken:
    """Token that the reference would not have produced. `margin`: difference of its score to the largest."""

    request: int
    position: int
    token: int
    expected: int
    margin: float


@dataclass
class Verification:
    """Results of the verification."""

    tolerance: float = TOLERANCE
    verified_requests: int = 0
    verified_tokens: int = 0
    requests_with_reuse: int = 0
    sampled_requests: int = 0
    wrong_tokens: int = 0
    near_ties: int = 0
    largest_margin: float = 0.0
    wrong: list[WrongToken] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the results for report.json. All wrong tokens are counted, the first 20 are listed."""
        return asdict(self)


def choose_sample(records: Sequence[RequestRecord], size: int, *, seed: int) -> list[RequestRecord]:
    """Return at most `size` completed requests in order of index, chosen by a hash of (seed, index).

    The sample is stratified: requests are taken round-robin from greedy and sampled requests with no, little and much
    reuse, so that rare kinds are represented.
    """
    strata: dict[tuple[int, bool], list[RequestRecord]] = {}
    for record in sorted(records, key=lambda r: _rank(seed, r.index)):
        if record.outcome is SendOutcome.COMPLETED:
            strata.setdefault((_reuse_class(record), record.temperature > 0), []).append(record)
    chosen: list[RequestRecord] = []
    queues = [strata[key] for key in sorted(strata, reverse=True)]
    while len(chosen) < size and any(queues):
        for queue in queues:
            if queue and len(chosen) < size:
                chosen.append(queue.pop(0))
    return sorted(chosen, key=lambda r: r.index)


def load_reference(server: ServerInfo, model_path: Path, *, device: str, threads: int | None) -> Reference:
    """Load the reference for the served model in this process; blocks while loading.

    Raises VerificationError if the engine is not installed, the reference cannot be loaded, or the server is known to
    have different weights.
    """
    if find_spec("engine") is None:
        raise VerificationError(
            "cannot verify: the engine is not installed; install moonpool in place of moonpool-client, or omit --verify"
        )
    if any(each.startswith(PACED) for each in server.stand_ins):
        return PacedReference(model_path)
    from engine import EngineError, load_model

    try:
        kv_scale_group = server.kv_scale_group or None
        reference = load_model(model_path, device=device, threads=threads, kv_scale_group=kv_scale_group)
    except EngineError as error:
        raise VerificationError(f"cannot verify: the model at {model_path} cannot be loaded: {error}") from error
    if server.fingerprint and server.fingerprint != reference.fingerprint:
        raise VerificationError(
            f"cannot verify: the server's {server.model!r} has fingerprint {server.fingerprint}, but the model in "
            f"{model_path} has {reference.fingerprint}; give the served model's folder with --model-path"
        )
    return reference


def verify_records(
    reference: Reference,
    records: Iterable[RequestRecord],
    prompts: Mapping[int, TokenIds],
    result: Verification,
    on_done: Callable[[int], None] = lambda done: None,
) -> Verification:
    """Re-score the answers and add them to `result`, which stays consistent if interrupted.

    `prompts`: token ids by request index. Raises VerificationError for an answer without token ids.
    """
    for record in records:
        if not record.token_ids:
            raise VerificationError(
                "cannot verify: the answers have no token_ids; the server must support `return_token_ids`"
            )
        _verify_one(reference, record, prompts[record.index], result)
        on_done(result.verified_requests)
    return result


def _verify_one(reference: Reference, record: RequestRecord, prompt: TokenIds, result: Verification) -> None:
    if isinstance(reference, PacedReference):
        judged = reference.judged(prompt, record)
    else:
        judged = _judged(reference, prompt, record)
    for position, (token, (expected, margin)) in enumerate(zip(record.token_ids, judged, strict=True)):
        result.verified_tokens += 1
        result.largest_margin = max(result.largest_margin, margin)
        if not margin <= result.tolerance:  # so that a NaN margin counts as wrong
            result.wrong_tokens += 1
            if len(result.wrong) < _SHOWN_WRONG:
                result.wrong.append(WrongToken(record.index, position, token, expected, margin))
        elif token != expected:
            result.near_ties += 1
    result.verified_requests += 1
    result.requests_with_reuse += record.cached_tokens > 0
    result.sampled_requests += record.temperature > 0


def _judged(reference: Scorer, prompt: TokenIds, record: RequestRecord) -> list[tuple[int, float]]:
    answer = np.array(record.token_ids, np.int32)
    # The last token is scored, but is not part of the input.
    logits = reference.score(np.concatenate([prompt, answer[:-1]]))[len(prompt) - 1 :]
    if len(logits) != len(answer):
        raise VerificationError(f"the reference returned {len(logits)} rows of scores for {len(answer)} tokens")
    return [judge(logits[i], token, sampling_row(record, i)) for i, token in enumerate(record.token_ids)]


def sampling_row(record: RequestRecord, position: int) -> SamplingRow:
    """Return the sampler's input at that output position."""
    from engine import SamplingRow

    return SamplingRow(temperature=record.temperature, top_p=1.0, top_k=0, seed=record.seed, choice=0, index=position)


def judge(logits: NDArray[np.float32], token: int, row: SamplingRow) -> tuple[int, float]:
    """Return (token with the largest noisy score, margin of `token` below it); infinite if `token` is out of range."""
    from engine import noisy_scores

    scores = np.asarray(noisy_scores(logits, row))
    expected = int(scores.argmax())
    if not 0 <= token < len(scores):
        return expected, float("inf")
    return expected, float(scores[expected] - scores[token])


def _reuse_class(record: RequestRecord) -> int:
    """Return 0 without reuse, 1 if at most half of the prompt was reused, else 2."""
    return (record.cached_tokens > 0) + (2 * record.cached_tokens > record.prompt_tokens)


def _rank(seed: int, index: int) -> bytes:
    return hashlib.blake2b(f"{seed}:verify:{index}".encode(), digest_size=16).digest()
