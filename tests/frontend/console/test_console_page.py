"""The console in a real browser: nothing goes wrong, nothing is asked elsewhere, axe finds nothing serious, and it does
what it says, by keyboard, too."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.chromium import PHONE, chromium, open_visit

ADMIN = "mp-admins-key"
VIEWS = ("overview", "nodes", "pool", "objectives", "sessions", "requests")
HOSTILE = "<img src=x onerror=document.title='owned'>'\"&amp;${1}" + "x" * 120
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)
pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]  # one browser for all


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


async def give_key(page: Page, key: str = ADMIN) -> None:
    await page.get_by_role("button", name="Enter an admin key…").click()
    await page.get_by_label("Admin API key").fill(key)
    await page.keyboard.press("Enter")


async def go(page: Page, view: str) -> None:
    await page.evaluate("view => { location.hash = '#/' + view }", view)
    await expect(page.locator(".tabs a[aria-current=page]")).to_have_attribute("data-view", view.split("/")[0])


@pytest.mark.parametrize(("scheme", "window"), [("light", None), ("dark", PHONE)])
async def test_every_view_is_sound_in_light_and_dark_on_desktop_and_phone(
    open_bed: Any, browser: Browser, scheme: Any, window: Any
) -> None:
    async with open_bed(with_keys=True, ttft_slo_s=1.0, tbt_slo_s=60.0) as bed:
        await bed.join_usual()
        await bed.join("pool-0", "pool", counters={"pool_used_bytes": 512.0, "pool_capacity_bytes": 1024.0})
        for number in range(3):
            await bed.serve(f"cmpl-{number}", ttft_s=0.4 * (number + 1))
        await bed.serve("cmpl-rejected", prompt=4000, ttft_objective_s=0.000001)
        async with open_visit(browser, f"{bed.url}/console/", scheme=scheme, window=window) as visit:
            page = visit.page
            await expect(page.get_by_text("The console requires an admin key.")).to_be_visible()
            await visit.axe()
            await give_key(page)
            await expect(page.locator(".pills")).to_contain_text("5 nodes")
            for view in VIEWS:
                await go(page, view)
                await visit.axe()
                await visit.fits()
            await page.get_by_role("link", name="cmpl-rejected").click()
            await expect(page.get_by_text("rejected: ttft (time to first token would be too long)")).to_be_visible()
            await visit.axe()
            await visit.fits()
            await go(page, "objectives")
            await page.get_by_role("button", name="Change objectives…").click()
            await page.get_by_role("button", name="Preview", exact=True).click()
            await expect(page.get_by_text("Nothing would change.")).to_be_visible()
            await visit.axe()
            await visit.fits()


async def test_figures_are_shown_as_told_and_a_filter_finds_nodes_among_two_hundred(
    open_bed: Any, browser: Browser
) -> None:
    async with open_bed(ttft_slo_s=1.0) as bed:
        for number in range(100):
            await bed.join(f"prefill-{number}", "prefill", free_tokens=number)
            await bed.join(f"decode-{number}", "decode", free_tokens=number)
        await bed.serve("cmpl-1", ttft_s=0.4)
        await bed.serve("cmpl-2", ttft_s=2.0)
        async with open_visit(browser, f"{bed.url}/console/#/nodes") as visit:
            page = visit.page
            await expect(page.get_by_text("200 nodes").first).to_be_visible()
            rows = page.locator("tbody tr")
            await expect(rows).to_have_count(50)
            await visit.fits()
            await page.get_by_role("button", name="Show more (150 further)").click()
            await expect(rows).to_have_count(200)
            await page.get_by_label("Filter").fill("decode-7")
            await expect(rows).to_have_count(11)
            await expect(page.get_by_text("11 of 200 nodes")).to_be_visible()
            await page.get_by_role("button", name="KV tokens free").click()
            await expect(page.get_by_role("columnheader", name="KV tokens free")).to_have_attribute(
                "aria-sort", "descending"
            )
            await expect(rows.first).to_contain_text("decode-79")
            await expect(page.get_by_role("button", name="Drain decode-79")).to_be_hidden()  # without an admin's key
            await go(page, "overview")
            row = page.locator("tbody tr", has=page.get_by_text("TTFT"))
            await expect(row).to_contain_text("50 %")
            await go(page, "requests")
            await expect(page.locator("tbody tr", has=page.get_by_text("cmpl-2"))).to_contain_text("→ 2 s")


async def test_a_node_is_drained_by_keyboard_alone_and_a_refusal_is_shown(open_bed: Any, browser: Browser) -> None:
    async with open_bed(with_keys=True) as bed:
        await bed.join_usual()
        refused = "Failed to load resource: the server responded with a status of 409"
        async with open_visit(browser, f"{bed.url}/console/", expects=(refused,)) as visit:
            page, keyboard = visit.page, visit.page.keyboard
            await expect(page.get_by_role("button", name="Enter an admin key…")).to_be_visible()
            await tab_to(page, "#unlock")
            await keyboard.press("Enter")
            await keyboard.type(ADMIN)
            await keyboard.press("Enter")
            await expect(page.locator(".pills")).to_contain_text("4 nodes")
            await expect(page.locator("main")).to_be_focused()
            await tab_to(page, ".tabs a[data-view=nodes]")
            await keyboard.press("Enter")
            await expect(page.get_by_role("button", name="Drain decode-1")).to_be_visible()
            await tab_to(page, "[aria-label='Drain decode-1']")
            assert await page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "solid"
            await page.wait_for_timeout(2500)  # the table is told anew meanwhile, and the focus stays
            await keyboard.press("Enter")
            dialog = page.get_by_role("dialog")
            await expect(dialog).to_contain_text("Drain decode-1?")
            await expect(dialog).to_contain_text("3 running, 2 waiting")
            await expect(dialog).to_contain_text("1 other ready decode node stays for tiny")
            await visit.axe()
            await keyboard.press("Escape")
            await expect(dialog).to_have_count(0)
            await expect(page.get_by_role("button", name="Drain decode-1")).to_be_focused()
            await keyboard.press("Enter")
            await tab_to(page, "dialog button.grave")
            await keyboard.press("Enter")
            assert (await bed.nodes["decode-1"].command()).HasField("drain")
            await expect(page.get_by_text("decode-1 is draining.").first).to_be_visible()
            await expect(page.locator("tbody tr", has=page.get_by_text("decode-1"))).to_contain_text("draining")

            await page.get_by_role("button", name="Make decode-0 a prefill node").click()
            await page.get_by_role("button", name="Switch to prefill").click()
            alert = page.get_by_role("dialog").get_by_role("alert")
            await expect(alert).to_contain_text("Failed:")
            await expect(alert).to_contain_text("is the last decode node")


async def tab_to(page: Page, selector: str, most: int = 80) -> None:
    """Press Tab until the element has the focus, from the page's end again from its beginning."""
    for _ in range(most):
        await page.keyboard.press("Tab")
        if await page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} is not reached by {most} tabs")


