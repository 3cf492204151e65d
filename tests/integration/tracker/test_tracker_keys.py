"""Tests that the trackers' topology keys decide where a run is recorded and that an error is reported in one line."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launch.checks import preflight
from shared.topology import load
from tests.integration.tiny.harness import ROOT, wait_for
from tests.integration.tracker import read_back
from tests.integration.tracker.read_back import Held
from tests.integration.tracker.tracked import LIMIT_S, Tracked, tracked
from tests.unit.shared.topology.small_topology import make, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_wandb_files_name_the_project_and_the_entity(tmp_path: Path) -> None:
    section = {"project": "a-project", "entity": "a-team", "mode": "offline"}
    with tracked(tmp_path, "wandb", section) as here:
        here.commit(0)
        done = here.command()
        assert done.returncode == 0, done.stderr
        held = read_back.wandb(here)
        assert 'project: "a-project"' in held.configuration
        assert 'entity: "a-team"' in held.configuration


@pytest.mark.long
def test_wandb_contacts_the_server_when_online_but_not_when_offline(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        environment = {
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            "WANDB_API_KEY": "0" * 40,
        }
        server.settimeout(LIMIT_S)
        (tmp_path / "offline").mkdir()
        with tracked(tmp_path / "offline", "wandb", {"project": "p", "mode": "offline"}, **environment) as here:
            here.commit(0)
            assert here.command().returncode == 0
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
        server.settimeout(LIMIT_S)
        (tmp_path / "online").mkdir()
        with tracked(tmp_path / "online", "wandb", {"project": "p"}, **environment) as here:
            here.commit(0)
            here.start()
            server.accept()[0].close()


def test_event_files_are_in_the_directory_that_the_topology_names(tmp_path: Path) -> None:
    with tracked(tmp_path, "tensorboard", {"directory": str(tmp_path / "boards")}) as here:
        here.commit(0)
        assert here.command().returncode == 0
        assert [path.name for path in (tmp_path / "boards" / "a-run").iterdir()] == ["lineage-0"]
        assert not (here.run.path / "tensorboard").exists()


@pytest.mark.parametrize("samples", [0, 1])
@pytest.mark.parametrize(
    ("name", "section", "read"),
    [
        ("tensorboard", {}, read_back.tensorboard),
        pytest.param("wandb", {"project": "p", "mode": "offline"}, read_back.wandb, marks=pytest.mark.long),
        pytest.param("trackio", {"project": "p"}, read_back.trackio, marks=pytest.mark.long),
        pytest.param("mlflow", {"uri": "sqlite:///FOLDER/mlflow.db"}, read_back.mlflow, marks=pytest.mark.long),
    ],
)
def test_no_samples_are_sent_if_the_topology_says_so(
    tmp_path: Path, name: str, section: dict[str, str], read: Callable[[Tracked], Held], samples: int
) -> None:
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    values = {key: value.replace("FOLDER", str(tmp_path)) for key, value in section.items()}
    with tracked(tmp_path, name, {**values, "samples": samples}, **environment) as here:
        here.commit(0, 1)
        here.sample("train", 1, "an answer")
        done = here.command()
        assert done.returncode == 0, done.stderr
        assert ("an answer" in read(here).samples) == bool(samples)


@pytest.mark.long
def test_mlflow_has_the_run_at_the_uri_and_in_the_experiment_that_the_topology_names(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/other.db"
    with tracked(tmp_path, "mlflow", {"uri": uri, "experiment": "an experiment"}) as here:
        here.commit(0)
        done = here.command()
        assert done.returncode == 0, done.stderr
        client = MlflowClient(uri)
        found = client.get_experiment_by_name("an experiment")
        assert found is not None
        [run] = client.search_runs([found.experiment_id])
        assert (run.info.run_name, run.info.status) == ("a-run", "KILLED")


@pytest.mark.long
def test_mlflow_has_every_row_if_samples_cannot_be_stored(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    (tmp_path / "a-file").touch()
    client = MlflowClient(uri)
    experiment = client.create_experiment("rlbus", str(tmp_path / "a-file" / "artifacts"))
    with tracked(tmp_path, "mlflow", {"uri": uri}) as here:
        here.commit(0, 1, 2)
        here.sample("train", 1, "an answer")
        done = here.command()
        assert done.returncode == 0, done.stderr
        held = read_back.mlflow(here)
        assert held.rows == here.committed
        [run] = client.search_runs([experiment])
        assert run.data.tags["samples"].startswith("none: artifacts cannot be stored: NotADirectoryError")


def test_trackio_has_the_run_in_the_project_that_the_topology_names(tmp_path: Path) -> None:
    with tracked(tmp_path, "trackio", {"project": "a-project"}, TRACKIO_DIR=str(tmp_path / "trackio")) as here:
        here.commit(0)
        assert here.command().returncode == 0
        assert "a-project.db" in [path.name for path in (tmp_path / "trackio").iterdir()]


@contextmanager
def trackio_server(folder: Path) -> Iterator[tuple[str, str]]:
    """Run a trackio server with its database in `folder`. Yield its address and its write token."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    code = f"import trackio; trackio.show(open_browser=False, block_thread=True, host='127.0.0.1', server_port={port})"
    server = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TRACKIO_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output: list[str] = []
    assert server.stdout is not None
    reader = threading.Thread(target=output.extend, args=(iter(server.stdout.readline, ""),))
    reader.start()
    try:
        token = re.compile(r"write_token=([\w-]+)")
        found = wait_for("the server's token", lambda: token.search("".join(output)), LIMIT_S)
        yield f"http://127.0.0.1:{port}/", found[1]
    finally:
        server.kill()
        server.wait()
        reader.join()


