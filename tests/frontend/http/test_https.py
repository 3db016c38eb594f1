"""HTTPS at the frontend: certificates and their renewal, and who does not speak it. Real sockets."""

import asyncio
import shutil
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from frontend.errors import FrontendConfigError
from loadtest.errors import ServerUnreachable
from loadtest.server import discover
from moonpool.supervision.http_port import is_alive
from moonpool_proto.v1 import worker_pb2
from settings.keys import InvalidSetting

CERTIFICATES = Path(__file__).parents[2] / "data" / "tls"
WAIT_S = 60


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    put(tmp_path, "node")
    return {"http_tls_cert": tmp_path / "cert.pem", "http_tls_key": tmp_path / "key.pem"}


def put(folder: Path, name: str, *, key: str = "") -> None:
    for source, target in ((f"{name}.pem", "cert.pem"), (f"{key or name}.key", "key.pem")):
        shutil.copy(CERTIFICATES / source, folder / f"{target}.new")
        (folder / f"{target}.new").rename(folder / target)


def trusting(*, at_most: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(CERTIFICATES / "ca.pem"))
    context.maximum_version = at_most
    return context


async def connect(front: Any, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(front.url)
    opening = asyncio.open_connection(url.hostname, url.port, ssl=context, server_hostname="moonpool")
    return await asyncio.wait_for(opening, WAIT_S)


async def shown(front: Any) -> bytes:
    """The certificate that a new connection is shown."""
    _, writer = await connect(front, trusting())
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    assert isinstance(certificate, bytes)
    return certificate


def der(name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert((CERTIFICATES / f"{name}.pem").read_text().strip())


async def ask(front: Any) -> Any:
    body = {"prompt": "a", "max_tokens": 1}
    where = {"ssl": trusting(), "server_hostname": "moonpool"}
    async with front.http.post(f"{front.url}/v1/completions", json=body, **where) as response:
        assert response.status == 200
        return await response.json()


async def test_requests_go_over_tls(start_front: Any, cluster: Any, files: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    async with start_front(**files) as front:
        assert front.url.startswith("https://")
        assert (await ask(front))["choices"][0]["finish_reason"] == "length"
        assert await is_alive(front.url, WAIT_S)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):  # without the CA
            await front.get("/live")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_versions_are_refused_and_http_1_1_is_agreed_upon(start_front: Any, files: Any) -> None:
    async with start_front(**files) as front:
        context = trusting()
        context.set_alpn_protocols(["h2", "http/1.1"])
        _, writer = await connect(front, context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        writer.close()
        await writer.wait_closed()
        _, writer = await connect(front, trusting(at_most=ssl.TLSVersion.TLSv1_2))
        writer.close()
        await writer.wait_closed()
        old = trusting()
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await connect(front, old)


async def test_a_renewed_certificate_is_shown_to_the_next_connection(start_front: Any, files: Any) -> None:
    folder = files["http_tls_cert"].parent
    async with start_front(**files) as front:
        assert await shown(front) == der("node")
        put(folder, "successor", key="node")  # the key does not belong to it: the one from before holds
        assert await shown(front) == der("node")
        put(folder, "successor")
        assert await shown(front) == der("successor")
        files["http_tls_key"].unlink()
        assert await shown(front) == der("successor")


async def test_how_long_the_certificate_lasts_is_told(start_front: Any, files: Any) -> None:
    folder = files["http_tls_cert"].parent
    async with start_front(**files) as front:
        for name in ("node", "successor"):
            put(folder, name)
            _, writer = await connect(front, trusting())
            certificate = writer.get_extra_info("ssl_object").getpeercert()
            writer.close()
            await writer.wait_closed()
            left = ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()
            assert await left_s(front) == pytest.approx(left, abs=60)
    put(folder, "expired")
    async with start_front(**files) as front:
        assert await left_s(front) < 0


async def test_where_http_is_plain_no_certificate_ends(front: Any) -> None:
    assert "moonpool:http_certificate_left_seconds NaN" in (await front.get("/metrics"))[1]


async def left_s(front: Any) -> float:
    async with front.http.get(f"{front.url}/metrics", ssl=False) as response:
        (line,) = [
            row for row in (await response.text()).splitlines() if row.startswith("moonpool:http_certificate_left")
        ]
    return float(line.rsplit(" ", 1)[1])


async def test_plain_text_to_the_tls_port_ends_at_once(
    start_front: Any, cluster: Any, files: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    async with start_front(**files) as front:
        url = urlsplit(front.url)
        for _ in range(20):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            try:
                assert b"200" not in await asyncio.wait_for(reader.read(), WAIT_S)
            except ConnectionError:
                pass
            writer.transport.abort()
        await ask(front)
    assert len([record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]) <= 2


async def test_handshakes_that_do_not_end_keep_nobody_out(start_front: Any, cluster: Any, files: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    async with start_front(**files, max_connections=5) as front:
        url = urlsplit(front.url)
        silent = [await asyncio.open_connection(url.hostname, url.port) for _ in range(30)]
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await ask(front)
                    break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)
        for _, writer in silent:
            writer.transport.abort()


async def test_our_clients_say_what_is_wrong_with_a_certificate_and_with_a_scheme(start_front: Any, files: Any) -> None:
    async with start_front(**files) as front:
        with pytest.raises(ServerUnreachable, match=r"is not trusted .*SSL_CERT_FILE"):
            await discover(front.http, front.url, model="", deadline_s=WAIT_S)
    async with start_front() as front:
        with pytest.raises(ServerUnreachable, match="if the server does not use TLS, use http://"):
            await discover(front.http, front.url.replace("http:", "https:"), model="", deadline_s=WAIT_S)


async def test_tls_to_the_plain_port_is_a_clear_error_for_the_client(front: Any) -> None:
    with pytest.raises(ssl.SSLError, match=r"(?i)wrong.version.number|record layer failure"):
        await connect(front, trusting())


@pytest.mark.parametrize(
    ("name", "key", "problem"),
    [
        ("node", "successor", "does not match the certificate"),
        ("node", "locked", "is encrypted"),
    ],
)
async def test_key_material_that_is_of_no_use_is_a_clear_error_at_the_start(
    start_front: Any, tmp_path: Path, name: str, key: str, problem: str
) -> None:
    put(tmp_path, name, key=key)
    with pytest.raises(FrontendConfigError, match=problem):
        async with start_front(http_tls_cert=tmp_path / "cert.pem", http_tls_key=tmp_path / "key.pem"):
            pass


async def test_a_missing_file_and_text_that_is_no_pem_are_named(start_front: Any, tmp_path: Path) -> None:
    put(tmp_path, "node")
    for key, problem in (
        (tmp_path / "none.pem", "--http-tls-key .*none.pem cannot be read"),
        (None, "HTTPS needs both"),
    ):
        with pytest.raises((FrontendConfigError, InvalidSetting), match=problem):
            async with start_front(http_tls_cert=tmp_path / "cert.pem", http_tls_key=key):
                pass
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(FrontendConfigError, match="is not valid PEM"):
        async with start_front(http_tls_cert=tmp_path / "cert.pem", http_tls_key=tmp_path / "key.pem"):
            pass
