"""A live cluster serves what /openapi.json describes: Schemathesis derives valid and invalid requests from it.

No answer may be a server error, and every answer must have a status, a content type and a body that are described.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from playwright.async_api import expect
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.chromium import chromium, open_visit

pytestmark = pytest.mark.long

NANO = Path(__file__).parents[1] / "data" / "nano-model"
VOCABULARY = 2048
TIMEOUT_S = 60.0
POSTED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
GOT = (
    "/v1/models",
    "/v1/models/{name}",
    "/health",
    "/live",
    "/ready",
    "/validate",
    "/version",
    "/metrics",
    "/metrics/cluster",
    "/openapi.json",
)
# A sound body may ask for more than this cluster has, and a broken one may be one that a lenient server takes.
NOT_JUDGED = [positive_data_acceptance, negative_data_rejection]


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Any]) -> Iterator[Any]:
    """A short context bounds what any generated request can cost."""
    with start_cluster(NANO, "--block-tokens", "8", "--max-model-len", "256", "--max-queue", "600") as running:
        yield running


@pytest.fixture(scope="module")
def description(cluster: Any) -> Any:
    return schemathesis.openapi.from_url(f"{cluster.url}/openapi.json", timeout=TIMEOUT_S)


def attempt(operation: Any, mode: GenerationMode, examples: int, adapt: Callable[[Any], None]) -> Counter[int]:
    """Send what is generated, the same every time, and judge every answer; how many had which status."""
    statuses: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        adapt(case)
        statuses[case.call_and_validate(excluded_checks=NOT_JUDGED, timeout=TIMEOUT_S).status_code] += 1

    check()
    return statuses


def servable(case: Any) -> None:
    """Keep a sound body's structure and bring its values into this cluster's bounds, so that it reaches the workers."""
    case.headers.clear()  # objectives that nothing can meet
    body = case.body = whole_numbers(case.body)
    body.pop("model", None)
    for name in ("prompt", "tokens", "stop_token_ids"):
        if name in body:
            body[name] = known_tokens(body[name])
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(key) % VOCABULARY): value for key, value in body["logit_bias"].items()}
    for name, bound in {
        "n": 3,
        "best_of": 3,
        "max_tokens": 16,
        "max_completion_tokens": 16,
        "max_output_tokens": 16,
        "min_tokens": 4,
    }.items():
        if body.get(name):
            body[name] = 1 + body[name] % bound
    for message in body.get("messages") or []:
        message["content"] = message.get("content") or "What is it?"
        if message["role"] != "assistant":
            message.pop("tool_calls", None)


def whole_numbers(value: Any) -> Any:
    """JSON Schema takes 3.0 for an integer, this API does not."""
    if isinstance(value, dict):
        return {key: whole_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [whole_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def known_tokens(value: Any) -> Any:
    """Token ids of the vocabulary in place of all whole numbers."""
    if isinstance(value, list):
        return [known_tokens(one) for one in value]
    return value % VOCABULARY if isinstance(value, int) and not isinstance(value, bool) else value


def as_made(case: Any) -> None:
    """Nothing is changed."""


def test_every_operation_that_is_described_is_tried(description: Any) -> None:
    found = {(method, path) for path, item in description.raw_schema["paths"].items() for method in item}
    found = {(method, path) for method, path in found if method in ("get", "post", "put", "patch", "delete")}
    assert found == {("post", path) for path in POSTED} | {("get", path) for path in GOT}


@pytest.mark.parametrize("path", POSTED)
def test_sound_requests_are_served_as_described(description: Any, path: str) -> None:
    statuses = attempt(description[path]["POST"], GenerationMode.POSITIVE, 40, servable)
    assert statuses[200] >= 10, f"hardly any was served: {statuses}"


@pytest.mark.parametrize("path", POSTED)
def test_requests_out_of_this_clusters_bounds_are_answered_as_described(description: Any, path: str) -> None:
    assert attempt(description[path]["POST"], GenerationMode.POSITIVE, 20, as_made)


@pytest.mark.parametrize("path", POSTED)
def test_broken_requests_are_refused_as_described(description: Any, path: str) -> None:
    statuses = attempt(description[path]["POST"], GenerationMode.NEGATIVE, 40, as_made)
    assert statuses[400] >= 10, f"hardly any was refused: {statuses}"


@pytest.mark.parametrize("path", GOT)
def test_what_is_asked_for_is_answered_as_described(description: Any, path: str) -> None:
    assert attempt(description[path]["GET"], GenerationMode.POSITIVE, 5, as_made)


async def test_nothing_is_held_after_all_of_that(cluster: Any) -> None:
    await cluster.validate()


async def test_the_console_shows_the_cluster_and_the_path_of_a_request(
    cluster: Any, session: aiohttp.ClientSession
) -> None:
    body = {"prompt": list(range(5, 69)), "max_tokens": 6, "ignore_eos": True}
    async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
        assert response.status == 200
        request_id = (await response.json())["id"]
    async with chromium() as browser, open_visit(browser, f"{cluster.url}/console/") as visit:
        page = visit.page
        expect.set_options(timeout=60_000)
        await expect(page.locator(".pills")).to_contain_text("✓ serving")
        await expect(page.locator(".pills")).to_contain_text("✓ directory exact")
        await page.get_by_role("link", name="Nodes").click()
        for node, role in (("prefill-0", "prefill"), ("decode-0", "decode"), ("pool-0", "pool")):
            row = page.locator("tbody tr", has=page.get_by_text(node, exact=True))
            await expect(row).to_contain_text(f"{node}{role}")
            await expect(row).to_contain_text("✓ ready")
        await page.get_by_role("link", name="Requests").click()
        await page.get_by_label("Request id").fill(request_id)
        await page.get_by_role("button", name="Show path").click()
        path = page.locator(".path li")
        await expect(path.filter(has_text="Prefill on prefill-0").first).to_be_visible()
        await expect(path.filter(has_text="pushed the last KV to the decode node")).to_be_visible()
        await expect(path.filter(has_text="Decode on decode-0").first).to_be_visible()
        await expect(page.get_by_text("as measured by this frontend")).to_be_visible()
        await expect(page.get_by_text("6 tokens, in 1 attempt(s)")).to_be_visible()
        await page.get_by_role("link", name="KV pool").click()
        await expect(page.locator("tbody tr", has=page.get_by_text("memory", exact=True))).to_contain_text("EXACT")
        await visit.axe()
        await visit.fits()
