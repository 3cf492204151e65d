"""The output layer of a value model: one linear map `score.weight` of the last hidden state, in place of the layer
that computes logits.

Name and shape are those of the classes of transformers for sequence classification with one label. So a reward model
that such a class has saved is a value model, and what is written here is a folder that such a class reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from shared.rpc.errors import BadInput
from shared.topology.model_files import VALUE_BIAS, VALUE_WEIGHT, stored_tensors

WEIGHT, BIAS = VALUE_WEIGHT, VALUE_BIAS


class ValueHead(nn.Module):
    """A linear map from hidden states to one number, without bias. Its weight is zero until it is loaded."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, dtype=dtype, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [..., hidden] to [...], in float64 for float64 and in float32 for every other type.

        The next number after 1 is 1.008 in bfloat16 and 1.001 in float16.
        """
        kind = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return functional.linear(hidden.to(kind), self.weight.to(kind))[..., 0]


def value_head(model: nn.Module) -> ValueHead | None:
    """Return the value head of `model`, or None if it is a language model."""
    head = getattr(model, "score", None)
    return head if isinstance(head, ValueHead) else None


def base_model(model: nn.Module) -> nn.Module:
    """Return the part of a causal language model that computes hidden states, or `model` if it is not a separate part.

    Llama4ForCausalLM and MllamaForCausalLM declare another name for it than they use.
    """
    base = cast(Any, model).base_model
    return cast(nn.Module, getattr(model, "model", model) if base is model else base)


def replace_output_layer(model: nn.Module) -> ValueHead:
    """Replace the layer of the causal language model `model` that computes logits by a value head of zeros, which is
    tied to nothing, and return it.

    Raises ValueError if the model has no such layer, or no base model that returns hidden states.
    """
    causal = cast(Any, model)
    layer = causal.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is layer), "")
    shape: tuple[int, ...] = tuple(getattr(getattr(layer, "weight", None), "shape", ()))
    if not name or len(shape) != 2 or base_model(model) is model:
        raise ValueError(f"{type(model).__name__} has no output layer that a value head can replace")
    tied = {
        copy: original
        for copy, original in causal.get_expanded_tied_weights_keys(all_submodels=True).items()
        if not any(weight.startswith(f"{name}.") for weight in (copy, original))
    }
    causal._tied_weights_keys, causal.all_tied_weights_keys = tied, dict(tied)
    causal.config.tie_word_embeddings = bool(tied)  # some models also tie layers by this setting
    holder, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(holder), attribute, None)  # the library's code may ask for the attribute
    causal.score = ValueHead(shape[1], layer.weight.dtype, layer.weight.device)
    return cast(ValueHead, causal.score)


def stored_head(folder: Path, shape: tuple[int, ...]) -> Tensor:
    """Return the `score.weight` of the model in `folder`, in the file's dtype, or float32 zeros of `shape` if it has
    none.

    Raises a one-line BadInput if it has another shape or a bias that is not zero.
    """
    try:
        stored = stored_tensors(str(folder))
        found = {name: _tensor(stored[name].file, name) for name in (WEIGHT, BIAS) if name in stored}
    except (SafetensorError, OSError, ValueError) as error:
        raise BadInput(f"model {folder}: cannot be loaded: {str(error)[:300]}") from error
    weight, bias = found.get(WEIGHT, torch.zeros(shape)), found.get(BIAS)
    if tuple(weight.shape) != tuple(shape):
        raise BadInput(
            f"model {folder}: {WEIGHT} has the shape {list(weight.shape)}, and a value head needs {list(shape)}; give "
            "a model with one label, or remove the tensor to start from zeros"
        )
    if bias is not None and bias.any():
        largest = float(bias.abs().max())
        raise BadInput(
            f"model {folder}: {BIAS} is not zero (up to {largest:.4g}), and a value head has no bias; give a model "
            "without one, or remove the tensor and accept other values"
        )
    return weight


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        return cast(Tensor, opened.get_tensor(name))


def classifier_config(config: Any, shapes: Mapping[str, Sequence[int]]) -> Any:
    """Return a copy of `config` for a folder with the weights of a value model, of which `shapes` has the names and
    shapes.

    It names the model's class for sequence classification, with one label, if that class has exactly these weights.
    Otherwise, it names no class.
    """
    written = deepcopy(config)
    written.num_labels = 1
    written.architectures = None
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if name is not None and _weights_of_classifier(written) == {key: tuple(shape) for key, shape in shapes.items()}:
        written.architectures = [name]
    return written


def _weights_of_classifier(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights of the classifier with `config`, without copies of tied weights, or {}
    if it cannot be built."""
    try:
        with torch.device("meta"):
            model = cast(Any, AutoModelForSequenceClassification).from_config(deepcopy(config))
    except Exception:  # a library's model may raise anything
        return {}
    copies = model.all_tied_weights_keys.keys()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in copies}
