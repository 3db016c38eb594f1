"""Base of the request bodies, and limits of their numbers."""

from collections.abc import Iterable
from typing import Final

from pydantic import BaseModel, ConfigDict

MAX_TOKEN_ID: Final = 2**31 - 1
MAX_PRIORITY: Final = 2**31 - 1


class RequestModel(BaseModel):
    """Base of all request bodies."""

    # Unknown fields are kept, so that unsupported ones can be rejected by name.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def parts(self) -> Iterable["RequestModel"]:
        """Yield the model itself and the models directly inside it."""
        yield self
        for value in self.__dict__.values():
            if value is None:  # as most fields are
                continue
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, RequestModel):
                    yield item
