"""Which models one cluster serves: MODEL and the further ones, each with names and with settings of its own."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from moonpool.config.fields import Key, Setting, Slice, slice_settings
from moonpool.config.scheduling import SchedulingSettings
from moonpool.config.slices import (
    EngineSettings,
    ModelSettings,
    TopologySettings,
    name_of_folder,
)
from moonpool.config.sources import convert, nearest
from moonpool.errors import ConfigError

_TOPOLOGY_KEYS = ("prefill_nodes", "decode_nodes", "aggregated")
_SLO_KEYS = ("ttft_slo", "tbt_slo")
_NAMING = ("name", "path", "aliases")


@dataclass(frozen=True)
class ModelEntry:
    """One served model. `settings` are those in which it differs from the cluster's: any of `model_settings()`."""

    name: str
    path: Path
    aliases: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may use, the name first."""
        return (self.name, *self.aliases)

    @classmethod
    def parse(cls, value: Any, source: str) -> "ModelEntry":
        """From "NAME=PATH,key=value,..." (NAME= may be left out, alias=NAME given often) or from a mapping.

        Raises ConfigError naming `source`, the model and the key.
        """
        if isinstance(value, str):
            value = _mapping(value, source)
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: a model is NAME=PATH or a mapping with path, not {value!r}")
        path = value.get("path")
        if not isinstance(path, str) or not path.strip():
            raise ConfigError(f"{source}: a model needs a path, its Hugging Face folder; found {value!r}")
        folder = Path(path).expanduser()
        name = value.get("name") or name_of_folder(folder)
        where = f"{source}: model {name!r}"
        aliases = value.get("aliases") or []
        aliases = [aliases] if isinstance(aliases, str) else aliases
        if not isinstance(name, str) or not isinstance(aliases, list) or not all(isinstance(a, str) for a in aliases):
            raise ConfigError(f"{where}: name must be a text and aliases a list of texts")
        if not all(text.strip() for text in (name, *aliases)):
            raise ConfigError(f"{where}: a name or alias is empty")
        settings = {key: _setting(key, given, where) for key, given in value.items() if key not in _NAMING}
        entry = cls(name, folder, tuple(aliases), settings)
        try:
            entry.topology(TopologySettings())
            entry.engine(EngineSettings())
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        return entry

    def plain(self) -> dict[str, Any]:
        """As plain YAML can hold it."""
        return {"name": self.name, "path": str(self.path), "aliases": list(self.aliases), **self.settings}

    def topology(self, cluster: TopologySettings) -> TopologySettings:
        """How many workers of each role: the cluster's numbers, unless the entry names any of its own."""
        own = {key: self.settings[key] for key in _TOPOLOGY_KEYS if key in self.settings}
        return TopologySettings(**own, pool_nodes=cluster.pool_nodes) if own else cluster

    def engine(self, cluster: EngineSettings) -> EngineSettings:
        """How its workers compute."""
        return replace(
            cluster, **{key: self.settings[key] for key in slice_settings(EngineSettings) if key in self.settings}
        )

    @property
    def objectives(self) -> tuple[float | None, float | None]:
        """(TTFT, TBT) in seconds; 0 = off, None = the cluster's."""
        ttft_s, tbt_s = (self.settings.get(key) for key in _SLO_KEYS)
        return ttft_s, tbt_s


@dataclass(frozen=True)
class FurtherModels(Slice):
    """Models beside MODEL."""

    panel: ClassVar[str] = "Model"
    models: Annotated[
        tuple[ModelEntry, ...],
        Key(
            "A further model: NAME=PATH[,alias=NAME][,key=value...]; may be given several times; without MODEL these "
            "are all. Keys: workers, engine and objectives, else the cluster's",
            flag="--add-model",
            item=ModelEntry,
        ),
    ] = ()


def served_models(model: ModelSettings, further: FurtherModels) -> tuple[ModelEntry, ...]:
    """All models, the one that requests without a name go to first. Raises ConfigError when names are not unique."""
    first = () if further.models and model.model is None else (ModelEntry(model.name, model.path, model.aliases),)
    if not first and model.served_model_name:
        raise ConfigError(
            f"--served-model-name {model.served_model_name[0]!r} names no model: give it with MODEL, "
            "or name the models of --add-model there"
        )
    entries = (*first, *further.models)
    owners: dict[str, ModelEntry] = {}
    for entry in entries:
        for name in entry.names:
            if name in owners:
                raise ConfigError(
                    f"the name {name!r} is given twice: to {_told(owners[name], name)} and to {_told(entry, name)}; "
                    "names and aliases of all models must differ"
                )
            owners[name] = entry
    return entries


def model_settings() -> dict[str, Setting]:
    """The keys that a model can have a value of its own for."""
    topology, slo = slice_settings(TopologySettings), slice_settings(SchedulingSettings)
    return {
        **{key: topology[key] for key in _TOPOLOGY_KEYS},
        **{key: slo[key] for key in _SLO_KEYS},
        **slice_settings(EngineSettings),
    }


def node_prefixes(entries: tuple[ModelEntry, ...]) -> Iterator[tuple[ModelEntry, str]]:
    """Each model with what its workers' node ids begin with: nothing for the first, for others the name made short."""
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
        raise ConfigError(f"{source}: {text!r} names no model before the =")
    for part in rest:
        key, equals, given = (side.strip() for side in part.partition("="))
        if not equals:
            raise ConfigError(f"{source}: {part!r} in {text!r} is no key=value")
        if key == "alias":
            value.setdefault("aliases", []).append(given)
        elif key in value:
            raise ConfigError(f"{source}: {key} is given twice in {text!r}")
        else:
            value[key.replace("-", "_")] = given
    return value


def _setting(key: str, value: Any, where: str) -> Any:
    declared = model_settings()
    if key not in declared:
        guess = nearest(str(key), [*_NAMING, *declared])
        hint = f"; did you mean {guess}?" if guess else f"; it can have {', '.join(declared)}"
        raise ConfigError(f"{where}: {key!r} is no key of a model{hint}")
    return convert(declared[key], value, f"{where}: {key}")


def _told(entry: ModelEntry, name: str) -> str:
    return f"the model in {entry.path}" + ("" if name == entry.name else f" ({entry.name!r}) as an alias")
