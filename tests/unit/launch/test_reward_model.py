"""Tests what is checked of a reward model before a start, and what the launcher does for its processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch.checks import model_proof, preflight, resumed
from launch.checks.findings import Findings
from launch.commands.evaluation import without_training
from launch.processes.plan import command_of, drain_group
from shared.rpc.errors import RpcError
from shared.topology import Topology, TopologyError, load
from shared.topology.capacity import parameter_counts, task_bytes
from shared.topology.memory_plan import per_process
from shared.topology.passes import FASTEST, Passes, Verdict
from tests.reward_folder import TINY, reward_folder
from tests.unit.launch.test_resumed import begin, resume

QUICKSTART = TINY.parents[1] / "quickstart.yaml"
FUNCTION = "builtin:reward_model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return reward_folder(tmp_path / "classifier")


def scored(model: Path, *overrides: str) -> Topology:
    return load(QUICKSTART, [f"reward={{function: '{FUNCTION}', model: {model}}}", *overrides])


def found(model: Path, *overrides: str) -> list[str]:
    findings = preflight.check(scored(model, *overrides), "t.yaml")
    assert all("\n" not in line for line in findings.errors)
    return findings.errors


def refused(*overrides: str) -> str:
    with pytest.raises(TopologyError) as caught:
        load(QUICKSTART, overrides)
    (line,) = caught.value.problems
    return str(line)


def test_a_folder_with_a_value_head_starts_one_more_frozen_model(model: Path) -> None:
    assert found(model) == []
    topology = scored(model)
    frozen = next(one for one in topology.frozen if one.name == "reward-model")
    assert (frozen.section, frozen.folder, frozen.head, frozen.weight) == ("reward_model", model, "value", 1.0)
    assert [spec.name for spec in topology.services_plan()].count("reward-model/0") == 1
    assert command_of("reward-model") == ["services.reference", "--model", "reward-model"]
    assert drain_group("reward-model") == drain_group("rollout")
    assert load(QUICKSTART, [f"reward.function={FUNCTION}", f"reward_model.model={model}"]).frozen == topology.frozen


def test_the_model_and_its_texts_are_counted_where_they_are_held(model: Path) -> None:
    topology, without = scored(model), load(QUICKSTART)
    elements = parameter_counts(topology)
    assert elements["reward_model"].whole == elements["policy"].whole + 128  # the output layer is tied to the embedding
    assert per_process(topology, elements)["reward-model", 0] == 4 * elements["reward_model"].whole
    assert topology.read_tokens == 512  # the model's positions
    group = topology.algorithm.group_size
    more = task_bytes(topology, 32) - task_bytes(without, 32)
    assert 0 <= more - group * (4 * 512 + 4 + 4) < 8192  # texts, their lengths and scores, and the overhead of a put
    longer = scored(model, "reward_model.max_tokens=100")
    assert task_bytes(topology, 32) - task_bytes(longer, 32) == group * 4 * 412


def test_a_reward_model_has_passes_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = {model: Verdict("padded", "whole", "modules", model="Classifier")}

    def prove(_: Topology, model: object) -> Verdict:
        return proofs.get(model.folder, Verdict("packed", "blocks", "written-out", model="Own"))  # type: ignore[attr-defined]

    monkeypatch.setattr(model_proof, "prove", prove)
    proved = preflight.prove(scored(model), Findings("t.yaml"))
    assert [own.passes for own in proved.own_models] == [FASTEST, Passes(sequences="padded")]
    refused = Findings("t.yaml")
    preflight.prove(scored(model, "reward_model.passes={sequences: packed}"), refused)
    assert refused.errors == ["t.yaml: reward_model.passes.sequences: packed is not proved for Classifier; use padded"]


def test_a_reward_model_that_is_added_removed_or_changed_is_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    given = ("reward={function: builtin:reward_model, model: ./model}",)
    file, path = begin(tmp_path / "without")
    with pytest.raises(RpcError, match=r"different values of reward_model\.model; resume it with"):
        resume(file, path, *given)
    file, path = begin(tmp_path / "with", *given)
    with pytest.raises(RpcError, match=r"different values of reward_model\.model; resume it with"):
        resume(file, path)
    assert resume(file, path, *given, "reward_model.dtype=bfloat16").reward_model is not None
    assert resumed._models(resume(file, path, *given)).keys() == {"policy.model"}  # the same folder


def test_an_evaluation_without_training_keeps_the_reward_model(model: Path) -> None:
    topology = without_training(scored(model, "data.eval.held={source: 'builtin:addition', every: 5}"))
    assert [frozen.name for frozen in topology.frozen] == ["reward-model"]


def test_the_model_may_also_score_in_the_reports_of_a_weighted_sum(model: Path) -> None:
    functions = f"[{{function: 'builtin:exact_match'}}, {{function: '{FUNCTION}', weight: 0.25}}]"
    topology = load(QUICKSTART, [f"reward={{functions: {functions}, model: {model}}}"])
    assert next(one for one in topology.frozen if one.name == "reward-model").weight == 0.25


def without_head(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, model / "model.safetensors")


def two_labels(model: Path) -> None:
    head = {"score.weight": np.ones((2, 128), np.float32)}
    save_file(load_file(model / "model.safetensors") | head, model / "model.safetensors")


def with_bias(model: Path) -> None:
    save_file(
        load_file(model / "model.safetensors") | {"score.bias": np.ones(1, np.float32)}, model / "model.safetensors"
    )


def without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def small_vocabulary(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (without_head, "has no value head (score.weight), so it scores nothing; train one with policy.head value"),
        (two_labels, "score.weight has shape [2, 128]"),
        (with_bias, "score.bias is not zero"),
        (without_tokenizer, "has no tokenizer"),
        (small_vocabulary, "but its config.json has a vocabulary of 10"),
    ],
)
def test_a_folder_that_cannot_score_is_refused_by_name(
    break_it: Callable[[Path], None], said: str, model: Path
) -> None:
    break_it(model)
    (line,) = found(model)
    assert line.startswith(f"t.yaml: reward_model.model: {model}")
    assert said in line


def test_messages_need_the_chat_template_of_the_reward_model(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert found(model) == []  # the rows are raw texts
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}) + "\n")
    (line,) = found(model, f"data.train.source=jsonl:{rows}")
    assert line.startswith(f"t.yaml: reward_model.model: {model} has no chat template")


def test_contradictions_are_refused_by_name(model: Path) -> None:
    given = (f"reward.model={model}", f"reward.function={FUNCTION}")
    assert "reward.model: PATH" in refused(f"reward.function={FUNCTION}")
    assert "has no effect without function builtin:reward_model" in refused(f"reward_model.model={model}")
    assert "has no effect without a reward model" in refused("services.reward-model={}")
    assert "takes no params" in refused(*given, "reward.params={a: 1}")
    assert "remove one of them" in refused(*given, f"reward_model.model={TINY}")
    twice = f"reward={{functions: [{{function: '{FUNCTION}'}}, {{function: '{FUNCTION}'}}], model: {model}}}"
    assert "is named twice" in refused(twice)
    other = f"reward={{functions: [{{function: '{FUNCTION}'}}, {{function: 'my:reward_model'}}], model: {model}}}"
    assert "another function is named reward_model" in refused(other)
    assert "513 exceeds the reward model's 512 positions" in refused(*given, "reward_model.max_tokens=513")
    short = refused(*given, "services.reward-model.max_tokens_per_micro_batch=100")
    assert "100 is not above one text: 512 tokens; use at least 513" in short
    best = refused(*given, "checkpoint.keep_best=eval/heldout/accuracy")
    assert best.endswith("whose scores are not 0 or 1; use eval/heldout/reward")
    pairs = ("data={train: {source: 'builtin:addition_pairs'}}", "algorithm={tasks_per_step: 8, loss: {name: simpo}}")
    pairs = (*pairs, "sampling={max_new_tokens: 8}", "services.rollout={}", "services.reference=null")
    assert "has nothing to score: loss simpo learns from the rows' answers" in refused(*given, *pairs)
    turns = refused(*given, "placement.colocate=[policy-trainer, reward-models]", "staleness=0")
    assert "use policy-trainer, critic, reference, teacher, reward-model, rollout" in turns
