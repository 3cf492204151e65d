"""Tests reward functions that ask a judge over HTTP: samples wait for an unreachable judge, but are lost on other
failures."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from proto.messages import LossReason, Trouble, TroubleKind
from services.rollout.rewards.judge import Judge, RewardCall, unavailable
from services.rollout.rewards.pool import RewardPool
from shared.sample import Sample
from shared.topology.reward import RewardRetry
from tests.unit.rollout.reward_rig import Line, pool, sample, values

pytestmark = pytest.mark.slow

REWARDS = """
import asyncio, time, urllib.request

def judged(sample, *, url):
    with urllib.request.urlopen(url + "/" + sample.completion, timeout=0.5) as answer:
        return float(answer.read())

def judged_slowly(sample, *, url):
    time.sleep(float(sample.completion))
    return judged(sample, url=url)

async def judged_later(sample, *, url):
    return await asyncio.to_thread(judged, sample, url=url)

def wrapped(sample, *, url):
    try:
        return judged(sample, url=url)
    except OSError as error:
        raise RuntimeError("no verdict") from error

def hangs(sample):
    seconds = 60
    time.sleep(seconds)

async def hangs_later(sample):
    await asyncio.sleep(60)

def raises(sample):
    return 1 / 0
"""
QUICK = RewardRetry(limit_s=60.0, backoff_s=0.05, max_backoff_s=0.2)


class Server:
    """A judge that answers 1.0. `answer` returns the status and the seconds for Retry-After."""

    def __init__(self, port: int) -> None:
        self.asked: list[tuple[float, str]] = []
        self.answer: Callable[[str, int], tuple[int, str]] = lambda what, count: (200, "")
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                what = self.path[1:]
                server.asked.append((time.monotonic(), what))
                status, retry_after = server.answer(what, len(server.asked))
                self.send_response(status)
                if retry_after:
                    self.send_header("Retry-After", retry_after)
                self.end_headers()
                self.wfile.write(b"1.0")

            def log_message(self, format: str, *args: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@contextmanager
def judge(port: int) -> Iterator[Server]:
    server = Server(port)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Change to a temporary directory that contains `my_judged.py`, and return a free loopback port."""
    (tmp_path / "my_judged.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def line(port: int, function: str = "judged") -> Line:
    return Line(f"my_judged:{function}", params={"url": f"http://127.0.0.1:{port}"})


def group(completion: str, samples: int) -> list[list[Sample]]:
    return [[sample(completion) for _ in range(samples)]]


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.01)


def kinds(made: RewardPool) -> list[str]:
    return [each.kind for each in made.troubles()]


@pytest.mark.parametrize("function", ["judged", "judged_later", "wrapped"])
def test_samples_wait_for_an_unreachable_judge_and_none_is_lost(port: int, function: str) -> None:
    async def scenario() -> None:
        async with pool(line(port, function), retry=QUICK) as made:
            scoring = asyncio.create_task(made.score(group("a", 8), lambda: None))
            await until(lambda: not made.reachable.is_set())
            [told] = made.troubles()
            assert (told.kind, told.ends_run) == (TroubleKind.JUDGE, False)
            assert "a judge is not responding; rewards are waiting for it" in told.text
            assert "my_judged.py:" in told.text
            assert not scoring.done()
            with judge(port):
                assert values(await scoring) == [[1.0] * 8]
            assert made.reachable.is_set()
            assert not made.troubles()

    asyncio.run(scenario())


def test_a_judge_that_returns_5xx_is_probed_by_one_call_at_a_time_until_it_answers(port: int) -> None:
    async def scenario() -> None:
        with judge(port) as server:
            server.answer = lambda what, count: (503, "") if count <= 12 else (200, "")
            async with pool(line(port, "judged_later"), retry=QUICK) as made:
                assert values(await made.score(group("a", 8), lambda: None)) == [[1.0] * 8]
        # At most eight calls were under way at first; the later refusals come from single probes.
        assert len(server.asked) == 12 + 8
        tries = [at for at, _ in server.asked[8:13]]
        assert all(later - before >= 0.05 for before, later in pairwise(tries))

    asyncio.run(scenario())


