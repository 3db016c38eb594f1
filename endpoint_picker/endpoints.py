"""The endpoints that there are now, their load, and the models that they serve.

Names are resolved and each endpoint is polled over HTTP at `/metrics` and `/v1/models`, which Moonpool's API servers
and vLLM have. An endpoint to which no connection can be made gets no request; one that accepts connections but does not
answer in time gets none as long as another one answers.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import aiohttp

from endpoint_picker.choice import EndpointLoad
from frontend.errors import ModelNotServed, ServiceUnavailable
from settings.endpoint_picker import EndpointPickerSettings
from settings.node import HOST_PORT
from telemetry.limited_log import LimitedLog

__all__ = ["EndpointUse", "EndpointWatch", "requests_in"]

log = logging.getLogger(__name__)

_POLL_TIMEOUT_S: Final = 2.0
_CONNECT_TIMEOUT_S: Final = 1.0
_MOST_POLLS: Final = 32  # at once
_MOST_NBYTES: Final = 8 << 20  # of a page
# Beginnings of the gauges of requests: of one of Moonpool's API servers; else of a vLLM, whose sum counts.
_API_SERVER_METRICS: Final = ("moonpool:requests_in_flight{", "moonpool:requests_in_flight ")
_ENGINE_METRICS: Final = tuple(
    f"vllm:num_requests_{state}{end}" for state in ("running", "waiting") for end in ("{", " ")
)


# "slow": it accepts connections, but did not answer the last poll in time.
_State = Literal["reachable", "slow", "unreachable"]


class _Endpoint:
    """One address and what is known of it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.models: frozenset[str] | None = None  # None: it does not say
        self.state: _State = "reachable"
        self.num_open = 0  # exchanges that this picker has sent to it
        self._reported = 0  # requests at the last poll
        self._change = 0  # of this picker's own exchanges since that poll began

    @property
    def num_requests(self) -> int:
        """Requests that it has: those of the last poll and those of this picker since then."""
        return max(self.num_open, self._reported + self._change)

    def count(self, change: int) -> None:
        """Add an exchange of this picker, or remove one."""
        self.num_open += change
        self._change += change

    async def poll(self, http: aiohttp.ClientSession) -> None:
        """Ask for its load and its models; what it does not say stays as it was."""
        before = self._change
        try:
            if (text := await _get(http, f"http://{self.address}/metrics")) is not None:
                found = requests_in(text)
                if found is not None:
                    self._reported, self._change = found, self._change - before
            if (text := await _get(http, f"http://{self.address}/v1/models")) is not None:
                self.models = _models_in(text)
            self.state = "reachable"
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            self.state = "unreachable"
        except TimeoutError:
            self.state = "slow"
        except aiohttp.ClientError:
            self.state = "reachable"  # it accepts connections, but speaks TLS, for instance


@dataclass(slots=True)
class EndpointUse:
    """The endpoints named for one exchange, of which the first counts as used. Always call `end`; only once counts."""

    addresses: tuple[str, ...]
    _used: _Endpoint | None
    _watch: "EndpointWatch"

    def served_by(self, address: str) -> None:
        """Count the exchange for the endpoint that the gateway used in the end."""
        served = self._watch.find(address)
        if served is not None and self._used is not None and served is not self._used:
            self._used.count(-1)
            served.count(1)
            self._used = served

    def end(self) -> None:
        """Count the exchange as ended."""
        if self._used is not None:
            self._used.count(-1)
            self._used = None


