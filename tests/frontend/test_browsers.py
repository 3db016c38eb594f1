"""Calls by web pages of other origins, the page of the API's description, and paths that are not served."""

from typing import Any

import pytest

from settings.keys import InvalidSetting, replaced

CHAT = "/v1/chat/completions"
ORIGIN = "https://chat.example.org"
ASKS = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def test_pages_of_the_given_origins_may_call_the_api(start_front: Any, cluster: Any) -> None:
    cluster.answer_with(lambda submit: ([5, 3], 1))
    async with start_front(cors_origins=(ORIGIN,)) as front:
        async with front.http.options(front.url + CHAT, headers=ASKS) as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == ORIGIN
            assert "POST" in response.headers["access-control-allow-methods"]
            assert response.headers["access-control-allow-headers"] == "authorization"
        body = {"messages": [{"role": "user", "content": "hi"}]}
        async with front.http.post(front.url + CHAT, json=body, headers={"origin": ORIGIN}) as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == ORIGIN
            assert "retry-after" in response.headers["access-control-expose-headers"]
        async with front.http.get(front.url + "/v1/models", headers={"origin": "https://else.org"}) as response:
            assert response.headers.get("access-control-allow-origin") is None


@pytest.mark.parametrize("path", ["/console/api/state", "/admin/conductor/Cluster"])
async def test_operators_routes_are_never_shared_with_other_origins(start_front: Any, path: str) -> None:
    async with start_front(cors_origins=("*",)) as front:
        for method in ("OPTIONS", "GET", "POST"):
            async with front.http.request(method, front.url + path, headers=ASKS) as response:
                assert "access-control-allow-origin" not in response.headers


async def test_no_origin_may_call_by_default(front: Any) -> None:
    async with front.http.options(front.url + CHAT, headers=ASKS) as response:
        assert response.status == 405
        assert "access-control-allow-origin" not in response.headers


def test_an_origin_has_no_path(config: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"--cors-origins must be \* or SCHEME://HOST"):
        replaced(config, cors_origins=("https://chat.example.org/app",))


async def test_the_description_is_shown_by_a_page_without_other_hosts(front: Any) -> None:
    for name, kind in (("", "text/html"), ("/start.js", "text/javascript"), ("/swagger-ui.css", "text/css")):
        async with front.http.get(front.url + "/docs" + name) as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in response.headers["content-security-policy"]
            text = await response.text()
            if name != "/swagger-ui.css":
                assert "http://" not in text
                assert "https://" not in text
    async with front.http.get(front.url + "/docs/swagger-ui-bundle.js") as response:
        assert len(await response.read()) > 10**6
    async with front.http.get(front.url + "/docs/") as response:
        assert (response.status, response.url.path) == (200, "/docs")
    status, _ = await front.get("/docs/nothing.js")
    assert status == 404


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/rerank", "reranking"),
        ("/score", "scoring"),
        ("/v1/audio/transcriptions", "transcription"),
        ("/v1/images/generations", "images"),
    ],
)
async def test_what_is_not_served_is_said(front: Any, path: str, what: str) -> None:
    status, body = await front.post(path, {"input": "hi"})
    assert (status, body["error"]["code"]) == (404, "endpoint_not_served")
    assert f"has no {what}" in body["error"]["message"]


async def test_an_image_in_a_chat_is_refused_by_name(front: Any) -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    status, body = await front.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert (status, body["error"]["param"]) == (400, "messages.0.content.1.type")
    assert "'image_url' is not supported: Moonpool serves text models" in body["error"]["message"]
