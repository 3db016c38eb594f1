"""Limit on the nesting of YAML files, checked before PyYAML's own parser, whose time grows faster than the nesting."""

from collections.abc import Iterator
from typing import Final

import yaml

MOST_NESTED: Final = 32

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser takes linear time


class NestedTooDeeply(ValueError):
    """The text has more than `MOST_NESTED` levels of mappings and lists."""


def events_of(text: str) -> Iterator[yaml.Event]:
    """Yield the parser's events. Raises NestedTooDeeply, or yaml.YAMLError."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_NESTED:
            raise NestedTooDeeply(f"mappings and lists must be nested at most {MOST_NESTED} levels deep")
        yield event
