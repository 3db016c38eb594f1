"""Models of one cluster: MODEL and additional ones, each with its own names and settings."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from moonpool.config.serve import TopologySettings
from moonpool.config.sources import convert, nearest
from settings.conductor import Objectives, PolicyConfig
from settings.frontend import HttpSettings
from settings.hub_model import parse_model
from settings.keys import InvalidSetting, Key, Setting, SettingsGroup, group_settings, plain
from settings.worker import EngineSettings, ModelSettings, name_of_model

_TOPOLOGY_KEYS = ("prefill_nodes", "decode_nodes", "aggregated")
_SLO_KEYS = ("ttft_slo", "tbt_slo")
_WINDOW_KEY = "endless_window"
_PARSER_KEYS = ("reasoning_parser", "tool_call_parser")
_NAMING = ("name", "path", "aliases")


@dataclass(frozen=True)
class ModelEntry:
    """One served model. `settings` holds its own values by YAML key, of keys in `model_settings()`."""

    name: str
    path: Path  # folder, or Hugging Face id
    aliases: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use, the model's own first."""
        return (self.name, *self.aliases)

    @classmethod
    def parse(cls, value: Any, source: str) -> "ModelEntry":
        """Parse "NAME=PATH,key=value,..." (NAME= is optional, alias=NAME may be repeated) or a mapping.

        Raises InvalidSetting that names `source`, the model and the key.
        """
        if isinstance(value, str):
            value = _mapping(value, source)
        if not isinstance(value, dict):
            raise InvalidSetting(f"{source} must be NAME=PATH or a mapping with path, got {value!r}")
        path = value.get("path")
        if not isinstance(path, str) or not path.strip():
            raise InvalidSetting(f"{source} must have a path, the model's folder or Hugging Face id, got {value!r}")
        try:
            folder = parse_model(path)
        except ValueError as error:
            raise InvalidSetting(f"{source}: path {error}") from None
        name = value.get("name") or name_of_model(folder)
        where = f"{source}: model {name!r}"
        aliases = value.get("aliases") or []
        aliases = [aliases] if isinstance(aliases, str) else aliases
        if not isinstance(name, str) or not isinstance(aliases, list) or not all(isinstance(a, str) for a in aliases):
            raise InvalidSetting(f"{where}: name must be a string, and aliases a list of strings")
        if not all(text.strip() for text in (name, *aliases)):
            raise InvalidSetting(f"{where}: names and aliases must not be empty")
        settings = {key: _setting(key, given, where) for key, given in value.items() if key not in _NAMING}
        entry = cls(name, folder, tuple(aliases), settings)
        try:
            entry.topology(TopologySettings())
            entry.engine(EngineSettings())
        except InvalidSetting as error:
            raise InvalidSetting(f"{where}: {error}") from error
        return entry

    def plain(self) -> dict[str, Any]:
        """Return the entry as plain YAML; `parse` restores it."""
        return {"name": self.name, "path": str(self.path), "aliases": list(self.aliases), **self.plain_settings}

    @property
    def plain_settings(self) -> dict[str, Any]:
        """The entry's own settings as plain YAML."""
        declared = model_settings()
        return {key: plain(declared[key], value) for key, value in self.settings.items()}

    def topology(self, cluster: TopologySettings) -> TopologySettings:
        """Number of workers of each role: the cluster's, unless the entry sets any of its own."""
        own = {key: self.settings[key] for key in _TOPOLOGY_KEYS if key in self.settings}
        return TopologySettings(**own, pool_nodes=cluster.pool_nodes) if own else cluster

    def engine(self, cluster: EngineSettings) -> EngineSettings:
        """The cluster's engine settings with the entry's own."""
        own = {key: self.settings[key] for key in group_settings(EngineSettings) if key in self.settings}
        return replace(cluster, **{group_settings(EngineSettings)[key].field: value for key, value in own.items()})

    @property
    def endless_window(self) -> int | None:
        """The entry's own window of endless requests that do not name theirs; None: the cluster's."""
        return self.settings.get(_WINDOW_KEY)

    @property
    def parsers(self) -> tuple[str | None, str | None]:
        """The entry's own parsers of reasoning and of tool calls; None: the cluster's."""
        reasoning, tool_calls = (self.settings.get(key) for key in _PARSER_KEYS)
        return reasoning, tool_calls

    @property
    def objectives(self) -> Objectives:
        """The entry's own objectives."""
        return Objectives(*(self.settings.get(key) for key in _SLO_KEYS))


