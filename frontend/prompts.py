"""Token ids of prompts, from a client's text, ids or chat, and truncation of chats that exceed the context.

Each turn of a chat sends the whole history again, and no record is kept of messages dropped before. Truncation
therefore repeats the decisions of all turns from the first one on, in the same order and from the same sizes, with the
same result. Each truncation shortens the chat to a fraction of the context, so the prompt's beginning stays unchanged
for many turns and its KV can be reused.
"""

import json
import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Final

from frontend.answer_memory import AnswerMemory, AnswerTokens, ChatDigest
from frontend.api.request_models import ChatMessage, ChatRendering
from frontend.chat_rendering import (
    ChatTemplate,
    ContentSpan,
    Message,
    as_plain,
    content_spans,
    native_messages,
    plain_messages,
)
from frontend.errors import ContextLengthExceeded, InvalidRequest
from frontend.tokenizer import Tokenizer

Render = Callable[[Sequence[Message]], str]
_ENDING_CHARS: Final = 64  # more than a template writes after the opening of a message


@dataclass(frozen=True)
class ChatPrompt:
    """Token ids of a rendered chat. `place` is the key under which its answers are remembered; b"": they are not."""

    token_ids: list[int]
    previous_tokens: int = 0  # estimated length of the last answer in its history; 0: there is none
    place: bytes = b""
    num_recalled: int = 0  # answers in its history that use the generated ids
    num_forgotten: int = 0  # answers in its history that were tokenised again from their text
    head_tokens: int = 0  # before the first message that is not the system's, if the model may have windows
    ending: str = ""  # end of its text, from which the answer goes on


class PromptReader:
    """Converter from prompts to token ids with one model's tokenizer and chat template. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, model_name: str, answers: AnswerMemory) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._answers = answers
        self._secret = secrets.token_bytes(32)

    def prompt_ids(self, prompt: str | list[int], *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a completion's prompt. Raises InvalidRequest for an empty prompt and for invalid ids."""
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if prompt else []
        if not prompt:
            raise InvalidRequest("the prompt must not be empty", param="prompt")
        self.check_ids(prompt, "prompt")
        return prompt

    def chat_ids(
        self,
        messages: Sequence[ChatMessage],
        rendering: ChatRendering,
        *,
        add_special_tokens: bool,
        check: Callable[[str], None] = lambda text: None,
    ) -> list[int]:
        """Return the ids of a chat rendered with the model's template, all tokenised from its text.

        Before tokenising, `check` is called with the text and may raise.
        """
        chat, render = self._chat(messages, rendering)
        text = render(chat)
        check(text)
        return self._ids(text, add_special_tokens=add_special_tokens)

    def chat_ending(self, messages: Sequence[ChatMessage], rendering: ChatRendering) -> str:
        """Return the end of a chat's text, from which the answer goes on."""
        chat, render = self._chat(messages, rendering)
        return render(chat)[-_ENDING_CHARS:]

    def chat(
        self,
        messages: Sequence[ChatMessage],
        rendering: ChatRendering,
        *,
        add_special_tokens: bool,
        scope: Sequence[str],
        check: Callable[[str], None] = lambda text: None,
    ) -> ChatPrompt:
        """Return a chat's prompt in which remembered answers (within `scope`) keep the ids they were generated with.

        If these ids would not decode exactly to the template's text, all ids are made from the text. Before tokenising,
        `check` is called with the text and may raise.
        """
        chat, render = self._chat(messages, rendering)
        text = render(chat)
        check(text)
        # If the tokenizer adds special tokens (such as BOS), parts tokenised separately would not equal the whole.
        splices = self._answers.is_on and not add_special_tokens
        head = self._head(text, chat, render)
        if not splices:
            ids = self._ids(text, add_special_tokens=add_special_tokens)
            head_tokens = self._tokenizer.num_within(ids, head)
            previous_tokens = _previous_tokens(messages, rendering, len(text), len(ids))
            return ChatPrompt(ids, previous_tokens, head_tokens=head_tokens, ending=text[-_ENDING_CHARS:])
        spans = self._spans(text, chat, render)
        trail = ChatDigest(self._secret, (self._model_name, self._tokenizer.identity, *scope))
        requested, at = [], 0
        for span in spans:
            requested.append((trail.extend(text[at : span.start]), text[span.start : span.end]))
            at = span.start
        place = trail.extend(text[at:])
        found = self._answers.recall(requested)
        ids, num_recalled = self._spliced(text, spans, found)
        if not ids:
            raise _empty()
        previous_tokens = _previous_tokens(messages, rendering, len(text), len(ids))
        head_tokens = self._tokenizer.num_within(ids, head)
        num_forgotten, ending = len(spans) - num_recalled, text[-_ENDING_CHARS:]
        return ChatPrompt(ids, previous_tokens, place, num_recalled, num_forgotten, head_tokens, ending)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for an id outside the vocabulary."""
        if ids and max(ids) >= self._tokenizer.vocab_size:
            size = self._tokenizer.vocab_size
            raise InvalidRequest(f"token ids of {param} must be in 0..{size - 1}, got {max(ids)}", param=param)

    def _chat(self, messages: Sequence[ChatMessage], rendering: ChatRendering) -> tuple[list[dict[str, Any]], Render]:
        """Return the messages for the model's template and the function that renders them. Raises InvalidRequest."""
        template: ChatTemplate | None = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest(
                f"the model {self._model_name!r} has no chat template: use /v1/completions",
                code="no_chat_template",
            )
        tools, effort = rendering.tools or [], rendering.reasoning_effort
        variables = {} if effort is None else template.reasoning_variables(effort, is_hint=rendering.EFFORT_IS_HINT)
        variables |= rendering.chat_template_kwargs or {}
        if template.takes_tools:
            chat = native_messages(messages, template.reasoning_key)
            variables["tools"] = [as_plain(tool) for tool in tools] or None
        else:
            chat = plain_messages(messages, tools, template.reasoning_key)
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

    def _head(self, text: str, chat: Sequence[Message], render: Render) -> str:
        """Return the text before the content of the first message that is not the system's.

        It is empty if that message has no text, or if the model has no windows, so that nobody needs it.
        """
        first = head_length([message["role"] for message in chat])
        if not self._tokenizer.may_have_windows or first == len(chat) or not _has_text(chat[first]):
            return ""
        span = next(iter(_spans_of(text, chat, [first], render)), None)
        return text[: span.start] if span is not None else ""

    def _spans(self, text: str, chat: Sequence[Message], render: Render) -> list[ContentSpan]:
        """Return the spans of the history's answers in the text."""
        answers = [at for at, message in enumerate(chat) if message["role"] == "assistant" and _has_text(message)]
        return _spans_of(text, chat, answers, render)

    def _spliced(
        self, text: str, spans: Sequence[ContentSpan], found: Sequence[AnswerTokens | None]
    ) -> tuple[list[int], int]:
        """Return (ids of `text`, number of answers that use their generated ids)."""
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
    """Return the chat's text up to the end of its last message's content. Raises InvalidRequest if it is not found."""
    if opens:
        raise InvalidRequest(
            "continue_final_message continues the last message, but add_generation_prompt begins a new one: "
            "set only one of them",
            param="continue_final_message",
        )
    render = partial(template.render, extra=variables, add_generation_prompt=False)
    text = render(chat)
    # Searching for the content would be wrong: a short one may also occur in text that the template adds after it.
    spans = content_spans(text, chat, [len(chat) - 1], render, secrets.token_hex(8)) if _has_text(chat[-1]) else []
    if spans:
        end, content = spans[0].end, chat[-1]["content"]
        after = content[len(content.rstrip()) :]
        return text[: end + len(after)] if text.startswith(after, end) else text[:end]
    raise InvalidRequest(
        "continue_final_message requires content in the last message that the model's chat template does not change",
        param="continue_final_message",
    )