def test_pauses_between_tries_follow_the_topology() -> None:
    """The pause doubles from `backoff_s` up to `max_backoff_s`."""
    call = RewardCall(0, [], [])
    judge = Judge(RewardRetry(limit_s=60.0, backoff_s=0.5, max_backoff_s=3.0))
    pauses = []
    for now in range(5):
        assert judge.refused(call, "refused", float(now), after_s=0.0, probe=True)
        assert judge.outage is not None
        pauses.append(judge.outage.delay_s)
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_retry_after_is_respected(port: int) -> None:
    async def scenario() -> None:
        with judge(port) as server:
            server.answer = lambda what, count: (429, "0.7") if count == 1 else (200, "")
            async with pool(line(port), retry=QUICK) as made:
                assert values(await made.score([[sample("a")]], lambda: None)) == [[1.0]]
        (first, _), (second, _) = server.asked
        assert second - first >= 0.7

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [400, 429])
def test_a_judge_that_refuses_a_sample_has_answered(port: int, status: int) -> None:
    async def scenario() -> None:
        with judge(port) as server:
            server.answer = lambda what, count: (status if what == "bad" else 200, "")
            async with pool(line(port), retry=QUICK) as made:
                ((bad, good),) = await made.score([[sample("bad"), sample("good")]], lambda: None)
                assert (bad.kind, good.value) == (LossReason.RAISED, 1.0)
                assert f"HTTP Error {status}" in bad.failure
                assert kinds(made) == [TroubleKind.REWARDS]

    asyncio.run(scenario())


def test_a_sample_that_the_judge_never_answers_is_lost_once_others_were_answered(port: int) -> None:
    async def scenario() -> None:
        with judge(port) as server:
            server.answer = lambda what, count: (500 if what == "poison" else 200, "")
            async with pool(line(port), retry=QUICK) as made:
                lost = asyncio.create_task(made.score([[sample("poison")]], lambda: None))
                async with asyncio.timeout(20):
                    while not lost.done():
                        assert values(await made.score([[sample("good")]], lambda: None)) == [[1.0]]
                ((only,),) = lost.result()
                assert (only.value, only.kind) == (None, LossReason.JUDGE)
                assert made.reachable.is_set()

    asyncio.run(scenario())


def test_a_wait_beyond_the_limit_requests_the_end_of_the_run(port: int) -> None:
    async def scenario() -> Trouble:
        async with pool(line(port), retry=RewardRetry(limit_s=0.5, backoff_s=0.05, max_backoff_s=0.2)) as made:
            scoring = asyncio.create_task(made.score([[sample("a")]], lambda: None))
            await until(lambda: any(each.ends_run for each in made.troubles()))
            scoring.cancel()
            return made.troubles()[0]

    told = asyncio.run(scenario())
    assert "the judge of my_judged:judged has not answered for 0.5 s (reward.retry.limit_s)" in told.text
    assert "Connection refused" in told.text
    assert "\n" not in told.text


def test_samples_are_lost_at_once_if_the_wait_limit_is_zero(port: int) -> None:
    async def scenario() -> None:
        async with pool(line(port), retry=RewardRetry(limit_s=0)) as made:
            ((only,),) = await made.score([[sample("a")]], lambda: None)
            assert (only.value, only.kind) == (None, LossReason.JUDGE)
            assert made.reachable.is_set()

    asyncio.run(scenario())


def test_an_outage_ends_when_the_scoring_that_waits_for_the_judge_is_cancelled(port: int) -> None:
    async def scenario() -> None:
        async with pool(line(port), retry=QUICK) as made:
            scoring = asyncio.create_task(made.score(group("a", 4), lambda: None))
            await until(lambda: not made.reachable.is_set())
            scoring.cancel()
            await until(made.reachable.is_set)
            with judge(port):
                assert values(await made.score([[sample("b")]], lambda: None)) == [[1.0]]

    asyncio.run(scenario())


def test_a_retry_that_is_abandoned_before_it_begins_is_not_waited_for(port: int) -> None:
    async def scenario() -> None:
        async with pool(line(port, "judged_slowly"), retry=QUICK, processes=1) as made:
            # The only process is busy with the second call when the first is due for its retry.
            scoring = asyncio.create_task(made.score([[sample("0"), sample("1")]], lambda: None))
            await until(lambda: any(call.probe for call in made._waiting))
            scoring.cancel()
            await until(made.reachable.is_set)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("hangs", "    time.sleep(seconds)"),
        ("hangs_later", "    await asyncio.sleep(60)"),
        ("raises", "    return 1 / 0"),
    ],
)
def test_a_failure_names_the_line_of_user_code_and_has_its_traceback(port: int, function: str, text: str) -> None:
    async def scenario() -> None:
        async with pool(Line(f"my_judged:{function}"), timeout_s=0.3) as made:
            ((first, _),) = await made.score([[sample("a"), sample("b")]], lambda: None)
            place = f"my_judged.py:{REWARDS.splitlines().index(text) + 1}"
            assert first.failure.endswith(f"(at {place})")
            assert f"line {place.partition(':')[2]} in {function}" in first.trace.replace(", in", " in")
            assert f"{os.sep}services{os.sep}" not in first.trace
            [told] = made.troubles()
            assert told.kind == TroubleKind.REWARDS
            assert told.text == f"rewards failing: 2 of 2, {first.failure}"

    asyncio.run(scenario())


