"""The console's pictures and lists in a real browser: a request's path to scale, the feed of decisions, sessions,
and the pool by model and tenant."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from frontend.request import HandoffBreakdown, TtftBreakdown
from moonpool_proto.v1 import conductor_pb2
from tests.chromium import chromium, open_visit

WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)
pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]  # one browser for all

TTFT = TtftBreakdown(0.004, 0.0, 0.003, 0.0, 0.081, 0.048, 0.262, 0.006)
HANDOFF = HandoffBreakdown(0.031, 0.009, 0.019, 0.002)
MEASURED = {
    "request_id": "cmpl-1",
    "at_s": 1.0,
    "model": "tiny",
    "outcome": "finished",
    "seconds": 3.61,
    "attempts": 1,
    "prompt_tokens": 852,
    "generated": 131,
    "cached_tokens": 192,
    "cached_from": {"memory": 128, "ssd": 48, "remote": 0},
    "prefill": "prefill-1",
    "decode": "decode-1",
    "ttft": dict(TTFT.parts()),
    "handoff": dict(HANDOFF.parts()),
    "tbt_s": 0.0247,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


async def measure(page: Page) -> None:
    """Let the frontend have measured the request cmpl-1; the conductors' part is their own."""

    async def answer(route: Route) -> None:
        response = await route.fetch()
        await route.fulfill(response=response, body=json.dumps(await response.json() | {"front_door": MEASURED}))

    await page.route("**/console/api/requests/cmpl-1", answer)


async def widths(page: Page, kind: str) -> list[float]:
    """Widths of the picture's bars of a kind, from left to right."""
    bars = await page.locator(f".diagram rect.bar-{kind}").evaluate_all(
        "bars => bars.map(bar => [Number(bar.getAttribute('x')), Number(bar.getAttribute('width'))])"
    )
    return [width for _, width in sorted(bars)]


def session(number: int, parent: int = 0) -> conductor_pb2.Session:
    return conductor_pb2.Session(id=number, parent_id=parent)


@pytest.mark.parametrize("window", [WIDE, NARROW], ids=["wide", "narrow"])
async def test_a_requests_path_is_a_picture_to_scale(
    open_bed: Any, browser: Browser, tmp_path: Any, window: Any
) -> None:
    async with open_bed(ttft_slo_s=2.0, decision_log=tmp_path / "log") as bed:
        await bed.join_usual()
        await bed.serve("cmpl-1", ttft_s=0.404, tenant="acme", session=session(5))
        await bed.serve("cmpl-rejected", prompt=4000, ttft_objective_s=0.000001)
        async with open_visit(browser, f"{bed.url}/console/", window=window) as visit:
            page = visit.page
            await measure(page)
            await page.evaluate("() => { location.hash = '#/requests/cmpl-1' }")
            picture = page.get_by_role("img", name="Timeline of the request")
            await expect(picture).to_be_visible()
            await expect(picture).to_have_attribute(
                "aria-label",
                "Timeline of the request, 3.61 s, first token after 404 ms, prefill on prefill-1, decode on decode-1. "
                "The list of steps has the same times.",
            )
            for lane in ("Frontend", "Conductor", "Prefill on prefill-1", "KV push", "Decode on decode-1"):
                await expect(picture.get_by_text(lane, exact=True)).to_be_visible()
            queue_px, _ = await widths(page, "wait")
            load_px, push_px = await widths(page, "move")
            (overlap_px,) = await widths(page, "overlap")
            assert load_px / queue_px == pytest.approx(48 / 81, rel=0.02)
            assert push_px / queue_px == pytest.approx(31 / 81, rel=0.02)
            assert overlap_px / queue_px == pytest.approx(262 / 81, rel=0.02)
            await expect(picture.get_by_text("Whole request: 3.61 s. Below, its first 465 ms")).to_be_visible()
            steps = page.locator("ol.path li")
            await expect(steps).to_have_count(11)
            await expect(steps.nth(3)).to_contain_text(
                "128 tokens from its pool node's memory, 48 tokens from its pool"
            )
            await expect(page.locator("tbody tr", has=page.get_by_text("chosen"))).to_contain_text("prefill-0")
            await visit.axe()
            await visit.fits()
            drawn_px = int(await picture.get_attribute("width") or 0)
            await page.set_viewport_size({"width": 700, "height": 800})
            await expect(picture).not_to_have_attribute("width", str(drawn_px))  # it is drawn again
            await visit.fits()
            await page.get_by_role("link", name="cmpl-rejected").click()
            await expect(page.get_by_text("none was chosen")).to_be_visible()
            await expect(picture).to_have_count(0)


