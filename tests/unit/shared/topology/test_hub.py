"""Tests how hub names in topologies are read, and where the files that they name are in the local cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shared.topology import distribution, hub, hub_names, load
from shared.topology.hub import HubName
from tests.unit.shared.topology.small_topology import edited, problems

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    return folder


def snapshot(cache: Path, repository: str, *files: str) -> Path:
    """Put empty files into the cache, as the `main` revision of a repository."""
    folder = cache / repository / "snapshots" / COMMIT
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    (cache / repository / "refs").mkdir(parents=True)
    (cache / repository / "refs" / "main").write_text(COMMIT)
    return folder


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", HubName("model", "Qwen/Qwen2.5-0.5B")),
        ("Qwen/Qwen2.5-0.5B@v1.0", HubName("model", "Qwen/Qwen2.5-0.5B", "v1.0")),
        ("Qwen/Qwen2.5-0.5B@refs/pr/4", HubName("model", "Qwen/Qwen2.5-0.5B", "refs/pr/4")),
        (f"/c/models--Qwen--Q/snapshots/{COMMIT}", HubName("model", "Qwen/Q", COMMIT)),
        ("./model", None),
        ("/data/model", None),
        ("a/b/c", None),
        (f"/c/models--Qwen--Q/snapshots/{COMMIT}/onnx", None),
    ],
)
def test_hub_name_of_a_model_is_read_from_its_name_or_its_snapshot_folder(value: str, name: HubName | None) -> None:
    assert hub.model_name(value) == name


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("hub:openai/gsm8k/main/train", HubName("dataset", "openai/gsm8k", "main", "main/train")),
        ("hub:a/b/c?prompt=question", HubName("dataset", "a/b", "main", "c")),
        ("hub:a/b@refs/convert/parquet/c/d", HubName("dataset", "a/b", "refs/convert/parquet", "c/d")),
        (f"jsonl:/c/datasets--a--b/snapshots/{COMMIT}/x.jsonl?prompt=q", HubName("dataset", "a/b", COMMIT, "x.jsonl")),
        ("hub:a/b", None),
        ("hub:a/b/", None),
        ("jsonl:/data/x.jsonl", None),
    ],
)
def test_hub_name_of_a_data_set_is_read_from_its_source(value: str, name: HubName | None) -> None:
    assert hub.source_name(value) == name


@pytest.mark.parametrize(
    ("files", "source"),
    [
        (["main/train-00000-of-00001.parquet"], "parquet:{}/main/train-00000-of-00001.parquet"),
        (["main/train-0-of-2.parquet", "main/train-1-of-2.parquet"], "parquet:{}/main/train-*.parquet"),
        (["main/train/0000.parquet", "main/train/0001.parquet"], "parquet:{}/main/train/*.parquet"),
        (["main/train.jsonl", "main/trainer.jsonl"], "jsonl:{}/main/train.jsonl"),
        (["main/train.jsonl", "main/train.parquet"], "parquet:{}/main/train.parquet"),
        (["main/test.parquet", "main/train.csv"], None),
    ],
)
def test_files_of_a_data_set_are_found_by_their_names(cache: Path, files: list[str], source: str | None) -> None:
    folder = snapshot(cache, "datasets--a--b", *files)
    assert hub.source_files("hub:a/b/main/train") == (source and source.format(folder))
    with_prompt = source and f"{source.format(folder)}?prompt=question"
    assert hub.source_files("hub:a/b/main/train?prompt=question") == with_prompt


def test_folder_of_a_commit_is_looked_up_in_the_cache_of_this_host(cache: Path, folder: Path) -> None:
    here = snapshot(cache, "models--Org--Name")
    here.parent.mkdir(parents=True)
    (folder / "model").rename(here)
    path = edited(folder, "./model", f"/elsewhere/hub/models--Org--Name/snapshots/{COMMIT}")
    assert load(path).policy.model == str(here)
    [line] = problems(path, f"policy.model=/elsewhere/hub/models--Org--Name/snapshots/{COMMIT[::-1]}")
    assert line.endswith(f"fetch it with: hf download Org/Name --revision {COMMIT[::-1]}")


def test_folder_with_the_name_of_a_hub_model_takes_precedence(cache: Path, folder: Path) -> None:
    (folder / "models").mkdir()
    (folder / "model").rename(folder / "models" / "mine")
    path = edited(folder, "./model", "models/mine")
    assert load(path).policy.model == str(folder / "models" / "mine")
    assert hub_names(path) == {}
    assert hub_names(path, ["policy.model=models/other"]) == {("policy", "model"): HubName("model", "models/other")}


def test_data_set_that_is_not_in_the_cache_causes_a_one_line_error(cache: Path, folder: Path) -> None:
    [line] = problems(edited(folder, "jsonl:rows.jsonl", "hub:a/b@v1/main/train"))
    assert line.endswith(
        f"a/b@v1/main/train is not in the local Hugging Face cache {cache}; fetch it with: "
        "hf download a/b --repo-type dataset --include 'main/train*' --revision v1"
    )


def test_files_that_match_a_pattern_are_distributed_under_their_own_names(tmp_path: Path) -> None:
    for name in ("part-0.jsonl", "part-1.jsonl", "other.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    source = f"jsonl:{tmp_path}/part-*.jsonl?prompt=question"
    data = {"policy": {"model": f"{tmp_path}/model"}, "data": {"train": {"source": source}}}
    sent = [(file.path, path.name) for file, path in distribution.files(data)]
    assert sent == [
        ("0/model/config.json", "config.json"),
        ("1/part-0.jsonl", "part-0.jsonl"),
        ("1/part-1.jsonl", "part-1.jsonl"),
    ]
    there = distribution.relocated(data, Path("/there"))
    assert there["data"]["train"]["source"] == "jsonl:/there/1/part-*.jsonl?prompt=question"


def test_the_model_of_a_critic_may_be_given_by_its_hub_name(cache: Path, folder: Path) -> None:
    path = edited(folder, "optimizer:", "critic: {model: a/value, optimizer: {lr: 1e-4}}\noptimizer:")
    name = HubName("model", "a/value")
    assert hub_names(path) == {("critic", "model"): name}
    gae = "algorithm.advantage={name: gae}"
    assert problems(path, gae)[0].endswith("fetch it with: hf download a/value")
    there = snapshot(cache, name.folder, "config.json", "model.safetensors")
    shutil.copytree(folder / "model", there, dirs_exist_ok=True)
    topology = load(path, [gae, "services.batch-store.memory=16MiB"])
    assert str(topology.trained[1].folder) == str(there)
    assert hub.model_name(str(there)) == HubName("model", "a/value", COMMIT)
    (folder / "a" / "value").mkdir(parents=True)
    assert hub_names(path) == {}


def test_the_model_of_a_critic_is_distributed_once_if_it_is_the_policys(tmp_path: Path) -> None:
    for name in ("model", "value"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    data = {"policy": {"model": f"{tmp_path}/model"}, "data": {"train": {"source": "builtin:addition"}}}
    own = {**data, "critic": {"model": f"{tmp_path}/value"}}
    assert [file.path for file, _ in distribution.files(own)] == ["0/model/config.json", "1/value/config.json"]
    assert distribution.relocated(own, Path("/there"))["critic"]["model"] == "/there/1/value"
    same = {**data, "critic": {"model": f"{tmp_path}/model"}}
    assert [file.path for file, _ in distribution.files(same)] == ["0/model/config.json"]
    assert distribution.relocated(same, Path("/there"))["critic"]["model"] == "/there/0/model"
    assert len(distribution.files({**data, "critic": None})) == 1
