"""The site that `make docs` builds runs its scripts without an error, in Chromium, from a server and from the disk."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.integration.web.chromium import chromium, visit

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. Skips the test if mkdocs is not installed."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """Serve the site at a free port of this machine, and yield its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("page", ["index.html", "keys.html", "404.html"])
def test_a_served_page_runs_its_scripts_and_follows_the_colours_of_the_system(served: str, page: str) -> None:
    with chromium() as browser, visit(browser, f"{served}/{page}", dark=True) as shown:
        expect(shown.locator("html")).to_have_attribute("data-bs-theme", "dark")
        shown.emulate_media(color_scheme="light")
        expect(shown.locator("html")).to_have_attribute("data-bs-theme", "light")


def test_a_page_that_is_read_from_the_disk_runs_its_scripts(site: Path) -> None:
    with chromium() as browser, visit(browser, (site / "index.html").as_uri()) as shown:
        expect(shown.locator("#theme-menu")).to_be_visible()