async def test_without_the_frontends_times_the_picture_shows_the_workers_reports(
    open_bed: Any, browser: Browser
) -> None:
    async with open_bed() as bed:
        await bed.join_usual()
        await bed.serve("cmpl-1")
        async with open_visit(browser, f"{bed.url}/console/#/requests/cmpl-1") as visit:
            page = visit.page
            await expect(page.get_by_text("as reported by the workers to the conductor")).to_be_visible()
            await expect(page.get_by_role("img", name="Timeline of the request")).to_be_visible()
            await expect(page.locator("ol.path li").first).to_contain_text("placed it, until a worker began")


async def test_the_feed_shows_decisions_filters_them_and_stands_still_while_it_is_paused(
    open_bed: Any, browser: Browser
) -> None:
    async with open_bed() as bed:
        await bed.join_usual()
        await bed.serve("cmpl-acme", tenant="acme", ttft_s=0.4)
        await bed.place("cmpl-long", prompt=100_000, tenant="globex")
        async with open_visit(browser, f"{bed.url}/console/#/requests", window=WIDE) as visit:
            page = visit.page
            rows = page.locator("tbody tr")
            await expect(rows).to_have_count(2)
            long = page.locator("tbody tr", has=page.get_by_text("cmpl-long"))
            await expect(long).to_contain_text("rejected: too_long")
            await expect(page.locator("tbody tr", has=page.get_by_text("cmpl-acme"))).to_contain_text("→ 400 ms")
            await page.get_by_label("Tenant").select_option("globex")
            await expect(rows).to_have_count(1)
            await page.get_by_label("Tenant").select_option("")
            await page.get_by_label("Outcome").select_option("placed")
            await expect(rows).to_have_count(1)
            await expect(rows).to_contain_text("cmpl-acme")
            await page.get_by_label("Outcome").select_option("")
            await page.get_by_role("button", name="Pause").focus()
            await page.keyboard.press("Enter")
            resume = page.get_by_role("button", name="Resume")
            await expect(resume).to_have_attribute("aria-pressed", "true")
            await bed.serve("cmpl-new", tenant="acme")
            await expect(page.get_by_text("paused, 1 new since")).to_be_visible()
            await expect(rows).to_have_count(2)
            await visit.axe()
            await expect(resume).to_be_focused()
            await page.keyboard.press("Enter")
            await expect(rows).to_have_count(3)
            await expect(rows.first).to_contain_text("cmpl-new")


async def test_decisions_that_come_too_fast_for_the_feed_are_counted(open_bed: Any, browser: Browser) -> None:
    async with open_bed() as bed:
        await bed.join_usual()
        aborted = "Failed to load resource: net::ERR_FAILED"
        async with open_visit(browser, f"{bed.url}/console/#/requests", window=WIDE, expects=(aborted,)) as visit:
            page = visit.page
            await expect(page.get_by_text("No request has been decided yet, or none matches.")).to_be_visible()
            await page.route("**/console/api/state", lambda route: route.abort())
            for number in range(100):
                await bed.place(f"cmpl-{number}", prompt=100_000)
            await page.unroute("**/console/api/state")
            await expect(page.get_by_text("36 more decisions were made faster than the feed follows")).to_be_visible()
            await expect(page.get_by_text("64 of the last 64 requests shown")).to_be_visible()


