"""A hub on a local port. It serves the paths of the Hugging Face API that downloads use, for repositories in memory.

`requests` lists the received requests. If `break_after_bytes` is set, the hub closes the connection in the middle of a
file; if `hold_after_bytes` is set, it keeps the connection open but sends nothing more. The hub is a real HTTP server,
and `huggingface_hub` is its unmodified client.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CHUNK_BYTES = 1 << 16
TOKEN = "hf_a_token_of_the_test"


@dataclass
class Repository:
    """Files by path at `commit`, the head of `main`. If `gated`, they are served only with `TOKEN`."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    gated: bool = False


@dataclass
class LocalHub:
    """A hub. The keys of its repositories are `models/<owner>/<name>` and `datasets/<owner>/<name>`."""

    repositories: dict[str, Repository]
    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range header of every request."""
    break_after_bytes: int | None = None
    """Number of bytes of a file after which the connection breaks. It breaks `breaks` times in total."""
    breaks: int = 1_000
    hold_after_bytes: int | None = None
    """Number of bytes of a file after which nothing more is sent."""

    def app(self) -> Starlette:
        revision = "{revision:path}"
        routes = []
        for kind, prefix in (("models", ""), ("datasets", "/datasets")):
            routes += [
                Route(f"/api/{kind}/{{owner}}/{{name}}/revision/{revision}", self._info, name=f"{kind}/info"),
                Route(f"/api/{kind}/{{owner}}/{{name}}/tree/{revision}", self._tree, name=f"{kind}/tree"),
                Route(f"{prefix}/{{owner}}/{{name}}/resolve/{{revision}}/{{path:path}}", self._file, name=kind),
            ]
        return Starlette(routes=routes)

    def _find(self, request: Request) -> Repository | Response:
        self.requests.append((request.method, request.url.path, request.headers.get("range", "")))
        kind = "datasets" if "/datasets/" in request.url.path else "models"
        values = request.path_params
        found = self.repositories.get(f"{kind}/{values['owner']}/{values['name']}")
        if found is None:
            return _refused(404, "RepoNotFound")
        if found.gated and request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _refused(403, "GatedRepo")
        if values["revision"] not in ("main", found.commit):
            return _refused(404, "RevisionNotFound")
        return found

    def _info(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        siblings = [{"rfilename": path, "size": len(content)} for path, content in found.files.items()]
        name = f"{request.path_params['owner']}/{request.path_params['name']}"
        return JSONResponse({"id": name, "sha": found.commit, "siblings": siblings, "private": False})

    def _tree(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        rows = [
            {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
            for path, content in found.files.items()
        ]
        return JSONResponse(rows)

    def _file(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        content = found.files.get(request.path_params["path"])
        if content is None:
            return _refused(404, "EntryNotFound")
        headers = {
            "ETag": f'"{_digest(content)}"',
            "X-Repo-Commit": found.commit,
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(content)),
        }
        if request.method == "HEAD":
            return Response(headers=headers)
        asked = request.headers.get("range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        headers["Content-Length"] = str(len(content) - start)
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return StreamingResponse(self._body(content, start), status_code=206 if asked else 200, headers=headers)

    async def _body(self, content: bytes, start: int) -> AsyncIterator[bytes]:
        for at in range(start, len(content), CHUNK_BYTES):
            if self.break_after_bytes is not None and at >= self.break_after_bytes and self.breaks:
                self.breaks -= 1
                raise ConnectionError("broken by the test")
            if self.hold_after_bytes is not None and at >= self.hold_after_bytes:
                await asyncio.Event().wait()  # until the client is gone
            yield content[at : at + CHUNK_BYTES]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _refused(status: int, code: str) -> Response:
    return JSONResponse({"error": code}, status_code=status, headers={"X-Error-Code": code, "X-Error-Message": code})


@contextlib.contextmanager
def serving(hub: LocalHub) -> Iterator[LocalHub]:
    """Serve `hub` on a free port on this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    hub.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(hub.app(), log_level="critical"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
