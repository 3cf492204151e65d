"""Tests the adapters that a trainer writes, with the library peft as an oracle, and those from which it begins."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from proto.tensors import Array
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.calls.weights import export, merging_error
from services.policy_trainer.worker.weights.publish import Canaries
from services.rollout.engines.transformers_engine import TransformersEngine
from shared import model_folder
from shared.model import adapter_files
from shared.model.adapter import AdapterStart, adapters_merged, adapters_of
from shared.model.load import load_model
from shared.rpc.errors import BadInput
from shared.tensors_torch import to_numpy, to_torch
from shared.topology.lora import TENSORS, Lora
from shared.topology.passes import FASTEST
from tests.unit.policy_trainer.test_state import train
from tests.unit.policy_trainer.training import one_rank
from tests.unit.tiny_models import make_model

LORA = Lora(rank=6, alpha=16.0)
"""Its scale, 8 / 3, is rounded in every data type."""
IDS = torch.tensor([[5, 9, 11, 3, 40, 7, 7, 21]])
MODULES = 2 * 7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    make_model("qwen3", head_dim=12, tie_word_embeddings=True).save_pretrained(folder)
    return folder


def trained(base: Path, dtype: str = "float32", lora: Lora = LORA, steps: int = 3) -> TorchBackend:
    made = one_rank(base, dtype, max_tokens=4096, adapter=AdapterStart(lora, seed=7))
    for step in range(1, steps + 1):
        train(made, step)
    return made


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def exported(request: Any, base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchBackend, Path]:
    """A trained backend and its export, which has replaced an earlier one."""
    made = trained(base, request.param)
    folder = tmp_path_factory.mktemp("export") / "export"
    for _ in range(2):
        export(made, base, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["export"]
    return made, folder


def adapted_by_peft(model: Any) -> set[str]:
    """Return the names of the modules that have an adapter in a model of peft."""
    ends = ".lora_A.default"
    names = [name for name, _ in model.named_modules() if name.endswith(ends)]
    return {name.removeprefix("base_model.model.").removesuffix(ends) for name in names}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits.float()


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).detach().abs().max())


def test_peft_computes_the_trained_policy_from_the_exported_adapter(exported: tuple[TorchBackend, Path]) -> None:
    made, folder = exported
    dtype = next(made.model.parameters()).dtype
    base = load_model(made._source, str(dtype).removeprefix("torch."))
    moved = difference(logits(base), logits(made.model))
    model: Any = PeftModel.from_pretrained(base, folder / "adapter")
    assert adapted_by_peft(model) == set(adapters_of(made.model))
    assert moved > 1.0
    assert difference(logits(model), logits(made.model)) <= (1e-5 if dtype == torch.float32 else 0.03 * moved)


def test_transformers_loads_the_merged_export_which_differs_by_what_merging_rounds_away(
    exported: tuple[TorchBackend, Path],
) -> None:
    made, folder = exported
    dtype = next(made.model.parameters()).dtype
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == dtype
    for name, layer in adapters_of(made.model).items():
        weight, expected = model.get_submodule(name).weight, layer.merged()
        if dtype == torch.float32:
            assert difference(weight, expected) <= 1e-6
        else:  # two libraries add in different orders, which a rounding may show
            assert (weight != expected).float().mean() <= 1e-3
    with adapters_merged(made.model):
        as_exported = logits(made.model)
    assert difference(logits(model), as_exported) <= (1e-5 if dtype == torch.float32 else 0.1)
    off = difference(logits(model), logits(made.model))
    assert off <= 1e-4 if dtype == torch.float32 else 1e-3 < off < 1.0
    canaries = Canaries(made, made._source, str(dtype).removeprefix("torch."), 3, with_digests=False)
    error = merging_error(made, canaries)
    assert error <= 1e-4 if dtype == torch.float32 else 1e-3 < error < 1.0
    assert merging_error(made, canaries) == error  # the weights are those of the base again


def test_a_run_that_begins_with_an_export_has_its_bits_in_the_trainer_and_in_the_engine(
    exported: tuple[TorchBackend, Path], base: Path
) -> None:
    made, folder = exported
    dtype = str(next(made.model.parameters()).dtype).removeprefix("torch.")
    start = AdapterStart(LORA.model_copy(update={"adapter_path": str(folder / "adapter")}), seed=99)
    begun = one_rank(base, dtype, max_tokens=4096, adapter=start)
    assert same_tensors(begun.weights(), made.weights())
    assert same_tensors(begun.published(), made.published())
    train(begun, 4)
    assert not same_tensors(begun.published(), made.published())
    begun.restart()
    assert same_tensors(begun.published(), made.published())
    assert same_tensors(of_engine(base, dtype, start), made.published())


def of_engine(base: Path, dtype: str, start: AdapterStart) -> dict[str, torch.Tensor]:
    """Return the first version of an engine."""

    async def work() -> dict[str, Array]:
        engine = TransformersEngine(
            model=base, dtype=dtype, threads=1, deterministic=False, passes=FASTEST, adapter=start
        )
        await engine.start()
        try:
            return await engine.base_weights()
        finally:
            await engine.stop()

    return {name: to_torch(array) for name, array in asyncio.run(work()).items()}


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_begins_with_an_adapter_that_peft_has_made(base: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=6, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model: Any = get_peft_model(load_model(base, "float32"), config)
    model.save_pretrained(tmp_path / "made")
    start = AdapterStart(LORA.model_copy(update={"adapter_path": str(tmp_path / "made")}), seed=1)
    made = one_rank(base, "float32", max_tokens=4096, adapter=start)
    assert difference(logits(model), logits(made.model)) <= 1e-5
    stored = load_file(tmp_path / "made" / "adapter_model.safetensors")
    assert len(stored) == 2 * MODULES
    for name, tensor in made.published().items():
        scale = LORA.scale if name.endswith("lora_B") else 1.0
        assert torch.equal(tensor, stored[f"base_model.model.{name}.weight"] * scale)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_export_without_a_merged_model_holds_only_the_adapter(base: Path, tmp_path: Path) -> None:
    lora = Lora(rank=6, alpha=16.0, export_merged=False, target_modules=("q_proj", "0.mlp.up_proj", "lm_head"))
    made = trained(base, lora=lora)
    export(made, base, tmp_path / "export")
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["adapter"]
    files = sorted((tmp_path / "export" / "adapter").iterdir())
    assert [path.name for path in files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)
    model: Any = PeftModel.from_pretrained(load_model(base, "float32"), tmp_path / "export" / "adapter")
    assert difference(logits(model), logits(made.model)) <= 1e-5
    with pytest.raises(
        BadInput, match=r"merged into lm_head, which shares .*; set policy\.lora\.export_merged: false$"
    ):
        trained(base, lora=lora.model_copy(update={"export_merged": True}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_exported_like_the_trainer(base: Path, tmp_path: Path, dtype: str) -> None:
    made = trained(base, dtype)
    export(made, base, tmp_path / "export")
    (tmp_path / "step-3").mkdir()
    save_file({name: tensor.clone() for name, tensor in made.weights().items()}, tmp_path / "step-3/model.safetensors")
    target = tmp_path / "best"
    model_folder.from_checkpoint(tmp_path / "step-3", base, target, dtype, {"note": "best"}, lora=LORA)
    for file in ("model.safetensors", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"):
        assert (target / file).read_bytes() == (tmp_path / "export" / file).read_bytes()
    assert json.loads((target / "config.json").read_bytes())["dtype"] == dtype
    assert (target / "note").read_text() == "best"


def test_a_base_in_several_files_without_a_prefix_and_with_other_types_is_merged(base: Path, tmp_path: Path) -> None:
    made, source = trained(base), tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16).model.save_pretrained(source, max_shard_size="60KB")
    files = sorted(source.glob("*.safetensors"))
    first = load_file(files[0])
    save_file(first | {"count": torch.tensor([3]), "flags": torch.tensor([True])}, files[0], metadata={"format": "pt"})
    tensors = {name: to_numpy(tensor) for name, tensor in made.weights().items()}
    adapter_files.export(tmp_path / "out", source, LORA, "float32", tensors)
    shutil.copyfile(source / "config.json", tmp_path / "out" / "config.json")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert len(files) > 1
    for name, layer in adapters_of(made.model).items():
        expected = layer.weight.half().float() + layer.scaled_B() @ layer.lora_A
        assert difference(model.get_submodule(name).weight, expected) <= 1e-6
    assert load_file(tmp_path / "out" / files[0].name)["count"].tolist() == [3]


def change(key: str, value: object) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_bytes())
        (folder / "adapter_config.json").write_text(json.dumps({**config, key: value}))

    return work


def retensor(work: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change_file(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        work(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return change_file


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank": (change("r", 8), r"6, but the adapter in .* has 8; use that, or another adapter_path$"),
    "alpha": (change("lora_alpha", 32), r"16, but the adapter in .* has 32; use that, or another adapter_path$"),
    "rslora": (change("use_rslora", True), "use_rslora is True, but .*; use an adapter without it$"),
    "shape": (
        retensor(lambda tensors: tensors.update({Q: torch.zeros(6, 32)})),
        r"another base: model\.layers\.0\.self_attn\.q_proj\.lora_A is \[6, 32\], but must be \[6, 48\]$",
    ),
    "missing": (retensor(lambda tensors: tensors.pop(Q)), r"layers\.0\.self_attn\.q_proj\.lora_A, .*, is missing"),
    "more": (retensor(lambda tensors: tensors.update({"x": torch.ones(1)})), r": x, which .* leaves out, is there"),
    "damaged": (lambda folder: (folder / TENSORS).write_bytes(b"no"), "deserializing header"),
    "pickled": (lambda folder: (folder / TENSORS).rename(folder / "adapter_model.bin"), f"has no {TENSORS}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_adapter_is_refused_with_one_line(name: str, base: Path, tmp_path: Path) -> None:
    made = trained(base, steps=0)
    shapes = {name: tuple(layer.weight.shape) for name, layer in adapters_of(made.model).items()}
    tensors = {name: to_numpy(tensor) for name, tensor in made.weights().items()}
    adapter_files.write(tmp_path / "adapter", base, LORA.rank, LORA.alpha, tensors)
    assert adapter_files.read(tmp_path / "adapter", LORA, shapes).keys() == tensors.keys()
    work, text = REFUSED[name]
    work(tmp_path / "adapter")
    with pytest.raises(BadInput, match=rf"^policy\.lora\.[a-z_]+: .*{text}") as caught:
        adapter_files.read(tmp_path / "adapter", LORA, shapes)
    assert "\n" not in str(caught.value)


def test_an_adapter_is_not_merged_into_files_of_another_base(base: Path) -> None:
    for shapes, named in (
        ({"model.layers.0.self_attn.q_proj": (48, 32)}, r"q_proj\.weight, .* matrix \[48, 32\]"),
        ({"model.layers.7.self_attn.q_proj": (48, 48)}, r"layers\.7\.self_attn\.q_proj\.weight"),
        ({"self_attn.q_proj": (48, 48)}, r"self_attn\.q_proj\.weight"),  # two weights end like that
    ):
        with pytest.raises(BadInput, match=rf"{named}.*; set policy\.lora\.export_merged: false$"):
            adapter_files.check_merge(base, shapes)
