"""A frontend whose keys are in a file that changes."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from frontend.errors import FrontendConfigError
from moonpool_proto.v1 import conductor_pb2, worker_pb2
from tests.frontend.keys.conftest import ADMIN, ENTRIES, OTHER, USER, WriteKeys, bearer, entry_of

COMPLETIONS = "/v1/completions"
PROMPT = {"prompt": [4, 5, 6, 7, 8], "max_tokens": 1}


@pytest.fixture(autouse=True)
def answers(cluster: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))


async def test_each_key_is_let_in_as_its_tenant_and_others_are_told_why_not(
    cluster: Any, start_front: Any, write_keys: WriteKeys
) -> None:
    async with start_front(api_keys_file=write_keys(*ENTRIES)) as front:
        for key, tenant in ((ADMIN, "ops"), (USER, "acme"), (OTHER, "beta")):
            assert (await front.post(COMPLETIONS, PROMPT, **bearer(key)))[0] == 200
            assert cluster.conductor.scheduled[-1].tenant == tenant
        for headers in ({}, {"authorization": "Bearer mp-wrong"}):
            async with front.http.post(front.url + COMPLETIONS, json=PROMPT, headers=headers) as response:
                assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
                assert "mp-wrong" not in await response.text()


async def test_an_operator_s_page_is_for_admins_where_there_are_any(start_front: Any, write_keys: WriteKeys) -> None:
    async def ask(front: Any, path: str, key: str | None) -> int:
        async with front.http.get(front.url + path, **(bearer(key) if key else {})) as response:
            return int(response.status)

    async with start_front(api_keys_file=write_keys(*ENTRIES), metrics_need_admin=True) as front:
        for path in ("/validate", "/metrics"):
            assert [await ask(front, path, key) for key in (None, "mp-wrong", USER, ADMIN)] == [401, 401, 403, 200]
        assert await ask(front, "/health", None) == 200
    async with start_front(api_keys_file=write_keys(*ENTRIES[1:])) as front:
        assert await ask(front, "/validate", None) == await ask(front, "/metrics", None) == 200


async def test_metrics_name_tenants_to_admins_only(cluster: Any, start_front: Any, write_keys: WriteKeys) -> None:
    async def scraped(front: Any, key: str | None, accept: str = "text/plain") -> list[str]:
        headers = {"accept": accept, **({"authorization": f"Bearer {key}"} if key else {})}
        async with front.http.get(f"{front.url}/metrics", headers=headers) as response:
            assert response.status == 200
            return (await response.text()).splitlines()

    cluster.conductor.cluster.samples.extend(
        conductor_pb2.Sample(name="tenant_requests", labels={"model_name": "tiny", "tenant": tenant}, value=count)
        for tenant, count in (("acme", 2), ("beta", 3))
    )
    entries = [ENTRIES[0], *(each | {"requests_per_minute": 1} for each in ENTRIES[1:])]
    path = write_keys(*entries)
    async with start_front(api_keys_file=path, metrics_scope="cluster") as front:
        for key in (USER, OTHER, USER, OTHER, OTHER):
            await front.post(COMPLETIONS, PROMPT, **bearer(key))
        await front.has_counted("moonpool:tenant_requests", 5)
        whole = await scraped(front, ADMIN)
        assert 'moonpool:quota_rejected_total{reason="quota_requests",tenant="acme"} 1.0' in whole
        assert 'moonpool:tenant_requests{model_name="tiny",tenant="beta"} 3.0' in whole
        for key in (None, USER, "mp-wrong"):
            summed = await scraped(front, key)
            assert 'moonpool:quota_rejected_total{reason="quota_requests"} 3.0' in summed
            assert 'moonpool:tenant_requests{model_name="tiny"} 5.0' in summed
            assert not [line for line in summed if "acme" in line or "beta" in line]
            others = [line for line in whole if "tenant" not in line and "quota_rejected" not in line]
            assert {line.split(" ")[0] for line in others} <= {line.split(" ")[0] for line in summed}
        openmetrics = await scraped(front, None, "application/openmetrics-text; version=1.0.0")
        assert 'moonpool_quota_rejected_total{reason="quota_requests"} 3.0' in openmetrics  # this format has no colons
        assert openmetrics[-1] == "# EOF"
    async with start_front(api_keys_file=path, metrics_scope="cluster", metrics_show_tenants=True) as front:
        await front.has_counted("moonpool:tenant_requests", 5)
        assert 'moonpool:tenant_requests{model_name="tiny",tenant="beta"} 3.0' in await scraped(front, None)


async def test_a_tenant_uses_only_its_classes(cluster: Any, start_front: Any, write_keys: WriteKeys) -> None:
    limited = entry_of("acme-1", USER, "acme", slo_classes=["batch", "chat"])
    async with start_front(api_keys_file=write_keys(ENTRIES[0], limited, ENTRIES[2])) as front:
        authorization = bearer(USER)["headers"]
        for body, header in (({"slo_class": "gold"}, {}), ({}, {"x-slo-class": "gold"})):
            status, answer = await front.post(COMPLETIONS, PROMPT | body, headers=authorization | header)
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (403, "denied_class", "slo_class")
            assert "batch, chat" in answer["error"]["message"]
        assert not cluster.conductor.scheduled
        assert (await front.post(COMPLETIONS, PROMPT | {"slo_class": "chat"}, headers=authorization))[0] == 200
        assert list(cluster.conductor.scheduled[-1].allowed_classes) == ["batch", "chat"]
        assert (await front.post(COMPLETIONS, PROMPT, headers=authorization))[0] == 200
        assert list(cluster.conductor.scheduled[-1].allowed_classes) == ["batch", "chat"], "for its default"
        assert (await front.post(COMPLETIONS, PROMPT | {"slo_class": "gold"}, **bearer(OTHER)))[0] == 200
        assert not cluster.conductor.scheduled[-1].allowed_classes


async def test_no_two_tenants_reach_the_same_blocks_whatever_salt_they_name(
    cluster: Any, start_front: Any, write_keys: WriteKeys
) -> None:
    async with start_front(api_keys_file=write_keys(*ENTRIES, entry_of("acme-2", "mp-4", "acme"))) as front:

        async def blocks(key: str, **more: str) -> bytes:
            assert (await front.post(COMPLETIONS, PROMPT | more, **bearer(key)))[0] == 200
            return bytes(cluster.conductor.scheduled[-1].chain)

        own = await blocks(USER)
        assert own == await blocks("mp-4"), "a tenant's keys share"
        salted = [
            await blocks(key, **more) for key in (USER, OTHER) for more in ({"cache_salt": "a"}, {"cache_salt": "acme"})
        ]
        assert len({own, await blocks(OTHER), *salted}) == 6


async def test_another_tenants_configured_salt_reaches_none_of_its_blocks_and_its_own_keys_share(
    cluster: Any, start_front: Any, write_keys: WriteKeys
) -> None:
    salt = "salt-that-acme-was-given"
    entries = [*ENTRIES, entry_of("acme-2", "mp-4", "acme", cache_salt=salt)]
    async with start_front(api_keys_file=write_keys(*entries)) as front:

        async def blocks(key: str, **more: str) -> bytes:
            assert (await front.post(COMPLETIONS, PROMPT | more, **bearer(key)))[0] == 200
            return bytes(cluster.conductor.scheduled[-1].chain)

        own = await blocks(USER)
        assert own
        assert own == await blocks("mp-4"), "said in one entry, it is the tenant's"
        guesses = (salt, f"\0{salt}", "acme", USER, own.hex())
        others = [await blocks(OTHER), *[await blocks(OTHER, cache_salt=guess) for guess in guesses]]
        assert own not in others
        assert len({own[:16], *(other[:16] for other in others)}) == 1 + len(others)  # not even the first block's


async def test_keys_come_and_go_without_a_restart_and_a_broken_file_changes_nothing(
    cluster: Any, start_front: Any, write_keys: WriteKeys, until: Any, log_lines: Any
) -> None:
    path = write_keys(*ENTRIES[:2])

    async def status(front: Any, key: str) -> int:
        return int((await front.post(COMPLETIONS, PROMPT, **bearer(key)))[0])

    async with start_front(api_keys_file=path) as front:
        assert (await status(front, USER), await status(front, OTHER)) == (200, 401)
        write_keys(ENTRIES[0], ENTRIES[2])
        await until(lambda: status(front, OTHER), lambda seen: seen == 200)
        assert await status(front, USER) == 401
        await until(lambda: told_tenants(cluster), lambda seen: seen == ["beta", "ops"])
        path.write_text("keys:\n- name: mp-pasted-secret oops")
        await front.has_counted('moonpool:api_keys_file_reads_total{result="broken"}', 1)
        assert await status(front, OTHER) == 200
        path.unlink()
        await front.has_counted('moonpool:api_keys_file_reads_total{result="broken"}', 2)
        assert await status(front, OTHER) == 200
        _, metrics = await front.get("/metrics")
        assert "moonpool:api_keys_file_current 0.0" in metrics
        write_keys(*ENTRIES)
        await until(lambda: status(front, USER), lambda seen: seen == 200)
        _, metrics = await front.get("/metrics")
        assert "moonpool:api_keys_file_current 1.0" in metrics
        assert 'moonpool:api_keys{scope="user"} 2.0' in metrics
    said = json.dumps(log_lines())
    assert "keeping the previous API keys" in said
    assert "secret" not in said


async def told_tenants(cluster: Any) -> list[str]:
    return list(cluster.conductor.tenants)


async def test_a_file_that_kubernetes_swaps_is_read_again(
    start_front: Any, tmp_path: Path, write_keys: WriteKeys, until: Any
) -> None:
    """A mounted secret: keys.yaml -> ..data/keys.yaml, ..data -> ..1, and ..data is what is put anew."""
    mount = tmp_path / "mount"
    for version, entries in (("..1", ENTRIES[:1]), ("..2", ENTRIES[:2])):
        (mount / version).mkdir(parents=True)
        write_keys(*entries).replace(mount / version / "keys.yaml")
    (mount / "..data").symlink_to("..1")
    (mount / "keys.yaml").symlink_to("..data/keys.yaml")

    async def status(front: Any) -> int:
        return int((await front.post(COMPLETIONS, PROMPT, **bearer(USER)))[0])

    async with start_front(api_keys_file=mount / "keys.yaml") as front:
        assert await status(front) == 401
        (mount / "..data_tmp").symlink_to("..2")
        (mount / "..data_tmp").replace(mount / "..data")
        await until(lambda: status(front), lambda seen: seen == 200)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff", "not valid UTF-8"),
        (b"x", "expected a mapping with the single key `keys`"),
    ],
)
async def test_a_frontend_does_not_start_with_a_broken_file(
    start_front: Any, tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "keys.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FrontendConfigError, match=problem):
        async with start_front(api_keys_file=path):
            pass


async def test_a_tenants_unfinished_bodies_take_half_of_the_room_for_bodies(
    start_front: Any, write_keys: WriteKeys, until: Any
) -> None:
    async def held(front: Any) -> int:
        async with front.http.get(front.url + "/validate", **bearer(ADMIN)) as response:
            return int((await response.json())["counts"]["body_bytes"])

    async with start_front(api_keys_file=write_keys(*ENTRIES), max_bodies_nbytes=64 << 10) as front:
        url = urlsplit(front.url)
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {USER}\r\ncontent-length: 32768\r\n\r\n"
        )
        writer.write(head.encode() + b" " * 32767)  # lacks its last byte
        await until(lambda: held(front), lambda nbytes: nbytes == 32767)
        status, answer = await front.post(COMPLETIONS, PROMPT, **bearer(USER))
        assert (status, answer["error"]["code"]) == (503, "bodies")
        assert (await front.post(COMPLETIONS, PROMPT, **bearer(OTHER)))[0] == 200
        writer.transport.abort()
        await until(lambda: held(front), lambda nbytes: nbytes == 0)
        assert (await front.post(COMPLETIONS, PROMPT, **bearer(USER)))[0] == 200