def test_failing_rewards_are_reported_during_scoring_and_until_one_succeeds(port: int) -> None:
    (Path.cwd() / "my_judged.py").write_text(
        "import time\n\ndef mixed(sample):\n    time.sleep(60 if sample.completion == 'hang' else 0)\n    return 1.0\n"
    )

    async def scenario() -> None:
        async with pool(Line("my_judged:mixed"), timeout_s=0.3, processes=1) as made:
            scoring = asyncio.create_task(made.score(group("hang", 2), lambda: None))
            await until(lambda: bool(made.troubles()))
            assert not scoring.done()
            assert "failing: 1 of 1" in made.troubles()[0].text
            await scoring
            assert "failing: 2 of 2" in made.troubles()[0].text
            await made.score([[sample("a")]], lambda: None)
            assert not made.troubles()

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------- kinds of errors


def http_error(status: int, **headers: str) -> urllib.error.HTTPError:
    message = Message()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return urllib.error.HTTPError("http://x", status, "no", message, None)


def of_library(module: str, name: str, **attributes: object) -> Exception:
    """Return an exception that looks like one raised by a library, so that the library need not be installed."""
    return type(name, (Exception,), {"__module__": module, **attributes})("no")  # type: ignore[no-any-return]


class Response:
    def __init__(self, status_code: int, **headers: str) -> None:
        self.status_code = status_code
        self.headers = headers


AWAY: list[tuple[BaseException, float]] = [
    (ConnectionRefusedError(), 0.0),
    (ConnectionResetError(), 0.0),
    (socket.gaierror(-2, "Name or service not known"), 0.0),
    (urllib.error.URLError(ConnectionRefusedError()), 0.0),
    (http_error(500), 0.0),
    (http_error(503, Retry_After="3"), 3.0),
    (http_error(429, Retry_After="2.5"), 2.5),
    (of_library("requests.exceptions", "ConnectionError"), 0.0),
    (of_library("requests.exceptions", "ReadTimeout"), 0.0),
    (of_library("requests.exceptions", "HTTPError", response=Response(502)), 0.0),
    (of_library("httpx", "ConnectError"), 0.0),
    (of_library("httpx", "HTTPStatusError", response=Response(429, **{"retry-after": "7"})), 7.0),
    (of_library("aiohttp.client_exceptions", "ClientConnectorError"), 0.0),
    (of_library("aiohttp.client_exceptions", "ClientResponseError", status=504), 0.0),
    (of_library("openai", "InternalServerError", status_code=500), 0.0),
    (of_library("openai", "APITimeoutError"), 0.0),
]
OWN: list[BaseException] = [
    ValueError("no such answer"),
    TimeoutError("its own"),
    BrokenPipeError(),
    FileNotFoundError(),
    http_error(400),
    http_error(429),
    http_error(429, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"),
    of_library("requests.exceptions", "HTTPError", response=Response(404)),
    of_library("my_sandbox", "TimeoutException"),
    of_library("subprocess", "TimeoutExpired"),
    SystemExit(503),
    MemoryError(),
]


@pytest.mark.parametrize(("error", "after_s"), AWAY, ids=lambda each: type(each).__name__)
def test_connection_and_server_errors_count_as_an_unreachable_judge(error: BaseException, after_s: float) -> None:
    assert unavailable(error) == after_s
    wrapped = RuntimeError("no verdict")
    wrapped.__cause__ = error
    assert unavailable(wrapped) == after_s


@pytest.mark.parametrize("error", OWN, ids=lambda each: type(each).__name__)
def test_errors_in_the_function_itself_do_not_count_as_an_unreachable_judge(error: BaseException) -> None:
    assert unavailable(error) is None


def test_a_socket_timeout_is_attributed_to_the_judge_and_an_asyncio_timeout_to_the_function() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.01)
        reader = ours.makefile("rb")
        with pytest.raises(TimeoutError) as late:
            reader.read(1)
    assert unavailable(late.value) == 0.0

    async def own() -> None:
        async with asyncio.timeout(0):
            await asyncio.sleep(1)

    with pytest.raises(TimeoutError) as own_limit:
        asyncio.run(own())
    assert unavailable(own_limit.value) is None
