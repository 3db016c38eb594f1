"""The tokens that a request must get: those of one undisturbed sequence, computed without slots, nodes or hand-off."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sampling import SamplingRow, sample
from engine.steering import steer
from moonpool_proto.v1.common_pb2 import Sampling
from tools.prove.hash_model import HashModel, ReferenceSequence
from worker.sampling import ValidatedSamplingParams
from worker.steering import Steering


def expected_tokens(model: HashModel, prompt: Sequence[int], asked: Sampling) -> list[int]:
    """Return the answer's ids, with the token that ends it."""
    sampling = ValidatedSamplingParams.from_proto(asked, vocab_size=model.vocab_size)
    state, tokens = ReferenceSequence(model, prompt), list[int]()
    steering = None
    if Steering.is_wanted(sampling):
        ids = torch.tensor(list(prompt), dtype=torch.int32).numpy()
        room = len(prompt) + asked.max_tokens
        steering = Steering(sampling, ids, 0, capacity=room, vocab_size=model.vocab_size, matcher=None)
    while len(tokens) < asked.max_tokens:
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
        state.append(token)
    return tokens
