"""Frozen dataclasses that are as cheap to create as mutable ones; a decision creates a dozen of them.

The `__init__` of a frozen dataclass sets each field with `object.__setattr__`, which takes four times as long as an
assignment. The generated `__init__` gives the instance a mutable class with the same slots while it sets the fields.
"""

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

__all__ = ["fast_dataclass"]

T = TypeVar("T")


def fast_dataclass(cls: type[T]) -> type[T]:
    """Replace the `__init__` of a `@dataclass(frozen=True, slots=True)` by a faster one.

    Raises TypeError if the class has a base class, `__post_init__`, default factories or fields with `init=False`.
    """
    own: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in own]
    is_plain = cls.__bases__ == (object,) and not hasattr(cls, "__post_init__") and cls.__dict__["__slots__"]
    if not is_plain or any(field.default_factory is not MISSING or not field.init for field in own):
        raise TypeError(f"{cls.__name__} must be a plain frozen dataclass with slots")
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
