"""A Hugging Face hub on a free local port, with the endpoints that its client calls for a model; and its cache."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The models of one hub, and what it was asked for. `token`: needed for private and gated models."""

    url: str = ""
    token: str = "hf_valid"
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by model
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)  # also for the account of the token
    claimed_sizes: dict[str, int] = field(default_factory=dict)  # by file, in place of its size
    num_broken: int = 0  # downloads of weights still to break off in the middle
    downloads: Counter[str] = field(default_factory=Counter)  # complete files sent, by name
    ranges: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve a hub without models, to which the test adds its own."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        model = "/".join(parts[2:4] if is_api else parts[:2])
        rest = parts[4:] if is_api else parts[2:]
        if not self._may_read(model):
            return
        revision = rest[1].replace("%2F", "/") if len(rest) > 1 else "main"
        if revision not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif not is_api:
            self._send_file(model, "/".join(rest[2:]))
        elif rest[:1] == ["tree"]:
            entries = [self._entry(name, content) for name, content in self.hub.files[model].items()]
            self._send(json.dumps(entries).encode())
        else:
            self._send(json.dumps({"id": model, "sha": COMMIT, "siblings": []}).encode())

    def _may_read(self, model: str) -> bool:
        given = self.headers.get("Authorization", "")
        has_token = given == f"Bearer {self.hub.token}"
        if given and not has_token:
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif model not in self.hub.files or (model in self.hub.private and not has_token):
            self._refuse(404 if has_token else 401, "RepoNotFound")
        elif model in self.hub.gated:
            self._refuse(403 if has_token else 401, "GatedRepo")
        else:
            return True
        return False

    def _entry(self, name: str, content: bytes) -> dict[str, object]:
        size = self.hub.claimed_sizes.get(name, len(content))
        entry: dict[str, object] = {
            "type": "file",
            "path": name,
            "size": size,
            "oid": hashlib.sha1(content).hexdigest(),
        }
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
        return entry

    def _send_file(self, model: str, name: str) -> None:
        content = self.hub.files[model].get(name)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if self.command == "HEAD":
            size = self.hub.claimed_sizes.get(name, len(content))
            self._send(b"", headers=headers | {"Content-Length": str(size)})
            return
        wanted = self.headers.get("Range", "")
        first = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        with self.hub.lock:
            if wanted:
                self.hub.ranges.append(wanted)
            breaks = self.hub.num_broken > 0 and name.endswith(".safetensors")
            self.hub.num_broken -= breaks
        if breaks:
            self._send(content[first : (first + len(content)) // 2], headers=headers, length=len(content) - first)
            self.close_connection = True
            return
        if wanted:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        with self.hub.lock:
            self.hub.downloads[name] += 1
        self._send(content[first:], status=206 if wanted else 200, headers=headers)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(b"{}", status=status, headers={name: text for name, text in headers.items() if text})

    def _send(
        self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(body) if length is None else length)} | (headers or {})).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def store_snapshot(cache: Path, model: str, folder: Path) -> Path:
    """Store a model's folder in a cache as `huggingface_hub` lays it out; returns the snapshot."""
    stored = cache / f"models--{model.replace('/', '--')}"
    snapshot = stored / "snapshots" / COMMIT
    for made in (stored / "refs", stored / "blobs", snapshot):
        made.mkdir(parents=True)
    (stored / "refs" / "main").write_text(COMMIT)
    for file in folder.iterdir():
        content = file.read_bytes()
        blob = stored / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot
