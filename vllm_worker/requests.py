"""Requests and answers in vLLM's terms: sampling parameters, tokens, log-probabilities. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engine.logprobs import TokenLogprobs
from moonpool_proto.v1.common_pb2 import Grammar
from moonpool_proto.v1.worker_pb2 import LogProbs
from vllm_worker.kv_jobs import KvJob
from worker.logprobs import PromptLogprobs
from worker.request import EngineSequence

if TYPE_CHECKING:
    from vllm import SamplingParams

EXTRA: Final = "moonpool"
"""Key in vLLM's `extra_args` of what `KeyedSampler` needs to know of a request: its Sampling message, the number of ids
at the prompt's end that earlier attempts generated, and ids to be generated first, whatever the logits are."""

_GRAMMAR_FIELDS = {Grammar.KIND_JSON_SCHEMA: "json", Grammar.KIND_LARK: "grammar", Grammar.KIND_REGEX: "regex"}


def prompt_of(sequence: EngineSequence) -> list[int]:
    """Return the ids that vLLM computes as the prompt: all known ones, unless some are generated again."""
    prompt: list[int] = sequence.tokens[: sequence.num_tokens - num_replayed(sequence)].tolist()
    return prompt


def num_replayed(sequence: EngineSequence) -> int:
    """Return the number of known tokens that vLLM generates again.

    vLLM begins every grammar at the end of the prompt. So an answer under a grammar that goes on here is generated
    again from its first token, with the known tokens in their places.
    """
    return sequence.next_index if sequence.request.sampling.grammar is not None else 0


def kv_job(sequence: EngineSequence, number: int) -> KvJob:
    """Return the copies that a sequence needs: its computed tokens are in its slots, and the others' KV is to be.

    At least the last token of vLLM's prompt is computed, since its logits are needed.
    """
    return KvJob(
        number=number,
        slots=tuple(sequence.slots),
        load_tokens=min(sequence.num_computed, sequence.num_tokens - num_replayed(sequence) - 1),
        save_from=sequence.num_computed,
        saves_layers=sequence.prefill_only,
    )


def sampling_params(sequence: EngineSequence, job: KvJob) -> SamplingParams:
    """Return vLLM's parameters: neutral ones, since `KeyedSampler` chooses the tokens by the entry in `extra_args`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    sampling, again = sequence.request.sampling, num_replayed(sequence)
    grammar = sampling.grammar
    known = sequence.tokens[sequence.num_tokens - again : sequence.num_tokens]
    entry = {
        "sampling": sequence.request.proto.sampling.SerializeToString(),
        "generated": sequence.next_index - again,
        "replayed": known.tolist(),
    }
    return SamplingParams(
        temperature=0.0,
        max_tokens=again + (1 if sequence.prefill_only else sequence.remaining),
        ignore_eos=True,  # the end tokens are among the stop tokens, if they end this answer
        stop_token_ids=sorted(sampling.stop_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs if sequence.prompt_scores is not None else None,
        structured_outputs=None
        if grammar is None
        else StructuredOutputsParams(**{_GRAMMAR_FIELDS[grammar.kind]: grammar.source}),
        extra_args={EXTRA: entry, "kv_transfer_params": job.to_params()},
    )


def token_logprobs(found: Mapping[int, Any], token: int, num_top: int) -> LogProbs:
    """Convert vLLM's entry of one position, token id -> Logprob, to a message."""
    top = _likeliest(found, num_top)
    return LogProbs(
        logprob=found[token].logprob,
        rank=found[token].rank,
        top_ids=[token_id for token_id, _ in top],
        top_logprobs=[each.logprob for _, each in top],
    )


def record_prompt(scores: PromptLogprobs, found: Sequence[Mapping[int, Any] | None], prompt: Sequence[int]) -> None:
    """Record vLLM's log-probabilities of a whole prompt; it has an entry per token, the first of which is None."""
    count, num_top = len(prompt) - 1, scores.num_top
    own = [(entries or {})[token] for entries, token in zip(found[1:], prompt[1:], strict=True)]
    tops = [_likeliest(entries or {}, num_top) for entries in found[1:]]
    scores.record(
        TokenLogprobs(
            logprobs=np.array([each.logprob for each in own], np.float32),
            ranks=np.array([each.rank for each in own], np.int64),
            top_ids=np.array([[i for i, _ in top] for top in tops], np.int32).reshape(count, num_top),
            top_logprobs=np.array([[e.logprob for _, e in top] for top in tops], np.float32).reshape(count, num_top),
        ),
        0,
    )


def _likeliest(found: Mapping[int, Any], num_top: int) -> list[tuple[int, Any]]:
    """Return the `num_top` likeliest (token id, Logprob): vLLM's entry has them and the token of that position."""
    return sorted(found.items(), key=lambda item: (-item[1].logprob, item[0]))[:num_top]
