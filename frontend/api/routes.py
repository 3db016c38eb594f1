"""Routes of generation requests: how their bodies are read and prepared, and the formats of their responses."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

from frontend.api.formats import ChatFormatter, CompletionFormatter
from frontend.api.formatter import FormatterFactory
from frontend.api.messages.formatter import MessagesFormatter, anthropic_error
from frontend.api.messages.request import MessagesBody
from frontend.api.request_models import ChatBody, CompletionBody, GenerationBody, named_as_by_client, parse
from frontend.api.responses.formatter import ResponsesFormatter
from frontend.api.responses.request import ResponsesBody
from frontend.errors import ApiError
from frontend.prepare import Preparer, RequestContext
from frontend.request import GenerationRequest

G = TypeVar("G", bound=GenerationBody)
Prepare = Callable[[Preparer, G, RequestContext], Awaitable[list[GenerationRequest]]]

MESSAGES: Final = "/v1/messages"


@dataclass(frozen=True)
class GenerationRoute(Generic[G]):
    """One API.

    `read` returns a body and the format of its response; it raises InvalidRequest. `prepare` returns one request per
    choice. `takes_ids`: prompts may be token ids.
    """

    read: Callable[[bytes], tuple[G, FormatterFactory]]
    prepare: Prepare[G]
    takes_ids: bool = False


def _completion(raw: bytes) -> tuple[CompletionBody, FormatterFactory]:
    return parse(CompletionBody, raw), CompletionFormatter


def _chat(raw: bytes) -> tuple[ChatBody, FormatterFactory]:
    return parse(ChatBody, raw), ChatFormatter


def _responses(raw: bytes) -> tuple[ChatBody, FormatterFactory]:
    body = parse(ResponsesBody, raw)
    return body.to_chat(), partial(ResponsesFormatter, body)


def _messages(raw: bytes) -> tuple[ChatBody, FormatterFactory]:
    return parse(MessagesBody, raw).to_chat(), MessagesFormatter


def _converted(names: Mapping[str, str]) -> Prepare[ChatBody]:
    """Return the preparation of chats that another API's bodies became; `names` are its names by those of chats."""

    async def prepare(preparer: Preparer, body: ChatBody, context: RequestContext) -> list[GenerationRequest]:
        with named_as_by_client(names):
            return await preparer.chat(body, context)

    return prepare


GENERATION_ROUTES: Final[Mapping[str, GenerationRoute[Any]]] = {
    "/v1/completions": GenerationRoute(_completion, Preparer.completion, takes_ids=True),
    "/v1/chat/completions": GenerationRoute(_chat, Preparer.chat),
    "/v1/responses": GenerationRoute(_responses, _converted(ResponsesBody.CHAT_FIELDS)),
    MESSAGES: GenerationRoute(_messages, _converted(MessagesBody.CHAT_FIELDS)),
}


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the form of the path's API."""
    body = error.body()
    return anthropic_error(error.status, body) if path.startswith(MESSAGES) else body
