"""The tools that an answer may call, from the request's fields. Pure."""

from dataclasses import dataclass
from typing import Any, Final

from frontend.api.request_models import ChatBody, Function, NamedTool
from frontend.errors import InvalidRequest
from frontend.tool_formats import ToolSpec

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolPlan:
    """Callable tools. `must_call`: the answer consists only of calls; `parallel`: it may contain several."""

    specs: tuple[ToolSpec, ...]
    must_call: bool
    parallel: bool


def reads_calls(body: ChatBody) -> bool:
    """Return True if the answer's text is parsed for calls."""
    return bool(body.tools) and body.tool_choice != "none"


def tool_specs(body: ChatBody) -> tuple[ToolSpec, ...]:
    """Return the body's tools. Raises InvalidRequest for parameters that are no object."""
    functions = [tool.function for tool in body.tools or ()]
    return tuple(ToolSpec(each.name, _parameters(each), each.strict is True) for each in functions)


def tools_of(body: ChatBody) -> ToolPlan | None:
    """Return the body's tools; None if the answer may call none. Raises InvalidRequest."""
    names = [tool.function.name for tool in body.tools or ()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(f"tools must have unique names, got {twice[0]!r} twice", param="tools")
    specs = tool_specs(body)
    choice = body.tool_choice
    if not specs and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice requires a call, but no tools are given", param="tool_choice")
    if not reads_calls(body):
        return None
    parallel = body.parallel_tool_calls is not False
    if not isinstance(choice, NamedTool):
        return ToolPlan(specs, choice == "required", parallel)
    named = tuple(spec for spec in specs if spec.name == choice.name)
    if not named:
        known = ", ".join(map(repr, names))
        raise InvalidRequest(
            f"tool_choice must name one of the tools ({known}), got {choice.name!r}", param="tool_choice"
        )
    return ToolPlan(named, must_call=True, parallel=False)


def _parameters(function: Function) -> dict[str, Any]:
    if function.parameters is None:
        return dict(_NO_PARAMETERS)
    if function.parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"tools: the parameters of {function.name!r} must be a JSON Schema of type object", param="tools"
        )
    return {**function.parameters, "type": "object"}
