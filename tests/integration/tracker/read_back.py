"""Reads the data that a tracker has about a run, with the tracker's own library if that library supports reading."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.integration.tracker.tracked import Committed, Tracked

SEE = {
    "tensorboard": "tensorboard --logdir {run}/tensorboard",
    "wandb": "wandb sync {run}/trackers/wandb/wandb/offline-run-*-{id}",
    "mlflow": ".venv-mlflow/bin/mlflow ui --backend-store-uri sqlite:///{run.parent}/mlflow.db "
    "(make setup-mlflow-ui installs it)",
    "trackio": "TRACKIO_DIR={run.parent}/trackio trackio show --project p",
}
"""How the run in `{run}` is seen in each tracker of the tests."""


class Held:
    """The data of a tracker: the rows in its order, the configuration, and the text of all notes and samples."""

    def __init__(
        self, rows: list[Committed], configuration: str, notes: str, state: str = "", samples: str = ""
    ) -> None:
        self.rows, self.configuration, self.notes, self.state = rows, configuration, notes, state
        self.samples = samples


def tensorboard(here: Tracked) -> Held:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows: list[Committed] = []
    text = ""
    folders = sorted((here.run.path / "tensorboard").glob("lineage-*"), key=lambda each: int(each.name[8:]))
    for folder in folders:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False)
        events.Reload()
        lineages = [int(each.value) for each in events.Scalars("lineage")]
        losses = events.Scalars("loss/policy")
        rows += [(lineage, each.step, each.value) for lineage, each in zip(lineages, losses, strict=True)]
        for tag in events.Tags()["tensors"]:
            text += "".join(f"{tag}: {each.tensor_proto.string_val[0].decode()}\n" for each in events.Tensors(tag))
    return Held(rows, text, text, samples=text)


def wandb(here: Tracked) -> Held:
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    rows: dict[int, Committed] = {}
    configuration, notes = "", ""
    paths = sorted((here.run.path / "trackers" / "wandb").glob("wandb/offline-run-*/*.wandb"))
    assert {path.stem for path in paths} == {f"run-{here.ledger().id}"}
    for path in paths:
        for data in records(path.read_bytes()):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                values = {(each.key or each.nested_key[0]): json.loads(each.value_json) for each in record.history.item}
                position = record.history.step.num
                row = (values["lineage"], values["step"], values["loss/policy"])
                assert rows.setdefault(position, row) == row, f"two rows {position}"
            elif kind == "config" or kind == "run":
                configuration += str(record)
            elif kind == "alert":
                notes += f"{record.alert.title}: {record.alert.text}\n"
    assert list(rows) == list(range(len(rows)))
    folder = here.run.path / "trackers" / "wandb"
    samples = "".join(str(json.loads(path.read_text())) for path in folder.rglob("*.table.json"))
    return Held(list(rows.values()), configuration, notes, samples=samples)


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a `.wandb` file (LevelDB's log format: blocks of record pieces, each with a header)."""
    magic_bytes, block_bytes, header_bytes, full, last = 7, 32768, 7, 1, 4
    position, record = magic_bytes, b""
    while position + header_bytes <= len(data):
        left = block_bytes - position % block_bytes
        if left < header_bytes:
            position += left
            continue
        nbytes = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        begin = position + header_bytes
        position = begin + nbytes
        if kind == 0 or position > len(data):
            return
        record += data[begin:position]
        if kind in (full, last):
            yield record
            record = b""


def wandb_positions(paths: Iterable[Path]) -> list[int]:
    """Return the numbers of the rows in `.wandb` files. A row of the last seconds before a kill appears twice."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = (Record.FromString(data) for path in paths for data in records(path.read_bytes()))
    return sorted({record.history.step.num for record in found if record.WhichOneof("record_type") == "history"})


def mlflow(here: Tracked) -> Held:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{here.run.path.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("rlbus")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])

    def column(name: str) -> list[float]:
        history = sorted(client.get_metric_history(run.info.run_id, name), key=lambda each: each.step)
        assert [each.step for each in history] == list(range(len(history))), f"{name}: {history}"
        return [each.value for each in history]

    rows = list(zip(map(int, column("lineage")), map(int, column("step")), column("loss/policy"), strict=True))
    files = client.list_artifacts(run.info.run_id, "samples")
    artifacts = [client.download_artifacts(run.info.run_id, each.path) for each in files]
    samples = "".join(Path(path).read_text() for path in artifacts)
    return Held(rows, str(run.data.params), str(run.data.tags), run.info.status, samples=samples)


def trackio(here: Tracked) -> Held:
    [path] = Path(here.environment["TRACKIO_DIR"]).glob("p*.db")
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        assert len(database.execute("SELECT DISTINCT run_id FROM metrics").fetchall()) == 1
        import json

        found = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
        [(configuration,)] = database.execute("SELECT config FROM configs").fetchall()
        notes = database.execute("SELECT title, text FROM alerts").fetchall()
    logged: list[dict[str, Any]] = [{"position": step, **json.loads(metrics)} for step, metrics in found]
    values = [each for each in logged if "training_step" in each]
    samples = str([each["samples"] for each in logged if "samples" in each])
    assert [each["position"] for each in values] == list(range(len(values)))
    rows = [(each["lineage"], each["training_step"], each["loss/policy"]) for each in values]
    return Held(rows, str(configuration), str(notes), samples=samples)
