"""Files of profiles: JSON with a format and a version, parsed strictly."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from worker.errors import ProfileError

STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

P = TypeVar("P")


@dataclass(frozen=True)
class ProfileFile(Generic[P]):
    """A kind of profile file: its name in messages, its format, the dataclass in it, and the command that makes one."""

    kind: str
    format: str
    version: int
    profile: type[P]
    command: str

    def load(self, path: Path) -> P:
        """Read a file. Raises ProfileError, which names the file, the field, the value and the expected value."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"{self.kind} {path} cannot be read: {error}") from error
        try:
            read: Any = self._model.model_validate_json(text)
        except ValidationError as error:
            raise ProfileError(f"{self.kind} {path}: {self._first_problem(error)}") from None
        profile: P = read.profile
        return profile

    def save(self, profile: P, path: Path) -> None:
        """Write a file; `load` reads back an equal profile. Raises ProfileError."""
        text = self._model(format=self.format, version=self.version, profile=profile).model_dump_json(indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ProfileError(f"{self.kind} {path} cannot be written: {error}") from error

    @cached_property
    def _model(self) -> type[BaseModel]:
        fields: dict[str, Any] = {
            "format": (Literal[self.format], ...),
            "version": (Literal[self.version], ...),
            "profile": (self.profile, ...),
        }
        return create_model("ProfileContents", __config__=STRICT, **fields)

    def _first_problem(self, error: ValidationError) -> str:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "json_invalid":
            return f"not JSON ({first['msg']}); make one with `{self.command}`"
        found = "" if first["type"] == "missing" else f", got {str(first['input'])[:60]!r}"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        return f"{where}: {first['msg']}{found}{more}"
