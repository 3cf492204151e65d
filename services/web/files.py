"""Serves the page's files, which are read and compressed once. No other file on the disk can be requested."""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
INDEX = "index.html"


class Files:
    """The files in `static/`, by name."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}
        for file in resources.files("services.web").joinpath("static").iterdir():
            data = file.read_bytes()
            headers = {
                "content-type": TYPES[file.name.rpartition(".")[2]],
                "content-encoding": "gzip",
                "cache-control": "no-cache",
                "etag": f'"{hashlib.sha256(data).hexdigest()[:16]}"',
            }
            self._files[file.name] = (gzip.compress(data, mtime=0), headers)

    async def answer(self, request: Request) -> Response:
        """Return a file, or the page itself if the request has no file name."""
        file = self._files.get(request.path_params.get("name", INDEX))
        if file is None:
            return Response(status_code=404)
        data, headers = file
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers={"etag": headers["etag"]})
        return Response(data, headers=headers)
