"""Tests models and data sets that are given by their hub names and fetched by the real client from a hub on this
machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from shared.topology import load
from tests.integration.hub.hub_server import TOKEN, LocalHub, Repository, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
MODEL = ROOT / "launch" / "topologies" / "models" / "tiny-qwen3"
NEXT = "b" * 40
# No machine has this much memory, so a start fails once everything has been fetched.
NO_RUN = ("--set", "services.batch-store.memory=4000GiB")
NO_RUN_TEXT = "services.batch-store.memory: "
POLL_S = 0.05
WRITTEN_BYTES = 10 << 20
"""Size of the pieces in which the client writes a file."""


def sums(first: int, count: int) -> bytes:
    """Return a Parquet file of questions and answers."""
    rows = [{"question": f"{each}+1=", "answer": str(each + 1)} for each in range(first, first + count)]
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def repositories() -> dict[str, Repository]:
    model = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    model |= {
        "notes.txt": bytes(5 * WRITTEN_BYTES // 2),
        "pytorch_model.bin": b"another format",
        "onnx/config.json": b"{}",
        "README.md": b"# Adder",
    }
    data = {f"main/train-0000{part}-of-00002.parquet": sums(10 + 40 * part, 40) for part in range(2)}
    data |= {"test.jsonl": b'{"prompt": "1+1=", "answer": "2"}\n', "README.md": b"# Sums", "other/train.csv": b"1,2"}
    return {"models/adders/tiny": Repository(model), "datasets/adders/sums": Repository(data, gated=True)}


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with serving(LocalHub(repositories())) as served:
        yield served


@dataclasses.dataclass
class User:
    """A user who runs commands with a separate cache."""

    folder: Path
    hub: LocalHub

    def environment(self, **more: str) -> dict[str, str]:
        hub = {"HF_HOME": str(self.folder / "hf"), "HF_ENDPOINT": self.hub.url, "HF_TOKEN": TOKEN}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        return {**kept, "PYTHONPATH": str(ROOT), "PATH": path, **hub, "HF_HUB_OFFLINE": "0", **more}

    def launch(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launch.cluster", str(self.topology), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment(**more), capture_output=True, text=True, timeout=280
        )

    @property
    def topology(self) -> Path:
        return self.folder / "t.yaml"

    @property
    def cache(self) -> Path:
        return self.folder / "hf" / "hub"


@pytest.fixture
def user(tmp_path: Path, hub: LocalHub) -> User:
    data = yaml.safe_load(QUICKSTART.read_text())
    data["policy"]["model"] = "adders/tiny"
    data["data"]["train"]["source"] = "hub:adders/sums/main/train?prompt=question"
    data["data"]["eval"]["heldout"]["source"] = "hub:adders/sums/test"
    data["run"]["steps"] = 2
    data["algorithm"] |= {"tasks_per_step": 4, "group_size": 4}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    return User(tmp_path, hub)


def fetched(user: User) -> set[str]:
    """Return the files in the snapshots of the cache."""
    return {path.relative_to(user.cache).as_posix() for path in user.cache.glob("*/snapshots/**/*") if path.is_file()}


def one_line(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 2, ended.stdout + ended.stderr
    [line] = [each for each in ended.stderr.splitlines() if ": " in each and str(ended.args[3]) in each]
    assert "Traceback" not in ended.stderr
    return line


def test_dry_run_says_what_would_be_fetched_and_fetches_nothing(user: User) -> None:
    ended = user.launch("--dry-run")
    assert ended.returncode == 0, ended.stderr
    lines = [each.split(maxsplit=2)[2] for each in ended.stdout.splitlines() if each.startswith("would fetch")]
    assert [line.partition(",")[0] for line in lines] == [
        "adders/tiny: 7 files",
        "adders/sums/main/train: 2 files",
        "adders/sums/test: 1 files",
    ]
    assert lines[0].endswith(f" MiB, commit {'a' * 40}")
    assert not user.cache.exists()
    assert not any("/resolve/" in path for _, path, _ in user.hub.requests)


@pytest.mark.long
def test_a_run_fetches_its_files_records_their_commits_and_resumes_with_them(
    user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    ended = user.launch("--run-dir", str(run))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    names = fetched(user)
    assert f"models--adders--tiny/snapshots/{'a' * 40}/model.safetensors" in names
    assert f"datasets--adders--sums/snapshots/{'a' * 40}/main/train-00001-of-00002.parquet" in names
    assert not [name for name in names if name.endswith((".bin", ".csv", ".md", "onnx/config.json"))]
    resolved = yaml.safe_load((run / "topology.yaml").read_text())
    assert resolved["policy"]["model"] == f"{user.cache}/models--adders--tiny/snapshots/{'a' * 40}"
    assert resolved["data"]["train"]["source"].endswith("/main/train-*.parquet?prompt=question")

    # The heads move. A new run would use the new heads. This run keeps its commits, and does not need the hub for them.
    for each in user.hub.repositories.values():
        each.commit = NEXT
    asked = len(user.hub.requests)
    ended = user.launch("--run-dir", str(run), "--resume", "--set", "run.steps=3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert user.hub.requests[asked:] == []
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4
    ended = user.launch("--dry-run")
    assert f"commit {NEXT}" in ended.stdout

    # Another host finds the commits of the run in its own cache.
    monkeypatch.setenv("HF_HUB_CACHE", str(user.cache.rename(tmp_path / "elsewhere")))
    there = load(run / "topology.yaml")
    assert there.policy.model == f"{tmp_path}/elsewhere/models--adders--tiny/snapshots/{'a' * 40}"
    assert str(tmp_path / "elsewhere") in there.data.train.source


def test_an_offline_start_names_the_command_that_fetches_the_missing_files(user: User) -> None:
    line = one_line(user.launch("--dry-run", HF_HUB_OFFLINE="1"))
    assert line == (
        f"{user.topology}: adders/tiny: not complete in the local Hugging Face cache {user.cache}, and HF_HUB_OFFLINE "
        "is set; fetch it where there is a network, with: hf download adders/tiny"
    )
    for _ in range(4):  # The command in each error lets the next start get further.
        ended = user.launch("--dry-run", HF_HUB_OFFLINE="1")
        if ended.returncode == 0:
            break
        command = shlex.split(one_line(ended).rpartition("with: ")[2])
        subprocess.run(command, env=user.environment(), check=True, capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    # An unreachable hub is not a problem, either.
    ended = user.launch("--dry-run", HF_ENDPOINT="http://127.0.0.1:9")
    assert ended.returncode == 0, ended.stderr


def test_the_new_commit_of_a_moved_revision_is_used_even_if_its_files_are_cached_already(user: User) -> None:
    for commit in (None, NEXT):
        for each in user.hub.repositories.values():
            each.commit = commit or each.commit
        assert NO_RUN_TEXT in user.launch(*NO_RUN).stderr
    refs = {path: path.read_text() for path in user.cache.glob("*/refs/main")}
    assert set(refs.values()) == {NEXT}
    for path in refs:
        path.write_text("a" * 40)
    got(user)
    assert NO_RUN_TEXT in user.launch(*NO_RUN).stderr
    assert {path.read_text() for path in refs} == {NEXT}
    assert got(user) == []


def test_an_unreachable_hub_gives_a_one_line_error(user: User) -> None:
    line = one_line(user.launch("--dry-run", HF_ENDPOINT="http://127.0.0.1:9"))
    assert "http://127.0.0.1:9 cannot be reached (" in line
    assert line.endswith("with: hf download adders/tiny")


def got(user: User) -> list[tuple[str, str]]:
    """Return the name and the range of every requested file, and clear the list of requests."""
    files = [
        (Path(path).name, span) for method, path, span in user.hub.requests if method == "GET" and "/resolve/" in path
    ]
    user.hub.requests.clear()
    return files


def test_a_download_over_a_broken_connection_continues_where_it_stopped(user: User) -> None:
    user.hub.break_after_bytes, user.hub.breaks = 3 * WRITTEN_BYTES // 2, 1
    ended = user.launch(*NO_RUN)
    assert NO_RUN_TEXT in ended.stderr, ended.stderr
    assert [span for name, span in got(user) if name == "notes.txt"] == ["", f"bytes={WRITTEN_BYTES}-"]


def test_a_download_that_breaks_off_for_good_keeps_complete_files(user: User) -> None:
    user.hub.break_after_bytes = 3 * WRITTEN_BYTES // 2
    line = one_line(user.launch())
    assert "adders/tiny: the download was interrupted (" in line
    assert line.endswith("; complete files are kept, and the same command fetches the rest")
    assert not list(user.cache.rglob("*.incomplete"))
    whole = {Path(name).name for name in fetched(user)}
    assert "config.json" in whole
    assert "notes.txt" not in whole
    got(user)
    user.hub.break_after_bytes = None
    assert NO_RUN_TEXT in user.launch(*NO_RUN).stderr
    assert not {name for name, _ in got(user)} & whole
    assert "notes.txt" in {Path(name).name for name in fetched(user)}


def test_interrupt_stops_a_download_at_once(user: User) -> None:
    user.hub.hold_after_bytes = 3 * WRITTEN_BYTES // 2
    command = [sys.executable, "-m", "launch.cluster", str(user.topology)]
    process = subprocess.Popen(
        command, cwd=user.folder, env=user.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    until = time.monotonic() + 200
    sizes: list[int] = []
    while WRITTEN_BYTES not in sizes:
        assert process.poll() is None
        assert time.monotonic() < until, sizes
        time.sleep(POLL_S)
        with contextlib.suppress(FileNotFoundError):  # a file that is complete is renamed
            sizes = [path.stat().st_size for path in user.cache.rglob("*.incomplete")]
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "complete files are kept, and the same command fetches the rest" in output
    assert not list(user.cache.rglob("*.incomplete"))


def test_gated_data_set_needs_a_token(user: User) -> None:
    line = one_line(user.launch("--dry-run", HF_TOKEN=""))
    assert line == (
        f"{user.topology}: adders/sums/main/train: access is restricted; accept the terms at "
        f"{user.hub.url}/datasets/adders/sums, and set HF_TOKEN (or run: hf auth login)"
    )


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("policy.model", "adders/tinny", "no folder here, and the model {url}/adders/tinny is missing or private"),
        ("policy.model", "adders/tiny@v9", "has no revision 'v9'; give a branch, a tag or a commit after the @"),
        (
            "data.train.source",
            "hub:adders/sums/main/trian",
            "no Parquet or JSONL file main/trian*; did you mean 'main/train'?",
        ),
    ],
)
def test_a_name_unknown_to_the_hub_gives_a_one_line_error(user: User, key: str, value: str, text: str) -> None:
    line = one_line(user.launch("--dry-run", "--set", f"{key}={value}"))
    assert text.format(url=user.hub.url) in line


def test_files_too_large_for_the_disk_are_refused_before_they_are_fetched(user: User) -> None:
    mount = user.folder / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "none", str(mount)], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        line = one_line(user.launch(HF_HOME=str(mount)))
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
    assert f"adders/tiny: {mount}/hub needs " in line
    assert line.endswith("; make room, or name another folder with HF_HOME")
    assert not any("/resolve/" in path for _, path, _ in user.hub.requests)


def test_the_launcher_imports_the_client_only_when_it_is_needed() -> None:
    code = "import sys; from launch import cluster; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_rows_of_several_files_are_read_one_file_after_another(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"part-{number}.jsonl").write_text(
            "".join(json.dumps({"question": f"{number}{each}", "answer": each}) + "\n" for each in range(number + 1))
        )
    from shared.data import open_source

    source = open_source(f"jsonl:{tmp_path}/part-*.jsonl?prompt=question", where="t")
    assert [source.row(index)["prompt"] for index in range(len(source))] == ["00", "10", "11", "20", "21", "22"]
    assert source.place(4) == f"{tmp_path}/part-2.jsonl:2"
    (tmp_path / "part-3.jsonl").write_text('{"answer": 1}\n')
    [bad] = open_source(f"jsonl:{tmp_path}/part-*.jsonl?prompt=question", where="t").validate()
    assert bad.index == 6
