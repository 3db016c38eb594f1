"""What request models are made of: their base, the forms that one field may take, and what those are in JSON Schema."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

MAX_TOKEN_ID: Final = 2**31 - 1
MAX_PRIORITY: Final = 2**31 - 1
CLASS_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"  # of a class of objectives
MAX_TOP: Final = 20  # of the likeliest tokens told beside each token
_TOKEN_ID: Final = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}


def _listed(value: Any) -> Any:
    # Not a union of types: pydantic's errors would name the union's members as if they were fields.
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
    """A completions prompt in any of OpenAI's four forms as a list. Raises ValueError."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("expected a string, a list of token ids, or a list of either")
    if not value:
        raise ValueError("the prompt is empty")
    if all(type(item) is int for item in value):
        return [_token_ids(value)]
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) for item in value):
        return [_token_ids(item) for item in value]
    raise ValueError("expected a string, a list of token ids, or a list of either, not a mixture")


def _token_ids(value: list[Any]) -> list[int]:
    for item in value:
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise ValueError("a token id is an integer that is not negative")
    return value


def _biases(value: Any) -> dict[int, float]:
    """Biases by token id; JSON's keys are texts. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError("expected an object from token ids to biases")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
            raise ValueError(f"the key {key[:32]!r} is no token id: expected a text of digits")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {key} is no number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP)]
Stops = Annotated[
    list[str],  # how many there may be is a setting
    Field(fail_fast=True),
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
# By hand: pydantic would try a union of lists in every way, and report an error per token.
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                {"type": "array", "items": _TOKEN_ID, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1}, "minItems": 1},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_biases),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]


class RequestModel(BaseModel):
    """What all bodies have in common."""

    # Unknown fields are kept, to be looked up among those refused by name.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def parts(self) -> Iterable["RequestModel"]:
        """The model itself and the models directly inside it."""
        yield self
        for value in self.__dict__.values():
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, RequestModel):
                    yield item
