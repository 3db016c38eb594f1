"""Settings of the endpoint picker."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from settings.keys import InvalidSetting, Key, SettingsGroup, parse_size
from settings.node import HOST_PORT

__all__ = ["EndpointPickerSettings"]


@dataclass(frozen=True)
class EndpointPickerSettings(SettingsGroup):
    """The endpoints of a gateway's requests, and the limits on reading these."""

    panel: ClassVar[str] = "Endpoints"
    endpoints: Annotated[
        tuple[str, ...],
        Key(
            "host:port of an endpoint that serves OpenAI's API; a name stands for all of its addresses, as that of a "
            "headless service; may be given several times",
            default_text="required",
            flag="--endpoint",
        ),
    ] = ()
    picker_poll_s: Annotated[
        float, Key("Seconds between two polls of each endpoint's load and models", low=0.05, high=60, unit="s")
    ] = 1.0
    picker_slack: Annotated[
        int,
        Key(
            "Requests by which an endpoint may exceed 1.25 times the mean load before a dialogue leaves it",
            low=0,
            high=10**6,
        ),
    ] = 8
    picker_fallbacks: Annotated[
        int, Key("Further endpoints named for retries, if the gateway supports several", low=0, high=8)
    ] = 0
    picker_max_body_bytes: Annotated[
        int,
        Key("Largest request body", low=1, unit="bytes", parse=parse_size, default_text="16MiB"),
    ] = 16 << 20
    picker_max_bodies_bytes: Annotated[
        int,
        Key("Memory for the request bodies read at once", low=1, unit="bytes", parse=parse_size, default_text="1GiB"),
    ] = 1 << 30
    picker_body_timeout_s: Annotated[
        float, Key("Seconds within which a request's body must arrive", low=0.01, high=3600, unit="s")
    ] = 60.0
    picker_admission: Annotated[
        bool, Key("With --conductor: reject requests by its predictions before an endpoint receives them")
    ] = True
    picker_judgement_s: Annotated[
        float,
        Key(
            "Seconds within which the conductor must judge a request, which is sent unjudged otherwise",
            low=0.01,
            high=60,
            unit="s",
        ),
    ] = 1.0
    picker_tls_cert: Annotated[
        Path | None, Key("PEM file of the certificate shown to the gateway", default_text="no encryption")
    ] = None
    picker_tls_key: Annotated[Path | None, Key("PEM file of that certificate's private key, unencrypted")] = None

    def check(self) -> None:
        if not self.endpoints:
            raise InvalidSetting(
                "--endpoint is required: give host:port of the API servers, or of a name that stands for all of them"
            )
        for each in self.endpoints:
            found = HOST_PORT.fullmatch(each)
            if found is None or not 0 < int(found["port"]) <= 65535:
                raise InvalidSetting(f"--endpoint must be host:port, such as 10.0.0.5:8000, got {each!r}")
        if (self.picker_tls_cert is None) != (self.picker_tls_key is None):
            raise InvalidSetting("--picker-tls-cert and --picker-tls-key must be given together: encryption needs both")
