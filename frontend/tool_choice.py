"""Which tools an answer may or must call."""

from dataclasses import dataclass
from typing import Any, Final

from frontend.api.models import ChatBody
from frontend.api.tool_models import Function, NamedTool
from frontend.errors import InvalidRequest
from frontend.tools import ToolSpec

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolPlan:
    """The tools that can be called; `must_call`: the answer is nothing but calls; `parallel`: it may have several."""

    specs: tuple[ToolSpec, ...]
    must_call: bool
    parallel: bool


def reads_calls(body: ChatBody) -> bool:
    """Whether the answer's text is looked through for calls."""
    return bool(body.tools) and body.tool_choice != "none"


def tools_of(body: ChatBody) -> ToolPlan | None:
    """What `body` says of tools; None where the answer calls none. Raises InvalidRequest."""
    functions = [tool.function for tool in body.tools or ()]
    names = [function.name for function in functions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(f"tools: the name {twice[0]!r} is given twice", param="tools")
    specs = [ToolSpec(function.name, _parameters(function)) for function in functions]
    choice = body.tool_choice
    if not specs and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice asks for a call, and no tools are given", param="tool_choice")
    if not reads_calls(body):
        return None
    parallel = body.parallel_tool_calls is not False
    if not isinstance(choice, NamedTool):
        return ToolPlan(tuple(specs), choice == "required", parallel)
    named = tuple(spec for spec in specs if spec.name == choice.name)
    if not named:
        known = ", ".join(map(repr, names))
        raise InvalidRequest(f"tool_choice names {choice.name!r}: the tools are {known}", param="tool_choice")
    return ToolPlan(named, must_call=True, parallel=False)


def _parameters(function: Function) -> dict[str, Any]:
    if function.parameters is None:
        return dict(_NO_PARAMETERS)
    if function.parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"tools: the parameters of {function.name!r} are no object's schema: expected type object", param="tools"
        )
    return {**function.parameters, "type": "object"}
