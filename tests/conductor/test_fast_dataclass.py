"""Frozen dataclasses with a quick `__init__` are what they were before, and others are refused."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, replace

import pytest

from jit.fast_dataclass import fast_dataclass


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    name: str = "p"


def test_fields_are_set_by_place_by_name_and_by_default():
    assert (Point(1), Point(1, 5), Point(x=1, name="q")) == (Point(1, 2, "p"), Point(1, 5, "p"), Point(1, 2, "q"))
    assert asdict(replace(Point(1), y=7)) == {"x": 1, "y": 7, "name": "p"}
    with pytest.raises(TypeError, match="x"):
        Point()


def test_an_instance_cannot_be_changed():
    point = Point(1)
    with pytest.raises(FrozenInstanceError):
        point.x = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del point.x


def test_type_equality_hash_signature_and_copies_are_those_of_the_class():
    point = Point(1)
    assert type(point) is Point
    assert hash(point) == hash(Point(1))
    assert repr(point) == "Point(x=1, y=2, name='p')"
    assert list(inspect.signature(Point).parameters) == ["x", "y", "name"]
    assert copy.copy(point) == pickle.loads(pickle.dumps(point)) == point


def test_what_the_quick_way_cannot_do_is_refused():
    @dataclass(frozen=True, slots=True)
    class WithFactory:
        items: list[int] = field(default_factory=list)

    @dataclass(frozen=True, slots=True)
    class WithMore:
        x: int

        def __post_init__(self) -> None: ...

    for cls in (WithFactory, WithMore):
        with pytest.raises(TypeError, match=cls.__name__):
            fast_dataclass(cls)
