"""Frozen dataclasses that cost no more to make than others: a decision makes a dozen of them. Nothing else.

The `__init__` of a frozen dataclass sets each field by `object.__setattr__`, which takes four times as long as an
assignment. Here an instance is of a class with the same slots that is not frozen until its fields are set.
"""

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

__all__ = ["fast_dataclass"]

T = TypeVar("T")


def fast_dataclass(cls: type[T]) -> type[T]:
    """For a class made with `@dataclass(frozen=True, slots=True)`, without `__post_init__`, bases and factories."""
    own: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in own]
    is_plain = cls.__bases__ == (object,) and not hasattr(cls, "__post_init__") and cls.__dict__["__slots__"]
    if not is_plain or any(field.default_factory is not MISSING or not field.init for field in own):
        raise TypeError(f"{cls.__name__} is no plain frozen dataclass with slots")
    thawed = type(cls.__name__, (), {"__slots__": tuple(names)})
    space = {"_thawed": thawed, "_frozen": cls, "_set": object.__setattr__}
    space |= {f"_default_{field.name}": field.default for field in own if field.default is not MISSING}
    arguments = [name if f"_default_{name}" not in space else f"{name}=_default_{name}" for name in names]
    body = [
        "_set(self, '__class__', _thawed)",
        *(f"self.{name} = {name}" for name in names),
        "self.__class__ = _frozen",
    ]
    exec("\n    ".join([f"def __init__(self, {', '.join(arguments)}):", *body]), space)
    made: Any = space["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = cls.__init__.__annotations__
    cls.__init__ = made  # type: ignore[method-assign]
    return cls