class EndpointWatch:
    """Poller of the endpoints. Lives on the event loop."""

    def __init__(self, settings: EndpointPickerSettings) -> None:
        self._named = settings.endpoints
        self._interval_s = settings.picker_poll_s
        self._endpoints: dict[str, _Endpoint] = {}
        self._last: dict[str, list[str]] = {}  # addresses by name
        self._unresolved = LimitedLog(log)
        self._task: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Poll once, successfully or not, then go on in the background."""
        timeout = aiohttp.ClientTimeout(total=_POLL_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S)
        self._http = aiohttp.ClientSession(timeout=timeout)
        await self._poll(self._http)
        self._task = asyncio.create_task(self._keep_polling(self._http), name="endpoint watch")

    async def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    @property
    def is_ready(self) -> bool:
        """True if an endpoint can be reached."""
        return any(each.state != "unreachable" for each in self._endpoints.values())

    def counts(self) -> Iterator[tuple[str, int]]:
        """Yield (state, number of endpoints in it)."""
        for state in get_args(_State):
            yield state, sum(each.state == state for each in self._endpoints.values())

    def find(self, address: str) -> _Endpoint | None:
        """Return the endpoint of this address; None if there is none."""
        return self._endpoints.get(address)

    def loads(self, model: str, subset: frozenset[str] | None) -> list[EndpointLoad]:
        """Return the endpoints that may serve a request for the model, "" for any, with their load.

        `subset`: addresses to which the gateway limits the choice. Raises ServiceUnavailable if there are none, and
        ModelNotServed if all endpoints say what they serve and none serves the model.
        """
        found = list(self._endpoints.values())
        if model and found and all(each.models is not None and model not in each.models for each in found):
            served = ", ".join(sorted({repr(name) for each in found for name in each.models or ()}))
            raise ModelNotServed(f"the model {model!r} is not served here; served models: {served}", param="model")
        found = [each for each in found if subset is None or each.address in subset]
        found = [each for each in found if not model or each.models is None or model in each.models]
        if not found:
            where = "" if subset is None else f" among the {len(subset)} that the gateway allows"
            raise _no_endpoint(f"no endpoint for the model {model!r}{where}" if model else f"no endpoint{where}")
        for state in ("reachable", "slow"):
            if chosen := [each for each in found if each.state == state]:
                return [EndpointLoad(each.address, each.num_requests) for each in chosen]
        raise _no_endpoint(f"none of the {len(found)} endpoints can be reached")

    def use(self, addresses: Sequence[str]) -> EndpointUse:
        """Count an exchange for the first of the addresses, best first, that are named to the gateway."""
        first = self._endpoints.get(addresses[0])
        if first is not None:
            first.count(1)
        return EndpointUse(tuple(addresses), first, self)

    async def _keep_polling(self, http: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._poll(http)
            except Exception:
                log.exception("polling the endpoints failed")

    async def _poll(self, http: aiohttp.ClientSession) -> None:
        resolved = await asyncio.gather(*(self._addresses(each) for each in self._named))
        addresses = list(dict.fromkeys(address for found in resolved for address in found))
        self._endpoints = {address: self._endpoints.get(address) or _Endpoint(address) for address in addresses}
        limit = asyncio.Semaphore(_MOST_POLLS)

        async def poll(endpoint: _Endpoint) -> None:
            async with limit:
                await endpoint.poll(http)

        await asyncio.gather(*(poll(each) for each in self._endpoints.values()))

    async def _addresses(self, named: str) -> list[str]:
        """Return the addresses for which host:port stands; those of the last time if it cannot be resolved now."""
        matched = HOST_PORT.fullmatch(named)
        assert matched is not None  # checked by the settings
        host, port = matched["host"].strip("[]"), int(matched["port"])
        with contextlib.suppress(ValueError):
            return [_address(str(ipaddress.ip_address(host)), port)]
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            # A headless service without ready pods has no address.
            if error.errno not in (socket.EAI_NONAME, socket.EAI_NODATA):
                self._unresolved.warning("%s cannot be resolved, its last addresses are used: %s", named, error)
                return self._last.get(named, [])
            found = []
        addresses = sorted({_address(str(info[4][0]), port) for info in found})
        self._last[named] = addresses
        return addresses


def requests_in(metrics: str) -> int | None:
    """Return the number of requests that a page of Prometheus metrics reports; None if it reports none.

    It is that of Moonpool's API server if the page has it, since it may have series of a whole cluster beside it.
    """
    for names in (_API_SERVER_METRICS, _ENGINE_METRICS):
        values = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith(names)]
        with contextlib.suppress(ValueError, OverflowError):  # as for NaN and +Inf
            if values:
                return round(sum(map(float, values)))
    return None


def _models_in(text: str) -> frozenset[str] | None:
    try:
        cards = json.loads(text)["data"]
        return frozenset(str(card["id"]) for card in cards)
    except (ValueError, TypeError, KeyError):
        return None


async def _get(http: aiohttp.ClientSession, url: str) -> str | None:
    """Return the answer's text; None unless it is 200."""
    async with http.get(url) as response:
        if response.status != 200:
            return None
        content = bytearray()
        async for chunk in response.content.iter_chunked(64 << 10):
            content += chunk
            if len(content) > _MOST_NBYTES:
                return None
        return content.decode("utf-8", "replace")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _no_endpoint(problem: str) -> ServiceUnavailable:
    return ServiceUnavailable(f"{problem}; retry later", code="no_endpoint", retry_after_s=1.0)
