"""The tokens that a request must get: those of one undisturbed sequence, computed without slots, nodes or hand-off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.config import read_config
from engine.rolling import RollingWindow
from engine.sampling import SamplingRow, sample
from engine.steering import steer
from frontend.request import GenerationRequest
from frontend.tokenizer import Tokenizer
from moonpool_proto.v1.common_pb2 import Grammar, Sampling
from moonpool_proto.v1.worker_pb2 import FINISH_NONE, FINISH_STOP, Finish
from settings.worker import BUNDLED_MODEL
from tools.prove.grammar_process import tokenizer_of
from tools.prove.hash_model import HashModel, ReferenceSequence
from tools.prove.schedule import BLOCK_TOKENS
from worker.grammar import to_llguidance
from worker.grammar_matching import GrammarVocabulary
from worker.sampling import ValidatedSamplingParams
from worker.steering import Steering


def expected_answer(model: HashModel, request: GenerationRequest, tokenizer: Tokenizer, most: int) -> list[int]:
    """Return the ids that a client gets, at most so many: with the token that ends the answer, or a stop string."""
    prompt, rolling = request.prompt_ids.tolist(), None
    if request.rolling is not None:
        rolling = RollingWindow(request.rolling.sinks, request.rolling.window, request.rolling.slide, BLOCK_TOKENS)
    tokens = expected_tokens(model, prompt, request.sampling.to_proto(), most, rolling)
    if not request.sampling.stop:
        return tokens
    text, detokenizer = "", tokenizer.detokenizer(prompt, skip_special_tokens=request.text.skip_special_tokens)
    for i, token in enumerate(tokens):
        piece = detokenizer.feed(token)
        text += piece if i >= request.sampling.min_tokens else ""
        if any(stop in text for stop in request.sampling.stop):
            return tokens[: i + 1]
    return tokens


def expected_tokens(
    model: HashModel, prompt: Sequence[int], asked: Sampling, most: int, rolling: RollingWindow | None = None
) -> list[int]:
    """Return the answer's ids, at most so many, with the token that ends it."""
    sampling = ValidatedSamplingParams.from_proto(asked, vocab_size=model.vocab_size)
    state, tokens = ReferenceSequence(model, prompt), list[int]()
    if rolling is not None:
        state = ReferenceSequence(model, prompt, rolling.start, rolling.sinks)
    steering = None
    if Steering.is_wanted(sampling):
        ids = torch.tensor(list(prompt), dtype=torch.int32).numpy()
        room = len(prompt) + most
        matcher: Any = None if sampling.grammar is None else ReferenceMatcher(sampling.grammar)
        steering = Steering(sampling, ids, 0, capacity=room, vocab_size=model.vocab_size, matcher=matcher)
    while len(tokens) < min(most, asked.max_tokens):
        index = len(tokens)
        logits = torch.from_numpy(state.logits()[None])
        if steering is not None:
            logits = steer(logits, [steering.row(index)])
        row = SamplingRow(asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.choice, index, asked.min_p)
        token = int(sample(logits, [row])[0])
        tokens.append(token)
        if token in sampling.stop_ids:
            break
        if steering is not None:
            steering.take(token)
            if steering.finish:
                break
        state.append(token)
    return tokens


class ReferenceMatcher:
    """Position in a grammar, in the same process; as `worker.grammar_matching.GrammarMatcher`."""

    def __init__(self, grammar: Grammar) -> None:
        config = read_config(BUNDLED_MODEL)
        vocabulary = GrammarVocabulary(BUNDLED_MODEL, config.vocab_size, config.eos_token_ids)
        self.end_ids = vocabulary.end_ids
        self.finish: Finish.ValueType = FINISH_NONE
        tokenizer = tokenizer_of(json.dumps(vocabulary.read()))
        self._matcher = LLMatcher(tokenizer, to_llguidance(grammar.kind, grammar.source))
        self._size = vocabulary.size

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool [V]: the ids that may come next."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(packed, count=self._size, bitorder="little").view(np.bool_)

    def take(self, token: int) -> None:
        """Advance by one token."""
        if token in self.end_ids:
            self.finish = FINISH_STOP
        else:
            self._matcher.consume_token(token)
