"""Conversation of a chat: parsing of typed lines, turns as OpenAI's messages, and the saved form. No I/O."""

import json
from dataclasses import dataclass, field
from typing import Any, Final

from moonpool.config.sources import nearest
from moonpool.errors import ChatCommandError, ChatFileError

COMMANDS: Final[dict[str, tuple[str, str]]] = {  # name: (argument, effect)
    "/reset": ("", "clear the conversation; the system prompt stays"),
    "/system": ("[TEXT|off]", "show, set or remove the system prompt"),
    "/undo": ("", "remove the last question and its answer"),
    "/save": ("FILE", "write the conversation to a JSON file"),
    "/load": ("FILE", "continue a saved conversation"),
    "/help": ("", "show these commands"),
    "/quit": ("", "exit; also Ctrl-D, and Ctrl-C at the prompt"),
}


@dataclass(frozen=True, slots=True)
class ChatLine:
    """A typed line: a question in `text` if `command` is "", otherwise a command and its argument."""

    command: str
    text: str


def parse(line: str) -> ChatLine | None:
    """Parse a line; None for an empty one. A question that starts with / is typed with //.

    Raises ChatCommandError for an unknown command, and for a missing or surplus argument.
    """
    line = line.strip()
    if not line:
        return None
    if line.startswith("//"):
        return ChatLine("", line[1:])
    if not line.startswith("/"):
        return ChatLine("", line)
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"did you mean {near}?" if near else "/help shows all"
        raise ChatCommandError(f"unknown command {name}; {hint} (type // for a question that starts with /)")
    takes, what = COMMANDS[name]
    if argument and not takes:
        raise ChatCommandError(f"{name} ({what}) takes no argument, got {argument!r}")
    if takes and not takes.startswith("[") and not argument:
        raise ChatCommandError(f"{name} ({what}) needs the argument {takes}")
    return ChatLine(name, argument)


Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A question and its answer, unchanged: KV is reused only if an answer is sent back exactly."""

    question: str
    answer: str


@dataclass
class Conversation:
    """Turns so far, oldest first; an empty `system` means no system prompt."""

    system: str = ""
    turns: list[ChatTurn] = field(default_factory=list)

    def messages(self, question: str = "") -> list[Message]:
        """Return all turns as OpenAI's messages, followed by a new question if one is given."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            found += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return [*found, {"role": "user", "content": question}] if question else found

    def add(self, question: str, answer: str) -> None:
        """Append a turn."""
        self.turns.append(ChatTurn(question, answer))

    def undo(self) -> ChatTurn | None:
        """Remove and return the last turn; None if there is none."""
        return self.turns.pop() if self.turns else None

    def to_json(self, model: str) -> str:
        """Return the file's text: `model` and `messages`, as in the body of a chat completion."""
        return json.dumps({"model": model, "messages": self.messages()}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Conversation":
        """Parse the text of `to_json`. Raises ChatFileError unless questions and answers alternate."""
        try:
            messages = json.loads(text)["messages"]
            pairs = [(str(message["role"]), _content(message)) for message in messages]
        except (ValueError, KeyError, TypeError) as error:
            raise ChatFileError(
                f"a saved conversation must be a JSON object with messages that each have a role and a content, got "
                f"{error!r}"
            ) from error
        system = pairs.pop(0)[1] if pairs and pairs[0][0] == "system" else ""
        roles = [role for role, _ in pairs]
        if roles != ["user", "assistant"] * (len(pairs) // 2):
            raise ChatFileError(
                f"messages must alternate between user and assistant, after at most one system message, got "
                f"{', '.join(roles)}"
            )
        contents = [content for _, content in pairs]
        return cls(system, [ChatTurn(q, a) for q, a in zip(contents[::2], contents[1::2], strict=True)])


def _content(message: dict[str, Any]) -> str:
    content = message["content"]
    if not isinstance(content, str):
        raise TypeError(f"content must be text, got {type(content).__name__}")
    return content