@dataclass(frozen=True)
class FurtherModels(SettingsGroup):
    """Models in addition to MODEL."""

    panel: ClassVar[str] = "Model"
    models: Annotated[
        tuple[ModelEntry, ...],
        Key(
            "Additional model: NAME=PATH[,alias=NAME][,key=value...]; may be given several times. Its keys override "
            "the cluster's numbers of workers, engine settings, objectives, endless window and parsers. Without MODEL, "
            "only these are served",
            flag="--add-model",
            item=ModelEntry,
        ),
    ] = ()


def served_models(model: ModelSettings, further: FurtherModels) -> tuple[ModelEntry, ...]:
    """All models; a request that names none uses the first. Raises InvalidSetting if names are not unique."""
    first = () if further.models and model.model is None else (ModelEntry(model.name, model.path, model.aliases),)
    if not first and model.served_model_name:
        raise InvalidSetting(
            f"--served-model-name {model.served_model_name[0]!r} needs MODEL: for models of --add-model, give the "
            "names there"
        )
    entries = (*first, *further.models)
    owners: dict[str, ModelEntry] = {}
    for entry in entries:
        for name in entry.names:
            if name in owners:
                raise InvalidSetting(
                    f"the name {name!r} is given twice: to {_described(owners[name], name)} and to "
                    f"{_described(entry, name)}; names and aliases of all models must differ"
                )
            owners[name] = entry
    return entries


def model_settings() -> dict[str, Setting]:
    """Settings for which a model can have a value of its own, by YAML key."""
    topology, slo, http = (group_settings(group) for group in (TopologySettings, PolicyConfig, HttpSettings))
    return {
        **{key: topology[key] for key in _TOPOLOGY_KEYS},
        **{key: slo[key] for key in _SLO_KEYS},
        **{key: http[key] for key in (_WINDOW_KEY, *_PARSER_KEYS)},
        **group_settings(EngineSettings),
    }


def node_prefixes(entries: tuple[ModelEntry, ...]) -> Iterator[tuple[ModelEntry, str]]:
    """Yield each model with the prefix of its workers' node ids: "" for the first, a short name for the others."""
    used = {""}
    for index, entry in enumerate(entries):
        short = re.sub(r"[^A-Za-z0-9._]+", "-", entry.name).strip("-")[:12] if index else ""
        if index and short in used:
            short = f"{short[:8]}-{index}"
        used.add(short)
        yield entry, f"{short}-" if short else ""


def _mapping(text: str, source: str) -> dict[str, Any]:
    first, *rest = text.split(",")
    name, equals, path = first.partition("=")
    value: dict[str, Any] = {"name": name.strip(), "path": path.strip()} if equals else {"path": first.strip()}
    if equals and not name.strip():
        raise InvalidSetting(f"{source} must have a name before the =, got {text!r}")
    for part in rest:
        key, equals, given = (side.strip() for side in part.partition("="))
        if not equals:
            raise InvalidSetting(f"{source} must have parts key=value, got {part!r} in {text!r}")
        if key == "alias":
            value.setdefault("aliases", []).append(given)
        elif key in value:
            raise InvalidSetting(f"{source}: {key} is given twice in {text!r}")
        else:
            value[key.replace("-", "_")] = given
    return value


def _setting(key: str, value: Any, where: str) -> Any:
    declared = model_settings()
    if key not in declared:
        guess = nearest(str(key), [*_NAMING, *declared])
        hint = f"; did you mean {guess}?" if guess else f"; expected one of {', '.join(declared)}"
        raise InvalidSetting(f"{where}: {key!r} is not a setting of a model{hint}")
    return convert(declared[key], value, f"{where}: {key}")


def _described(entry: ModelEntry, name: str) -> str:
    return f"the model in {entry.path}" + ("" if name == entry.name else f" ({entry.name!r}) as an alias")
