"""The record of a run's inputs: which changes to a model's folder are noticed, and when its bytes are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared import inputs as module
from shared.inputs import Inputs, changed, check_model, compared, model_files, uncertain, with_digest
from shared.rpc.errors import BadInput, is_certain


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
        "additional_chat_templates/a.jinja",
    ):
        (folder / name).write_text(f"content of {name}")
    return folder


def recorded(folder: Path) -> dict[str, module.ModelFile]:
    return {name: with_digest(folder, name, file) for name, file in model_files(folder).items()}


def rewrite(path: Path, text: str) -> None:
    """Change a file as a program would that restores the time of modification."""
    status = path.stat()
    path.write_text(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_files_on_which_weights_tokens_or_prompts_depend_are_compared(model: Path) -> None:
    begun = recorded(model)
    assert "README.md" not in begun
    for name in begun:
        text = (model / name).read_text()
        rewrite(model / name, text.upper())  # the size and the time of modification are the same
        assert changed(begun, compared(model, begun)) == [f"{name} has changed"]
        rewrite(model / name, text)
        assert changed(begun, compared(model, begun)) == []
    (model / "chat_template.jinja").write_text("new")
    (model / "tokenizer.json").unlink()
    (model / "README.md").unlink()
    assert changed(begun, compared(model, begun)) == ["chat_template.jinja was added", "tokenizer.json is missing"]


def test_a_file_is_read_again_only_if_its_inode_or_its_times_changed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = recorded(model)
    read: list[str] = []

    def count(folder: Path, name: str, file: module.ModelFile) -> module.ModelFile:
        read.append(name)
        return with_digest(folder, name, file)

    monkeypatch.setattr(module, "with_digest", count)
    assert compared(model, begun) == begun
    assert read == []
    os.utime(model / "config.json")
    (model / "model.safetensors").write_text("of another size")
    assert changed(begun, compared(model, begun)) == ["model.safetensors has changed"]
    assert read == ["config.json"]


def test_a_file_that_was_never_read_cannot_be_compared_once_it_is_touched(model: Path) -> None:
    begun = model_files(model)
    assert not uncertain(begun, compared(model, begun))
    os.utime(model / "config.json")
    now = compared(model, begun)
    assert changed(begun, now) == []
    assert uncertain(begun, now)


def test_a_file_that_changes_while_it_is_read_has_no_digest(model: Path) -> None:
    file = model_files(model)["config.json"]
    os.utime(model / "config.json")
    assert with_digest(model, "config.json", file) == file


def test_a_service_refuses_a_model_that_is_not_the_one_of_the_record(tmp_path: Path, model: Path) -> None:
    check_model(tmp_path, "policy.model", str(model))  # no record, as on another host
    Inputs(models={"policy.model": recorded(model)}).save(tmp_path)
    check_model(tmp_path, "policy.model", str(model))
    (model / "model.safetensors").write_text("weights of another model")
    with pytest.raises(BadInput, match=f"policy.model: {model} is not the model .*: model.safetensors has") as caught:
        check_model(tmp_path, "policy.model", str(model))
    assert is_certain(caught.value)


def test_a_damaged_record_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text('{"rows": 1}')
    with pytest.raises(BadInput, match=r"inputs.json: damaged \(.*\); restore it, or delete it"):
        Inputs.load(tmp_path)
