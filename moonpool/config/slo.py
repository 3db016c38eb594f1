"""The configuration keys of the record of objectives: what gives its first version, and where versions are kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from moonpool.config.fields import Key, Slice
from moonpool.errors import ConfigError


@dataclass(frozen=True)
class SloSettings(Slice):
    """Objectives by class, tenant and model."""

    panel: ClassVar[str] = "Scheduling"
    slo_file: Annotated[
        Path | None,
        Key(
            "YAML file with the first version of all objectives, in place of --ttft-slo and --tbt-slo",
            default_text="none",
        ),
    ] = None
    slo_force: Annotated[
        bool,
        Key("Have the configured objectives become a new version at each start that finds others in force"),
    ] = False
    slo_dir: Annotated[
        Path | None,
        Key("Folder for versions of the objectives, without Redis", default_text="objectives in --state-dir"),
    ] = None

    def check(self) -> None:
        try:
            is_there = self.slo_file is None or self.slo_file.is_file()
        except OSError:  # a name that cannot be one
            is_there = False
        if not is_there:
            raise ConfigError(f"--slo-file is {str(self.slo_file)!r}: there is no such file")