@pytest.mark.long
def test_trackio_sends_to_the_server_that_the_topology_names(tmp_path: Path) -> None:
    with (
        trackio_server(tmp_path / "trackio") as (url, token),
        tracked(tmp_path, "trackio", {"project": "p", "url": url}, TRACKIO_DIR=str(tmp_path / "trackio")) as here,
    ):
        here.commit(0, 1, 2)
        done = here.command()
        assert done.returncode == 1
        assert "TRACKIO_WRITE_TOKEN" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        here.environment = {**here.environment, "TRACKIO_WRITE_TOKEN": token}
        done = here.command()
        assert done.returncode == 0, done.stderr
        here.rewind(1)
        here.commit(2, 3)
        done = here.command()
        assert done.returncode == 0, done.stderr
        assert read_back.trackio(here).rows == here.committed


@pytest.mark.long
def test_wandb_without_a_key_is_refused_with_a_one_line_error(tmp_path: Path) -> None:
    with tracked(tmp_path, "wandb", {"project": "p"}, WANDB_API_KEY="", HOME=str(tmp_path), NETRC="/dev/null") as here:
        here.commit(0)
        done = here.command()
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert "WANDB_API_KEY" in done.stderr


@contextmanager
def refusing_server(status: int, kind: str, body: str) -> Iterator[str]:
    """A server that gives the same answer to every request. Yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refusal(here: Tracked) -> str:
    """Return the line with which the tracker refuses the run."""
    here.commit(0)
    done = here.command()
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert here.ledger().sent == 0
    return line


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "message", "remedy"),
    [
        (401, "user is not logged in", "(WANDB_API_KEY, or `wandb login`)"),
        (403, "permission denied", "(monitor.wandb.entity and project)"),
        (404, "entity a-team not found during upsertBucket", "(monitor.wandb.entity and project)"),
    ],
)
def test_wandb_refuses_a_wrong_key_entity_or_project_with_a_one_line_error(
    tmp_path: Path, status: int, message: str, remedy: str
) -> None:
    answer = json.dumps({"data": None, "errors": [{"message": message}]})
    section = {"project": "a-project", "entity": "a-team"}
    with (
        refusing_server(status, "application/json", answer) as url,
        tracked(tmp_path, "wandb", section, WANDB_BASE_URL=url, WANDB_API_KEY="0" * 40) as here,
    ):
        line = refusal(here)
        assert message in line
        assert line.endswith(remedy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "kind", "body", "code"),
    [
        (401, "text/html", "You are not authenticated.", "UNAUTHENTICATED"),
        (403, "text/html", "Permission denied", "PERMISSION_DENIED"),
        (403, "application/json", '{"error_code": "PERMISSION_DENIED", "message": "no"}', "PERMISSION_DENIED"),
    ],
)
def test_mlflow_refuses_a_wrong_user_with_a_one_line_error(
    tmp_path: Path, status: int, kind: str, body: str, code: str
) -> None:
    with refusing_server(status, kind, body) as url, tracked(tmp_path, "mlflow", {"uri": url}) as here:
        line = refusal(here)
        assert line.startswith(f"mlflow: {url}: {code}: ")
        assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN" in line


@pytest.mark.long
def test_a_deleted_mlflow_experiment_is_refused_with_a_one_line_error(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    client.delete_experiment(client.create_experiment("a"))
    with tracked(tmp_path, "mlflow", {"uri": uri, "experiment": "a"}) as here:
        assert refusal(here) == (
            "mlflow: experiment 'a' has been deleted; restore it, or name another (monitor.mlflow.experiment)"
        )


def test_a_warning_names_a_missing_library_and_what_is_lost_and_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = load(write(make(tmp_path)), ["monitor.trackio.project=p", "policy.model=./model"])
    monkeypatch.setitem(sys.modules, "trackio", None)  # importing trackio fails as if it were not installed
    findings = preflight.check(topology, "t.yaml")
    assert [line for line in findings.warnings if "trackio" in line] == [
        "t.yaml: monitor.trackio: trackio not installed; the run goes on without trackio, which receives no "
        "steps; run `make setup-trackers`, then `ctl restart tracker` or, after the run, `ctl track trackio` sends "
        "them"
    ]
    assert [line for line in findings.errors if "trackio" in line] == []
