"""A tiny Hugging Face hub on 127.0.0.1: repositories are directories, each at one commit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, root: Path, requested: list[str], *args: object) -> None:
        self._root = root
        self._requested = requested
        super().__init__(*args)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are noted in the list instead."""
        self._requested.append(self.path)

    def _answer(self, with_body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and (folder := self._root.joinpath(*parts[2:4])).is_dir():
            files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
            names = [str(file.relative_to(folder)) for file in files]
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(name.encode()).hexdigest(),
                }
                for name, file in zip(names, files, strict=True)
            ]
            info: object = (
                tree
                if parts[4:5] == ["tree"]
                else {
                    "id": "/".join(parts[2:4]),
                    "sha": COMMIT,
                    "private": False,
                    "downloads": 0,
                    "likes": 0,
                    "tags": [],
                    "siblings": [{"rfilename": name} for name in names],
                }
            )
            self._send(200, json.dumps(info).encode(), with_body, {"Content-Type": "application/json"})
        elif parts[2:3] == ["resolve"] and (file := self._root.joinpath(*parts[:2], *parts[4:])).is_file():
            content = file.read_bytes()
            tags = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(200, content, with_body, tags)
        else:
            known = len(parts) > 3 and self._root.joinpath(*parts[:2]).is_dir()
            self._send(404, b"", with_body, {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})

    def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def hub_server(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `root`/owner/name; yields the endpoint and a growing list of paths asked for."""
    requested: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, root, requested))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requested
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