def _previous_tokens(messages: Sequence[ChatMessage], rendering: ChatRendering, num_chars: int, num_tokens: int) -> int:
    """Return the estimated tokens of the last answer before the one to be generated; 0 if there is none.

    The estimate is the answer's share of the prompt's `num_chars` characters: predictions of lengths only distinguish
    octaves, so that it need not be tokenised a second time.
    """
    history = messages[:-1] if rendering.continue_final_message else messages
    answer = next((message for message in reversed(history) if message.role == "assistant"), None)
    if answer is None:
        return 0
    calls = [f"{call.function.name}{call.function.arguments or ''}" for call in answer.tool_calls or ()]
    answer_chars = len(answer.text) + sum(map(len, calls))
    return max(1, round(num_tokens * min(1.0, answer_chars / max(1, num_chars))))


def _spans_of(text: str, chat: Sequence[Message], indices: Sequence[int], render: Render) -> list[ContentSpan]:
    """Return the spans of these messages in the text; none if the template does more than put the contents down."""
    if not indices:
        return []
    try:
        return content_spans(text, chat, indices, render, secrets.token_hex(8))
    except InvalidRequest:  # the template checks the messages' content and rejects the marks
        return []


def _has_text(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _empty() -> InvalidRequest:
    return InvalidRequest("the model's chat template renders these messages as an empty prompt", param="messages")


def head_length(roles: Sequence[str]) -> int:
    """Return the number of leading system messages, which are never dropped."""
    return next((at for at, role in enumerate(roles) if role not in ("system", "developer")), len(roles))


def first_kept(roles: Sequence[str], sizes: Sequence[int], *, fixed: int, budget: int, target: int) -> int:
    """Return the index of the first message after the head that is kept.

    `sizes` are tokens per message (the head's are ignored); `fixed` is the number of further tokens in every prompt.
    Whenever a prompt (the last message's, or one whose answer is in the chat) exceeds `budget`, whole turns are
    dropped, oldest first, until it is within `target`. The prompt's own turn stays. A turn begins with a user message.
    """
    head = head_length(roles)
    before = [0, *accumulate(sizes)]
    turns = [head, *(at for at in range(head + 1, len(roles)) if roles[at] == "user" != roles[at - 1])]
    kept = 0  # index into turns
    for end in range(head + 1, len(roles) + 1):
        if end < len(roles) and roles[end] != "assistant":
            continue  # no prompt ended here
        if fixed + before[end] - before[turns[kept]] <= budget:
            continue
        while kept + 1 < len(turns) and turns[kept + 1] < end and fixed + before[end] - before[turns[kept]] > target:
            kept += 1
    return turns[kept]


# Budgets are multiples of 1/16 of the context, which absorbs estimation errors and small changes of max_tokens.
_STEPS: Final = 16
_FALLBACK_OVERHEAD: Final = 8


class ChatTruncator:
    """Truncation of chats to the context length, for one model. Thread-safe."""

    def __init__(self, reader: PromptReader, tokenizer: Tokenizer) -> None:
        self._reader = reader
        self._tokenizer = tokenizer

    def truncate(
        self,
        messages: Sequence[ChatMessage],
        rendering: ChatRendering,
        *,
        limit: int,
        wanted: int,
        add_special_tokens: bool,
        scope: Sequence[str],
        check: Callable[[str], None],
    ) -> tuple[ChatPrompt, int]:
        """Return (prompt of at most `limit` - `wanted` tokens, number of dropped messages).

        The head and the last turn are always kept; if they alone are too long, so is the prompt. `check` is called with
        each text before it is tokenised. It raises ContextLengthExceeded for one that cannot fit; so does this method
        if none can.
        """
        roles = [message.role for message in messages]
        head = head_length(roles)

        def read(start: int) -> _Tried:
            kept = messages if start == head else [*messages[:head], *messages[start:]]
            try:
                prompt = self._reader.chat(
                    kept, rendering, add_special_tokens=add_special_tokens, scope=scope, check=check
                )
            except ContextLengthExceeded as error:
                return _Tried(error, fits=False)
            return _Tried(prompt, fits=len(prompt.token_ids) + wanted <= limit)

        whole = read(head)
        if whole.fits or head == len(roles):
            return whole.prompt(), 0
        sizes = [self._size(message, limit) for message in messages]
        fixed = self._fixed(messages[:head], rendering, limit, check)
        step = -(-limit // _STEPS)
        most = max(0, limit - step * (1 - (-wanted // step)))
        starts = []
        for share in range(_STEPS, -1, -2):  # sizes are estimates: if they were too low, drop more
            budget = most * share // _STEPS
            starts.append(first_kept(roles, sizes, fixed=fixed, budget=budget, target=budget // 2))
        start, found = _first_fitting(starts, read, {head: whole})
        return found.prompt(), start - head

    def _size(self, message: ChatMessage, limit: int) -> int:
        """Return the estimated tokens of a message; any number above `limit` has the same effect."""
        calls = [call.function.model_dump() for call in message.tool_calls or ()]
        text = message.text + (json.dumps(calls) if calls else "")
        if self._tokenizer.least_tokens(text, limit) > limit:
            return self._overhead + 2 * limit
        return self._overhead + len(self._tokenizer.encode(text, add_special_tokens=False))

    def _fixed(
        self, head: Sequence[ChatMessage], rendering: ChatRendering, limit: int, check: Callable[[str], None]
    ) -> int:
        """Return the tokens of the head, the tools and the answer's opening. Raises ContextLengthExceeded."""
        shape = ChatRendering(chat_template_kwargs=rendering.chat_template_kwargs, tools=rendering.tools)
        try:
            ids = self._reader.chat_ids([*head, _WORD], shape, add_special_tokens=False, check=check)
        except ContextLengthExceeded:
            raise
        except InvalidRequest:  # the template requires other messages
            return sum(self._size(message, limit) for message in head)
        return len(ids) - self._overhead - 1

    @cached_property
    def _overhead(self) -> int:
        """Number of tokens that the template adds around a message."""
        shape = ChatRendering()
        try:
            one, three = (
                len(self._reader.chat_ids(chat, shape, add_special_tokens=False))
                for chat in ([_WORD], [_WORD, _WORD_BACK, _WORD])
            )
        except InvalidRequest:
            return _FALLBACK_OVERHEAD
        return max(1, -(-(three - one) // 2) - 1)


@dataclass(frozen=True)
class _Tried:
    """A prompt that was made, or the error because of which it was not, and whether it fits."""

    result: "ChatPrompt | ContextLengthExceeded"
    fits: bool

    def prompt(self) -> ChatPrompt:
        if isinstance(self.result, ContextLengthExceeded):
            raise self.result
        return self.result


def _first_fitting(
    starts: Sequence[int], read: Callable[[int], _Tried], tried: dict[int, _Tried]
) -> tuple[int, _Tried]:
    """Return the first of `starts` from which the chat fits, and its prompt; the last one if none fits.

    The fewer messages, the fewer tokens: a binary search over the distinct starts finds the least that fits. The first
    of `starts` is tried before, as it mostly fits. `tried` holds what was read already.
    """

    def fits(start: int) -> bool:
        if start not in tried:
            tried[start] = read(start)
        return tried[start].fits

    if fits(starts[0]):
        return starts[0], tried[starts[0]]
    distinct = sorted({start for start in starts if start > starts[0]})
    at = bisect_left(distinct, True, key=fits)
    least = distinct[at] if at < len(distinct) else None
    start = starts[-1] if least is None else next(start for start in starts if start >= least)
    fits(start)
    return start, tried[start]


_WORD: Final = ChatMessage.model_validate({"role": "user", "content": "a"})
_WORD_BACK: Final = ChatMessage.model_validate({"role": "assistant", "content": "a"})