async def test_objectives_are_previewed_and_changed(open_bed: Any, browser: Browser) -> None:
    async with open_bed(with_keys=True, ttft_slo_s=2.0) as bed:
        await bed.join_usual()
        for number in range(3):
            await bed.serve(f"cmpl-{number}", ttft_s=0.4 * (number + 1))
        async with open_visit(browser, f"{bed.url}/console/#/objectives") as visit:
            page = visit.page
            await give_key(page)
            await page.get_by_role("button", name="Change objectives…").click()
            await page.get_by_label("TTFT of cluster").fill("500ms")
            await page.get_by_label("New class").fill("gold")
            await page.get_by_role("button", name="Add", exact=True).click()
            await page.get_by_label("TBT of class gold").fill("5x")
            await page.get_by_role("button", name="Preview", exact=True).click()
            cells = page.locator("table.preview tbody td")
            await expect(cells.nth(1)).to_have_text("3")
            assert await cells.all_text_contents() == [
                "(none)",
                "3",
                "3 → 3",
                "0",
                "0",
                "100 % of 3 → 33.3 % of 3",
            ]
            await expect(page.get_by_text("cluster.ttft: 2s -> 0.5s")).to_be_visible()
            await page.get_by_role("button", name="Change…", exact=True).click()
            await expect(page.get_by_text("A reason is required")).to_be_visible()
            await page.get_by_label("Reason, stored with the version").fill("a test")
            await page.get_by_role("button", name="Change…", exact=True).click()
            await expect(page.get_by_role("dialog")).to_contain_text("Create version 2 of the objectives?")
            await page.get_by_role("button", name="Change them").click()
            await expect(page.get_by_text("Version 2 is in force.").first).to_be_visible()
            await expect(page.locator("tbody tr", has=page.get_by_text("gold", exact=True)).first).to_contain_text("5x")
        # A key is in no storage: a new page has none.
        async with open_visit(browser, f"{bed.url}/console/") as visit:
            await expect(visit.page.get_by_text("The console requires an admin key.")).to_be_visible()
            assert (
                await visit.page.evaluate("() => JSON.stringify([{...localStorage}, {...sessionStorage}])") == "[{},{}]"
            )


