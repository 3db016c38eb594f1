"""What a line typed into a chat means: a question, or a command with its argument. Pure."""

from dataclasses import dataclass
from typing import Final

from moonpool.config.sources import nearest
from moonpool.errors import ChatCommandError

COMMANDS: Final[dict[str, tuple[str, str]]] = {  # name: (argument, what it does)
    "/reset": ("", "forget the conversation; the system prompt stays"),
    "/system": ("[TEXT|off]", "show, set or remove the system prompt"),
    "/undo": ("", "take the last question and its answer back"),
    "/save": ("FILE", "write the conversation to a JSON file"),
    "/load": ("FILE", "go on with a saved conversation"),
    "/help": ("", "show these commands"),
    "/quit": ("", "leave; so do Ctrl-D, and Ctrl-C at the prompt"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """`command` "" is a question, whose text is `text`; otherwise `text` is the command's argument."""

    command: str
    text: str


def parse(line: str) -> Line | None:
    """The meaning of a line; None for an empty one. A question that begins with / is typed with //.

    Raises ChatCommandError for an unknown command, or one without, or with too much of, an argument.
    """
    line = line.strip()
    if not line:
        return None
    if line.startswith("//"):
        return Line("", line[1:])
    if not line.startswith("/"):
        return Line("", line)
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"did you mean {near}?" if near else "/help shows all"
        raise ChatCommandError(f"there is no command {name}; {hint} (a question that begins with / is typed with //)")
    takes, what = COMMANDS[name]
    if argument and not takes:
        raise ChatCommandError(f"{name} takes nothing after it, not {argument!r}: it is to {what}")
    if takes and not takes.startswith("[") and not argument:
        raise ChatCommandError(f"{name} needs a {takes}: it is to {what}")
    return Line(name, argument)
