"""Examples to profile with: chats whose last message is the expected answer, and the one before it the question.

All earlier messages are the context, which the sender has computed. The file has one JSON object {"messages": […]} per
line, the format in which chats are given to fine-tuning services. Examples with equal contexts share their computation.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frontend.errors import FrontendError
from frontend.tokenizer import Tokenizer
from moonpool.errors import ConfigError

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class AskedQuestion:
    """Tokens of a question and of its expected answer, both at least one."""

    question: Ids
    answer: Ids


@dataclass(frozen=True)
class SharedContext:
    """Tokens of a context, and the questions about it."""

    ids: Ids
    questions: tuple[AskedQuestion, ...]


@dataclass(frozen=True)
class Examples:
    """The contexts of a file in the order in which they first appear, and the SHA-256 of its bytes in hex."""

    contexts: tuple[SharedContext, ...]
    sha256: str

    @property
    def num_questions(self) -> int:
        return sum(len(context.questions) for context in self.contexts)

    @property
    def mean_context_tokens(self) -> float:
        return sum(len(context.ids) for context in self.contexts) / len(self.contexts)


def read_examples(path: Path, tokenizer: Tokenizer, max_tokens: int) -> Examples:
    """Read a file. Raises ConfigError, which names the file, the line and what is wrong with it."""
    try:
        data = path.read_bytes()
        lines = data.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error
    found: dict[bytes, list[AskedQuestion]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            context, question = _example(_messages(line), tokenizer)
            if (length := len(context) + len(question.question) + len(question.answer)) > max_tokens:
                raise ConfigError(f"a chat must have at most {max_tokens} tokens, the model's positions, got {length}")
        except (ConfigError, FrontendError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        found.setdefault(context.tobytes(), []).append(question)
    if not found:
        raise ConfigError(f'{path} has no examples: expected lines {{"messages": [context…, question, answer]}}')
    contexts = (SharedContext(np.frombuffer(ids, np.int32), tuple(questions)) for ids, questions in found.items())
    return Examples(tuple(contexts), hashlib.sha256(data).hexdigest())


def _messages(line: str) -> list[Mapping[str, Any]]:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}") from error
    messages = raw.get("messages") if isinstance(raw, dict) else None
    if not isinstance(messages, list) or len(messages) < 3:
        raise ConfigError('"messages" must be a list of at least three: a context, a question and an answer')
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ConfigError(f"messages.{index} must be an object whose role and content are strings")
    if messages[-1]["role"] != "assistant":
        raise ConfigError(f"the last message must be the assistant's, the answer, got role {messages[-1]['role']!r}")
    return messages


def _example(messages: list[Mapping[str, Any]], tokenizer: Tokenizer) -> tuple[Ids, AskedQuestion]:
    """Return the context's ids and the question."""
    template = tokenizer.chat_template
    if template is None:
        raise ConfigError("the models have no chat template, with which messages become text")
    context = template.render(messages[:-2], {}, add_generation_prompt=False)
    prompt = template.render(messages[:-1], {}, add_generation_prompt=True)
    whole = template.render(messages, {}, add_generation_prompt=False)
    if not whole.startswith(prompt):
        raise ConfigError("the chat template does not continue the prompt with the answer")
    first, asked = (tokenizer.encode(text, add_special_tokens=False) for text in (context, prompt))
    answer = tokenizer.encode(whole[len(prompt) :], add_special_tokens=False)
    shared = next(
        (i for i, (a, b) in enumerate(zip(first, asked, strict=False)) if a != b), min(map(len, (first, asked)))
    )
    if not shared or shared == len(asked) or not answer:
        raise ConfigError("the context, the question and the answer must have at least one token each")
    ids = np.array(asked, np.int32)
    return ids[:shared], AskedQuestion(ids[shared:], np.array(answer, np.int32))
