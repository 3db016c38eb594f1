"""Verification of every answer of a run: tokens by teacher forcing, structure, finish reasons and usage.

Tokens that broken attempts brought are verified like complete answers. A token of the real engine is wrong if its score
is below the best by more than `loadtest.verify.TOLERANCE`; a token of the paced engine is wrong if it is not the one
that follows from the ids before it. Grammars of requests are applied to the scores first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from engine import LogitSteering, SamplingRow, find_tokenizer, load_model, noisy_scores
from engine.config import ModelConfig, read_config
from frontend.api.request_models import ChatBody
from frontend.grammars import requested_grammar
from loadtest.verify import TOLERANCE
from tools.chaos.requests import PARAMETERS, SCHEMA, Choice, ClientRequest, Form, Received
from worker.errors import GrammarError
from worker.grammar import LIMITS, shortened, to_llguidance
from worker.grammar_matching import Bools, GrammarVocabulary
from worker.paced.tokens import Draw, PacedTokens, states_after

SHOWN = 40


class Reference(Protocol):
    """Judge of one model's tokens."""

    def wrong_tokens(self, prompt_ids: Sequence[int], choice: Choice, asked: Asked) -> list[int]:
        """Return the indices of wrong tokens."""


@dataclass(frozen=True)
class Asked:
    """Parameters of one answer that determine its tokens. `matcher` is at the beginning of the answer."""

    seed: int
    temperature: float
    index: int
    matcher: AnswerMatcher | None


class AnswerMatcher:
    """Position of one answer in its grammar, compiled in this process."""

    def __init__(self, inner: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self._inner, self._vocabulary = inner, vocabulary
        self.is_over = False  # an end token has been taken

    def allowed(self) -> Bools:
        """Return bool [V]: the ids that may come next. Raises GrammarError."""
        packed = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        self._raise_if_failed()
        return np.unpackbits(packed, count=self._vocabulary.size, bitorder="little").view(np.bool_)

    def take(self, token: int) -> None:
        """Advance by one token. Raises GrammarError for a token that is not allowed."""
        self._inner.consume_token(token)
        self._raise_if_failed()
        self.is_over = token in self._vocabulary.end_ids

    def _raise_if_failed(self) -> None:
        if self._inner.is_error():
            raise GrammarError(shortened(self._inner.get_error()))


class RealReference:
    """The model in this process, without cache or cluster."""

    def __init__(self, folder: Path) -> None:
        self._model = load_model(folder, threads=1)

    def wrong_tokens(self, prompt_ids: Sequence[int], choice: Choice, asked: Asked) -> list[int]:
        """Return the indices of tokens that lie more than the tolerance below the best."""
        tokens = choice.token_ids
        logits = self._model.score(np.array([*prompt_ids, *tokens], np.int32))[len(prompt_ids) - 1 :]
        wrong = []
        for index, token in enumerate(tokens):
            row = SamplingRow(asked.temperature, 1.0, 0, asked.seed, asked.index, index)
            scores = np.asarray(noisy_scores(logits[index], row))
            if asked.matcher is not None:
                scores = np.where(asked.matcher.allowed()[: len(scores)], scores, -np.inf)
                asked.matcher.take(token)
            if not (0 <= token < len(scores) and scores[token] >= scores.max() - TOLERANCE):
                wrong.append(index)
        return wrong


class ExactReference:
    """The rule by which the paced engine chooses tokens."""

    def __init__(self, folder: Path, answer_tokens: int) -> None:
        config = read_config(folder)
        self._tokens = PacedTokens.of(folder, config, answer_tokens)
        self._ends = frozenset(config.eos_token_ids)

    def wrong_tokens(self, prompt_ids: Sequence[int], choice: Choice, asked: Asked) -> list[int]:
        """Return the indices of tokens that are not the ones."""
        draw = Draw(asked.seed, asked.temperature, asked.index)
        state, wrong = int(states_after(np.array(prompt_ids, np.int32))[-1]), []
        for index, token in enumerate(choice.token_ids):
            steering = None if asked.matcher is None else LogitSteering(asked.matcher.allowed())
            choices = self._tokens.choices(steering)
            if asked.matcher is not None:
                asked.matcher.take(token)
            if token != self._tokens.token(state, draw, index, choices):
                wrong.append(index)
            state = int(states_after(np.array([token], np.int32), state)[0])
        return wrong


class Texts:
    """The tokenizer of a model, and the grammars that requests ask for, compiled once each."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._vocabulary = GrammarVocabulary(folder, config.vocab_size, config.eos_token_ids)
        read = self._vocabulary.read()
        self._tokens = LLTokenizer(read["json"], n_vocab=read["size"], eos_token=read["end_ids"])
        self._compiled: dict[tuple[int, str], LLMatcher] = {}
        self._tokenizer = Tokenizer.from_file(str(find_tokenizer(folder)))

    def lacks_message(self, request: ClientRequest, prompt_ids: Sequence[int]) -> bool:
        """Return True if the user's messages of a chat are not in the prompt, in their order."""
        text, at = self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False), 0
        for message in request.body["messages"]:
            if message["role"] == "user":
                found = text.find(message["content"], at)
                if found < 0:
                    return True
                at = found + len(message["content"])
        return False

    def matcher(self, request: ClientRequest) -> AnswerMatcher | None:
        """Return a matcher at the beginning of the request's answer; None if it asks for no grammar."""
        if request.form not in (Form.STRUCTURED, Form.TOOLS):
            return None
        body = ChatBody.model_validate(request.body)
        found = requested_grammar(body)
        assert found is not None
        key = found.source.kind, found.source.source
        if key not in self._compiled:
            form = to_llguidance(*key)
            self._compiled[key] = LLMatcher(self._tokens, form, log_level=0, limits=LIMITS)
        return AnswerMatcher(self._compiled[key].deep_copy(), self._vocabulary)


