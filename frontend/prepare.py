"""From what a client sent to requests for the cluster, off the event loop: limits, templates, tokens, chain keys."""

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from frontend.api.models import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
)
from frontend.cluster import ClusterWatch
from frontend.config import FrontendConfig, ModelConfig
from frontend.errors import ContextLengthExceeded, InvalidRequest
from frontend.prompts import PromptReader
from frontend.request import GenerationRequest
from frontend.sampling_params import sampling_of
from frontend.tokenizer import Tokenizer
from frontend.work_threads import WorkThreads
from kvpool import chain_keys, chain_seed


@dataclass(frozen=True)
class Arrival:
    """What came with a request beside its body. `at_s` is of the monotonic clock."""

    at_s: float
    tenant: str
    ttft_objective_s: float = 0.0
    tpot_objective_s: float = 0.0

    @classmethod
    def of(cls, headers: Mapping[str, str], *, at_s: float, tenant: str) -> "Arrival":
        """Reads x-slo-ttft-ms and x-slo-tpot-ms. Raises InvalidRequest."""
        objectives = [_milliseconds(headers, name) for name in ("x-slo-ttft-ms", "x-slo-tpot-ms")]
        return cls(at_s, tenant, *objectives)


class Preparer:
    """Understands bodies for one model."""

    def __init__(
        self,
        config: FrontendConfig,
        model: ModelConfig,
        tokenizer: Tokenizer,
        cluster: ClusterWatch,
        threads: WorkThreads,
    ) -> None:
        self._config = config
        self._model = model.name
        self._tokenizer = tokenizer
        self._cluster = cluster
        self._reader = PromptReader(tokenizer, model.name)
        self._threads = threads

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together; 0 while nobody knows."""
        return self._cluster.max_model_len(self._model, self._tokenizer.max_positions)

    async def completion(self, body: CompletionBody, arrival: Arrival) -> list[GenerationRequest]:
        """One request per prompt."""
        prompts = body.prompt
        if len(prompts) > self._config.max_prompts:
            most = self._config.max_prompts
            raise InvalidRequest(f"{len(prompts)} prompts in one request: at most {most} are taken", param="prompt")

        def prepare() -> list[GenerationRequest]:
            special = body.add_special_tokens is not False
            requests = []
            for prompt in prompts:
                ids = self._reader.prompt_ids(prompt, add_special_tokens=special)
                max_tokens = self._max_tokens(
                    len(ids), body.max_tokens, self._config.completion_default_tokens, param="prompt"
                )
                requests.append(self._request(body, arrival, f"cmpl-{uuid.uuid4().hex}", ids, max_tokens))
            return requests

        return await self._threads.run(prepare)

    async def chat(self, body: ChatBody, arrival: Arrival) -> list[GenerationRequest]:
        """The one request that a chat is."""

        def prepare() -> list[GenerationRequest]:
            ids = self._reader.chat_ids(
                body.messages, body.chat_template_kwargs, add_special_tokens=body.add_special_tokens is True
            )
            asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
            max_tokens = self._max_tokens(len(ids), asked, self._config.chat_default_tokens, param="messages")
            return [self._request(body, arrival, f"chatcmpl-{uuid.uuid4().hex}", ids, max_tokens)]

        return await self._threads.run(prepare)

    async def tokens(self, body: TokenizeBody) -> list[int]:
        """The ids of a text or a chat."""
        prompt, messages = body.prompt, body.messages
        if (prompt is None) == (messages is None):
            raise InvalidRequest("exactly one of prompt and messages is needed", param="prompt")
        special = body.add_special_tokens
        if messages is not None:
            return await self._threads.run(
                lambda: self._reader.chat_ids(messages, body.chat_template_kwargs, add_special_tokens=special is True)
            )
        return await self._threads.run(
            lambda: self._tokenizer.encode(prompt or "", add_special_tokens=special is not False)
        )

    async def text(self, token_ids: Sequence[int]) -> str:
        """The text of ids."""
        self._reader.check_ids(token_ids, "tokens")
        return await self._threads.run(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _request(
        self, body: GenerationBody, arrival: Arrival, request_id: str, ids: list[int], max_tokens: int
    ) -> GenerationRequest:
        config = self._config
        prompt = np.array(ids, np.int32)
        seed = chain_seed(body.cache_salt or "", self._tokenizer.identity, config.block_tokens)
        return GenerationRequest(
            request_id=request_id,
            model=self._model,
            prompt_ids=prompt,
            chain=chain_keys(seed, prompt, config.block_tokens),
            chain_seed=seed,
            block_tokens=config.block_tokens,
            sampling=sampling_of(body, config, max_tokens=max_tokens, eos_token_ids=self._tokenizer.eos_token_ids),
            arrival_s=arrival.at_s,
            deadline_s=arrival.at_s + config.request_timeout_s,
            tokenize_s=monotonic() - arrival.at_s,
            ttft_objective_s=arrival.ttft_objective_s,
            tpot_objective_s=arrival.tpot_objective_s,
            tenant=arrival.tenant,
        )

    def _max_tokens(self, num_prompt: int, asked: int | None, default: int, *, param: str) -> int:
        limit = self.max_model_len
        if not limit:
            return asked or default
        wanted = asked or 1
        if num_prompt + wanted > limit:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {limit} tokens. However, you requested {num_prompt + wanted} "
                f"tokens ({num_prompt} in the {param}, {wanted} in the completion).",
                param=param,
            )
        return asked or min(default, limit - num_prompt)


def _milliseconds(headers: Mapping[str, str], name: str) -> float:
    text = headers.get(name)
    if text is None:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{name} is {text!r}: expected a positive number of milliseconds", param=name)
    return value / 1000
