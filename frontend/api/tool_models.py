"""Tools as OpenAI's clients describe them, choose among them and give back what was called."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from frontend.api.fields import RequestModel

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(RequestModel):
    """What a tool does. `parameters` is the JSON Schema of an object; `strict` changes nothing: it always holds."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """One tool. Only functions are served."""

    type: Literal["function"]
    function: Function


class CalledFunction(RequestModel):
    """Name and arguments, as JSON text, of a call."""

    name: str
    arguments: str


class ToolCall(RequestModel):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedTool(RequestModel):
    """tool_choice: this function and no other."""

    name: FunctionName


def _tool_choice(value: Any) -> str | NamedTool:
    """OpenAI's four forms. Raises ValueError."""
    if value in ("none", "auto", "required"):
        return str(value)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError(
            'expected \'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": NAME}}'
        )
    return NamedTool.model_construct(name=name)


ToolChoice = Annotated[
    str | NamedTool,
    PlainValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
            ]
        }
    ),
]
