"""Measures the size of the browser page, the time to its first chart, and what it costs while nothing happens.

`python -m tests.bench.bench_web` asserts that the page transfers at most 2 MB and takes at most 1 s over loopback while
the run is idle. It needs chromium.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import psutil

from tests.integration.web.chromium import chromium, visit
from tests.integration.web.shown_run import ended_run, page_of

LOADS = 10
IDLE_S = 20.0
STEPS = 500
LIMIT_BYTES, LIMIT_S = 2_000_000, 1.0
SEEN = """
const timer = setInterval(() => {
  if (document.querySelector('.chart canvas')) { window.firstChart = performance.now(); clearInterval(timer); }
}, 2);
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = ended_run(Path(folder) / "shown", steps=STEPS)
        with chromium() as browser, page_of(run) as url:
            loads = []
            for _ in range(LOADS + 1):
                with visit(browser, "about:blank") as page:
                    nbytes = [0]
                    session = page.context.new_cdp_session(page)
                    session.send("Network.enable")
                    session.on("Network.loadingFinished", lambda each, sum=nbytes: add(sum, each["encodedDataLength"]))
                    page.add_init_script(SEEN)
                    page.goto(url)
                    page.wait_for_selector(".chart canvas")
                    page.wait_for_timeout(300)  # By then, the whole page has arrived.
                    loads.append((page.evaluate("window.firstChart") / 1000, nbytes[0]))
            times, weight = [seconds for seconds, _ in loads[1:]], loads[-1][1]
            print(f"first chart, {LOADS} loads with an empty cache: median {statistics.median(times):.3f} s, ", end="")
            print(f"slowest {max(times):.3f} s; {weight} bytes compressed")
            server = server_of(run)
            print(f"idle, no browser:   {cpu_share(server):.2%} of a core")
            with visit(browser, url):
                print(f"idle, one browser:  {cpu_share(server):.2%} of a core; {rss_mib(server)} MiB")
    assert weight <= LIMIT_BYTES
    assert statistics.median(times) <= LIMIT_S


def add(total: list[int], nbytes: int) -> None:
    total[0] += nbytes


def server_of(run: Path) -> psutil.Process:
    """Return the process that serves the page of `run`."""
    lines = ((each, each.cmdline()) for each in psutil.process_iter())
    return next(each for each, line in lines if "services.web.by_hand" in line and str(run) in line)


def cpu_share(process: psutil.Process) -> float:
    before, begun = process.cpu_times(), time.monotonic()
    time.sleep(IDLE_S)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - begun)


def rss_mib(process: psutil.Process) -> int:
    return process.memory_info().rss >> 20


if __name__ == "__main__":
    main()