async def test_what_is_old_is_marked_with_its_age_and_comes_back(open_bed: Any, browser: Browser) -> None:
    async with open_bed() as bed:
        await bed.join_usual()
        away = "Failed to load resource: net::ERR_CONNECTION_REFUSED"
        async with open_visit(browser, f"{bed.url}/console/#/nodes", expects=(away,)) as visit:
            page = visit.page
            await expect(page.locator("tbody tr")).to_have_count(4)
            await expect(page.locator("#banner")).to_be_hidden()
            await bed.stop_conductor()
            await expect(page.locator("#banner")).to_contain_text(re.compile(r"The node data shown is \d+ s old: "))
            await expect(page.locator("tbody tr")).to_have_count(4)
            await expect(page.locator("body")).to_have_class("is-stale")
            await visit.axe()
            await bed.start_conductor()
            await expect(page.locator("#banner")).to_be_hidden()
            await expect(page.get_by_text("No node has joined yet.")).to_be_visible()
            await bed.stop_front()
            await expect(page.locator("#banner")).to_contain_text("The frontend cannot be reached. The data shown is")


async def test_names_from_outside_are_text_and_nothing_else(open_bed: Any, browser: Browser) -> None:
    async with open_bed(with_keys=True) as bed:
        for role in ("prefill", "decode"):
            await bed.join(f"{HOSTILE}-{role}", role)
        await bed.serve(HOSTILE, slo_class="")
        refused = "Failed to load resource: the server responded with a status of 404"
        async with open_visit(browser, f"{bed.url}/console/", window=PHONE, expects=(refused,)) as visit:
            page = visit.page
            await give_key(page)
            await expect(page.locator(".pills")).to_contain_text("2 nodes")
            for view in ("nodes", "requests", "overview"):
                await go(page, view)
                if view != "overview":
                    await expect(page.get_by_text(HOSTILE).first).to_be_attached()
                await visit.fits()
                assert await page.locator("main img").count() == 0
            await go(page, "requests")
            await page.get_by_label("Request id").fill(HOSTILE)
            await page.get_by_role("button", name="Show path").click()
            await expect(page.locator(".facts code")).to_have_text(HOSTILE)
            await visit.fits()
            await go(page, "nodes")
            await page.get_by_role("button", name=f"Drain {HOSTILE}-decode").click()
            await expect(page.get_by_role("dialog")).to_contain_text(HOSTILE)
            await expect(page).to_have_title("Nodes · Moonpool console")


async def test_the_policy_keeps_out_what_a_fault_in_the_page_would_let_in(open_bed: Any, browser: Browser) -> None:
    expected = ("violates", "requires 'Trusted", "has been blocked")
    attempt = """async () => {
        const told = {};
        const taken = async (name, attempt) => {
            try { await attempt(); told[name] = "taken"; } catch { told[name] = "refused"; }
        };
        await taken("markup", () => { document.body.innerHTML = "<b>markup</b>"; });
        await taken("script", () => {
            const script = document.createElement("script");
            script.src = "data:text/javascript,window.ran=1";
            document.body.append(script);
        });
        await taken("fetch", () => fetch("https://example.invalid/"));
        return told;
    }"""
    async with open_bed() as bed, open_visit(browser, f"{bed.url}/console/", expects=expected) as visit:
        told = await visit.page.evaluate(attempt)
        visit.elsewhere.clear()  # asked by the test itself, and never sent
        assert told == {"markup": "refused", "script": "refused", "fetch": "refused"}
