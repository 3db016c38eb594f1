"""The models that a front door serves: each with its tokenizer, its limits and its series, found by name or alias."""

import asyncio
from collections.abc import Iterator, Sequence

from frontend.answers import AnswerMemory, spelled
from frontend.cluster import ClusterWatch
from frontend.config import FrontendConfig, ModelConfig
from frontend.detokenizer import CONTEXT_TOKENS
from frontend.errors import ModelNotFound
from frontend.output import Output
from frontend.prepare import Preparer
from frontend.request import GenerationRequest
from frontend.tokenizer import Tokenizer
from frontend.work_threads import WorkThreads
from telemetry import RequestFamilies, RequestMetrics


class ServedModel:
    """One model's part of the front door."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        *,
        config: FrontendConfig,
        cluster: ClusterWatch,
        threads: WorkThreads,
        families: RequestFamilies,
    ) -> None:
        self.config = model
        self.name = model.name
        self.tokenizer = tokenizer
        self.metrics = RequestMetrics(families, model.name)
        self._answers = AnswerMemory(config.answer_memory_nbytes)
        self.preparer = Preparer(config, model, tokenizer, cluster, threads, self._answers, self.metrics)
        self._num_sessions = 0

    def output(self, request: GenerationRequest) -> Output:
        """Fresh state that turns one request's tokens into text."""
        # With an echo the prompt's tokens are fed, too: nothing stands before them.
        context = [] if request.text.echo else request.prompt_ids[-CONTEXT_TOKENS:].tolist()
        detokenizer = self.tokenizer.detokenizer(context, skip_special_tokens=request.text.skip_special_tokens)
        return Output(request, detokenizer, self.tokenizer.token_bytes)

    def remember(self, request: GenerationRequest, token_ids: Sequence[int], text: str) -> int:
        """Take note of a whole answer, so that its ids are found again when it comes back as history.

        Returns how many of them will come back; 0: that is not known.
        """
        text = text.rstrip()  # templates trim, and so do clients
        if not request.place or not text:
            return 0
        detokenizer = self.tokenizer.detokenizer(request.prompt_ids[-CONTEXT_TOKENS:].tolist())
        answer = spelled(token_ids, text, detokenizer)
        self._answers.remember(request.place, text, answer)
        self.metrics.answer_memory_bytes.set(self._answers.nbytes)
        return len(answer.token_ids)

    def count_session(self, change: int) -> None:
        """One HTTP request more (1) or fewer (-1) is in flight."""
        self._num_sessions += change
        self.metrics.in_flight.set(self._num_sessions)


class ServedModels:
    """All of them, in the order of the configuration: a request that names none goes to the first."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = tuple(models)
        self._by_name = {name: model for model in models for name in model.config.names}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def find(self, name: str | None) -> ServedModel:
        """The model of that name or alias. Raises ModelNotFound, naming what is served."""
        if name is None:
            return self._models[0]
        if name not in self._by_name:
            served = ", ".join(map(repr, self._by_name))
            verb = "is" if len(self._by_name) == 1 else "are"
            raise ModelNotFound(f"the model {name!r} is not served here: {served} {verb}", param="model")
        return self._by_name[name]


async def load_tokenizers(models: Sequence[ModelConfig]) -> list[Tokenizer]:
    """Each model's tokenizer, read off the event loop. Raises ModelFolderError."""
    return [await asyncio.to_thread(Tokenizer, model.path) for model in models]