async def test_decisions_before_a_conductors_first_answer_are_not_counted_as_missed(
    open_bed: Any, browser: Browser
) -> None:
    other: dict[str, Any] = {"target": "other:7000", "incarnation": "", "decided": None}

    async def answer(route: Route) -> None:
        response = await route.fetch()
        state = await response.json()
        state["conductors"].append({**state["conductors"][0], **other})
        await route.fulfill(response=response, body=json.dumps(state))

    async def is_shown(page: Page) -> None:
        """Wait until the page shows a state that was requested from now on."""
        for _ in range(2):
            async with page.expect_response("**/console/api/state") as seen:
                pass
            await (await seen.value).finished()

    async with open_bed() as bed:
        await bed.join_usual()
        async with open_visit(browser, f"{bed.url}/console/#/requests", window=WIDE) as visit:
            page = visit.page
            missed = page.get_by_text("more decisions were made faster than the feed follows")
            await page.route("**/console/api/state", answer)
            await is_shown(page)
            for decided, incarnation in ((5000, "1"), (5000, "1"), (7000, "2")):  # its first answer, and a restart
                other |= {"decided": decided, "incarnation": incarnation}
                await is_shown(page)
                await expect(missed).to_be_hidden()
            other["decided"] = 7100
            await expect(page.get_by_text("100 more decisions were made")).to_be_visible()
            other["decided"] = None  # it does not answer this frontend any more
            await is_shown(page)
            await expect(page.get_by_text("100 more decisions were made")).to_be_visible()


@pytest.mark.parametrize("window", [WIDE, NARROW], ids=["wide", "narrow"])
async def test_sessions_are_shown_with_their_turns_reuse_and_retention(
    open_bed: Any, browser: Browser, window: Any
) -> None:
    hints = conductor_pb2.RequestHints(pause_s=30.0, lifetime_s=600.0)
    async with open_bed() as bed:
        await bed.join_usual()
        for number in range(3):
            prompt = 64 * (number + 1)
            await bed.serve(f"cmpl-{number}", prompt=prompt, cached=16, session=session(10), hints=hints, tenant="acme")
        await bed.serve("cmpl-helper", session=session(11, parent=10), tenant="globex")
        async with open_visit(browser, f"{bed.url}/console/#/sessions", window=window) as visit:
            page = visit.page
            await page.get_by_label("Tenant").select_option("acme")
            row = page.locator("tbody tr")
            await expect(row).to_have_count(1)
            for text in ("acme", "idle for", "(announced: 30 s)", "8.33 %", "for 10 min more"):
                await expect(row).to_contain_text(text)
            await page.get_by_label("Tenant").select_option("")
            await expect(page.locator("tbody tr", has=page.get_by_text("globex"))).to_contain_text("not announced")
            await visit.axe()
            await visit.fits()
            await page.get_by_role("link", name=f"{10:016x}").first.click()
            await expect(page.get_by_role("heading", name=f"Turns of session {10:016x}")).to_be_visible()
            await expect(page.get_by_text("it started 1 of the sessions below")).to_be_visible()
            turns = page.get_by_role("img", name="Tokens of the last 3 turns; the latest has a prompt of 192")
            await expect(turns.locator("rect")).to_have_count(9)
            await expect(page.locator("tbody tr", has=page.get_by_text("cmpl-1"))).to_contain_text("16 (12.5 %)")
            await visit.axe()
            await visit.fits()
            await page.get_by_role("link", name="cmpl-1").click()
            await page.get_by_role("link", name=f"{10:016x}").first.click()
            await expect(page.get_by_role("heading", name=f"Turns of session {10:016x}")).to_be_visible()


@pytest.mark.parametrize("window", [WIDE, NARROW], ids=["wide", "narrow"])
async def test_the_pool_is_shown_by_model_and_tenant(open_bed: Any, browser: Browser, window: Any) -> None:
    async with open_bed() as bed:
        await bed.start_pool()
        await bed.join_usual()
        await bed.join("pool-9", "pool")  # nothing listens at its address
        await bed.pools.store(0, 6)
        await bed.serve("cmpl-1", prompt=64, cached=16, tenant="acme")
        async with open_visit(browser, f"{bed.url}/console/#/pool", window=window) as visit:
            page = visit.page
            model = page.locator("tbody tr", has=page.get_by_text("00010203"))
            await expect(model).to_contain_text("tiny")
            await expect(model).to_contain_text("6 (12 KiB)")
            await expect(page.get_by_text("Without pool nodes that do not answer: pool-9")).to_be_visible()
            tenant = page.locator("tbody tr", has=page.get_by_text("acme"))
            await expect(tenant).to_contain_text("16 (25 %)")
            await visit.axe()
            await visit.fits()