@dataclass
class Verdict:
    """Counts over a run, and the first problems of each kind in words."""

    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    retried: int = 0
    lost: int = 0
    verified_answers: int = 0
    verified_tokens: int = 0
    wrong_tokens: int = 0
    wrong_answers: int = 0  # structure, finish reason or usage
    reused_tokens: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    attempt_outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a problem, if there are not too many."""
        if len(self.problems) < SHOWN:
            self.problems.append(text)


class Verifier:
    """Judges the requests of a run."""

    def __init__(self, references: dict[str, Reference], texts: dict[str, Texts]) -> None:
        """Both by model."""
        self._references, self._texts = references, texts

    @classmethod
    def of(cls, models: dict[str, Path], *, paced: Sequence[str], answer_tokens: int) -> Verifier:
        """Load the references of the served models; those named in `paced` have a paced engine."""
        references: dict[str, Reference] = {
            name: ExactReference(folder, answer_tokens) if name in paced else RealReference(folder)
            for name, folder in models.items()
        }
        return cls(references, {name: Texts(folder, read_config(folder)) for name, folder in models.items()})

    def judge(self, requests: Sequence[ClientRequest], on_done: Callable[[int], None] = lambda done: None) -> Verdict:
        """Verify all requests."""
        verdict = Verdict()
        for done, request in enumerate(requests, start=1):
            self._judge(request, verdict)
            on_done(done)
        return verdict

    def _judge(self, request: ClientRequest, verdict: Verdict) -> None:
        name = f"{request.model} request {request.number} ({request.form})"
        verdict.requests += 1
        verdict.forms[request.form] += 1
        verdict.retried += len(request.attempts) > 1
        verdict.completed += request.outcome == "completed"
        verdict.cancelled += request.outcome == "cancelled"
        if request.outcome not in ("completed", "cancelled"):
            verdict.lost += 1
            verdict.note(f"{name}: lost: {request.why or 'no outcome'}")
        seen: set[str] = set()
        for attempt in request.attempts:
            verdict.attempt_outcomes[attempt.outcome] += 1
            received = attempt.received
            key = json.dumps([received.prompt_ids, {at: each.token_ids for at, each in received.choices.items()}])
            if received.num_tokens and key not in seen:
                seen.add(key)
                self._judge_tokens(request, received, name, verdict)
        if request.outcome == "completed":
            received = request.attempts[-1].received
            verdict.reused_tokens += int(
                ((received.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            )
            for problem in _wrong_structure(request, received):
                verdict.wrong_answers += 1
                verdict.note(f"{name}: {problem}")

    def _judge_tokens(self, request: ClientRequest, received: Received, name: str, verdict: Verdict) -> None:
        if not received.prompt_ids or (not request.is_chat and received.prompt_ids != request.body["prompt"]):
            verdict.wrong_answers += 1
            verdict.note(f"{name}: the answer has the prompt ids {received.prompt_ids[:8]}…")
            return
        if request.is_chat and self._texts[request.model].lacks_message(request, received.prompt_ids):
            verdict.wrong_answers += 1
            verdict.note(f"{name}: the prompt lacks a message of the chat")
        for index, choice in received.choices.items():
            if not choice.token_ids:
                continue
            matcher = self._texts[request.model].matcher(request)
            asked = Asked(request.body["seed"], request.body["temperature"], index, matcher)
            verdict.verified_answers += 1
            verdict.verified_tokens += len(choice.token_ids)
            try:
                wrong = self._references[request.model].wrong_tokens(received.prompt_ids, choice, asked)
            except GrammarError as error:
                verdict.wrong_tokens += 1
                verdict.note(f"{name}: tokens outside the grammar: {error}")
                continue
            if matcher is not None and choice.finish == "stop" and not matcher.is_over:
                verdict.wrong_answers += 1
                verdict.note(f"{name}: ended before its grammar: {choice.text[:200]!r}")
            if wrong:
                verdict.wrong_tokens += len(wrong)
                verdict.note(f"{name}: choice {index}: wrong tokens at {wrong[:8]} of {len(choice.token_ids)}")


def _wrong_structure(request: ClientRequest, received: Received) -> list[str]:
    """Return what is wrong with a complete answer besides its tokens."""
    problems = []
    usage = received.usage or {}
    expected = (len(received.prompt_ids), received.num_tokens)
    if (usage.get("prompt_tokens"), usage.get("completion_tokens")) != expected:
        problems.append(f"usage {usage} for {expected} tokens of prompt and answer")
    for index, choice in received.choices.items():
        is_short = choice.finish == "length"
        if is_short and len(choice.token_ids) != request.body["max_tokens"]:
            problems.append(f"choice {index} ended with reason length after {len(choice.token_ids)} tokens")
        if request.body.get("ignore_eos") and not is_short:
            problems.append(f"choice {index} ended with reason {choice.finish} although it ignores end tokens")
        if is_short:
            continue
        try:
            if request.form == Form.STRUCTURED:
                jsonschema.validate(json.loads(choice.text), SCHEMA)
            elif request.form == Form.TOOLS:
                if choice.finish != "tool_calls" or not choice.arguments:
                    problems.append(f"choice {index} ended with reason {choice.finish} and calls nothing")
                for arguments in choice.arguments:
                    jsonschema.validate(json.loads(arguments), PARAMETERS)
        except (ValueError, jsonschema.ValidationError) as error:
            problems.append(f"choice {index} does not conform: {str(error)[:200]}")
    return problems
