"""From a client's text, ids or chat to the prompt's token ids, for one model."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from frontend.answers import AnswerMemory, Spelled, Trail
from frontend.api.models import ChatMessage, ChatRendering
from frontend.chat_messages import as_plain, native_messages, plain_messages
from frontend.chat_spans import ContentSpan, Message, content_spans
from frontend.chat_template import ChatTemplate
from frontend.errors import InvalidRequest
from frontend.tokenizer import Tokenizer

Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat's ids. `place`: where its answers are to be remembered, b"" for nowhere."""

    token_ids: list[int]
    place: bytes = b""
    num_recalled: int = 0  # answers in its history whose generated ids were put in
    num_forgotten: int = 0  # answers in its history that were tokenised from their text


class PromptReader:
    """Reads prompts with one model's tokenizer and chat template. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, model_name: str, answers: AnswerMemory) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._answers = answers
        self._secret = secrets.token_bytes(32)

    def prompt_ids(self, prompt: str | list[int], *, add_special_tokens: bool) -> list[int]:
        """The ids of a completion's prompt. Raises InvalidRequest for an empty one and for ids of no token."""
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if prompt else []
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        self.check_ids(prompt, "prompt")
        return prompt

    def chat_ids(
        self, messages: Sequence[ChatMessage], rendering: ChatRendering, *, add_special_tokens: bool
    ) -> list[int]:
        """The ids of a chat rendered with the model's template, all from its text."""
        chat, render = self._chat(messages, rendering)
        text = render(chat)
        return self._ids(text, add_special_tokens=add_special_tokens)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        rendering: ChatRendering,
        *,
        add_special_tokens: bool,
        scope: Sequence[str],
        check: Callable[[int], None] = lambda least: None,
    ) -> ChatPrompt:
        """A chat whose earlier answers have the ids they were generated with, as far as they are remembered in `scope`.

        Their text is the template's to the byte: where it would not be, all ids are made from the text. `check` is told
        how many tokens there are at least, before the work of tokenising, and may raise.
        """
        chat, render = self._chat(messages, rendering)
        text = render(chat)
        check(self._tokenizer.least_tokens(text))
        # With BOS or the like from the tokenizer, parts tokenised apart would not be the whole.
        if add_special_tokens or not self._answers.is_on:
            return ChatPrompt(self._ids(text, add_special_tokens=add_special_tokens))
        spans = self._spans(text, chat, render)
        trail = Trail(self._secret, (self._model_name, self._tokenizer.identity, *scope))
        asked, at = [], 0
        for span in spans:
            asked.append((trail.extend(text[at : span.start]), text[span.start : span.end]))
            at = span.start
        place = trail.extend(text[at:])
        found = self._answers.recall(asked)
        ids, num_recalled = self._spliced(text, spans, found)
        if not ids:
            raise _empty()
        return ChatPrompt(ids, place, num_recalled, len(spans) - num_recalled)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequest for an id outside the vocabulary."""
        if ids and max(ids) >= self._tokenizer.vocab_size:
            size = self._tokenizer.vocab_size
            raise InvalidRequest(f"token id {max(ids)} is outside the vocabulary of {size} tokens", param=param)

    def _chat(self, messages: Sequence[ChatMessage], rendering: ChatRendering) -> tuple[list[dict[str, Any]], Render]:
        """The chat as the model's template takes it, and what makes its text. Raises InvalidRequest."""
        template: ChatTemplate | None = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest(
                f"the model {self._model_name!r} has no chat template: use /v1/completions",
                code="no_chat_template",
            )
        tools, variables = rendering.tools or [], dict(rendering.chat_template_kwargs or {})
        if template.takes_tools:
            chat = native_messages(messages)
            variables["tools"] = [as_plain(tool) for tool in tools] or None
        else:
            chat = plain_messages(messages, tools)
        if rendering.continue_final_message:
            return chat, partial(_unfinished, template, variables, bool(rendering.add_generation_prompt))
        opens = rendering.add_generation_prompt is not False
        return chat, partial(template.render, extra=variables, add_generation_prompt=opens)

    def _ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        # The template writes the special tokens itself.
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise _empty()
        return ids

    def _spans(self, text: str, chat: Sequence[Message], render: Render) -> list[ContentSpan]:
        """Where the answers of the history stand."""
        answers = [at for at, message in enumerate(chat) if message["role"] == "assistant" and _has_text(message)]
        if not answers:
            return []
        try:
            return content_spans(text, chat, answers, render, secrets.token_hex(8))
        except InvalidRequest:  # a template that looks into what it renders
            return []

    def _spliced(
        self, text: str, spans: Sequence[ContentSpan], found: Sequence[Spelled | None]
    ) -> tuple[list[int], int]:
        """(ids of `text`, how many of the answers found are in them as generated)."""
        ids: list[int] = []
        at = num_recalled = 0
        for span, answer in zip(spans, found, strict=True):
            if answer is not None and span.start >= at:
                ids += self._tokenizer.encode(text[at : span.start], add_special_tokens=False)
                ids += answer.token_ids.tolist()
                at = span.start + answer.num_chars
                num_recalled += 1
        rest = self._tokenizer.encode(text[at:], add_special_tokens=False)
        if num_recalled and not self._tokenizer.spells([*ids, *rest], text):
            return self._tokenizer.encode(text, add_special_tokens=False), 0
        return ids + rest, num_recalled


def _unfinished(template: ChatTemplate, variables: Mapping[str, Any], opens: bool, chat: Sequence[Message]) -> str:
    """The chat's text up to the end of its last message's content. Raises InvalidRequest where that is not found."""
    if opens:
        raise InvalidRequest(
            "continue_final_message goes on with the last message, add_generation_prompt opens another: one of them at "
            "most",
            param="continue_final_message",
        )
    render = partial(template.render, extra=variables, add_generation_prompt=False)
    text = render(chat)
    # Not by looking for the content: a short one may stand in what the template puts after it, too.
    spans = content_spans(text, chat, [len(chat) - 1], render, secrets.token_hex(8)) if _has_text(chat[-1]) else []
    if spans:
        end, content = spans[0].end, chat[-1]["content"]
        after = content[len(content.rstrip()) :]
        return text[: end + len(after)] if text.startswith(after, end) else text[:end]
    raise InvalidRequest(
        "continue_final_message: the last message has no content, or the model's chat template changes it",
        param="continue_final_message",
    )


def _has_text(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _empty() -> InvalidRequest:
    return InvalidRequest("the chat template makes an empty prompt of these messages", param="messages")
