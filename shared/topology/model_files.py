"""Reads the configuration, the names and shapes of the weights, and facts about the tokenizer from a model folder.

It does not import a model library or read weights.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.topology.lora import ALL_LINEAR, WITH_HEAD, Lora, is_called
from shared.topology.models import Head, TrainedModel

_HEADER_LIMIT_BYTES = 100 * 1024**2
_HEADER_SIZE_BYTES = 8
_TABLE_DIMENSIONS = 2
_EMBEDDING = re.compile(r"emb|wte|\.w\.")
_OTHER_TABLE = re.compile(r"(^|\.)\d+\.|pos|wpe|^mtp\.|\.patcher\.")
"""Matches the names of tensors of numbered layers, of position embeddings, and of two parts that may have embeddings of
their own: layers that predict further tokens, and the patcher of a byte-level model."""
_WEIGHTS = "model.safetensors"
INDEX = f"{_WEIGHTS}.index.json"
"""Name of the file that names the file of each weight."""
_ADAPTER = "adapter_"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
BYTE_EXPERTS = 256
"""Maximum number of experts whose indices are stored in one byte. Others take two, the lower one first."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts", "moe_top_k")
"""Names of the number of experts that a token uses, in configurations."""
_ROUTER = re.compile(r"\.\d+\..*\b(router|gate)\.weight$")
VALUE_WEIGHT, VALUE_BIAS = "score.weight", "score.bias"
"""Names of the tensors of a value head, as in the sequence classifiers of transformers. A run has no bias."""
_OUTPUT_LAYER = ("lm_head.", "embed_out.", "output_layer.")
"""Beginnings of the names of the output layer's tensors, whatever their shape."""
_INSIDE = re.compile(r"(^|\.)\d+\.")
"""Matches the names of tensors of numbered layers."""
_NOT_LINEAR = re.compile(r"\.experts\.|\.(router|gate)\.weight$")
"""Matches the names of tensors of numbered layers in mixtures of experts that belong to no linear layer: experts, which
are one tensor when they are loaded, and routers."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_OTHER_TOKENIZERS = ("*.tiktoken", "*.model")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")


def read_config(model: str) -> dict[str, Any]:
    """Return `config.json` of the folder merged with the fields of its text model, or {} if it cannot be read."""
    config = _object(Path(model) / "config.json")
    text = config.get("text_config")
    return text | config if isinstance(text, dict) else config


def experts(config: dict[str, Any]) -> int:
    """Return the number of experts per layer, or 0 for a dense model."""
    return max((config[key] for key in _EXPERTS if isinstance(config.get(key), int)), default=0)


@functools.cache
def route_bytes(model: str) -> int:
    """Return the number of bytes that name the experts of a token in all layers (`shared.model.routing`), or 0 for a
    dense model. Raises the errors of `stored_tensors`."""
    config = read_config(model)
    count = experts(config)
    chosen = next((config[key] for key in CHOSEN if isinstance(config.get(key), int)), 0)
    tensors = stored_tensors(model).items() if count else ()
    layers = sum(bool(_ROUTER.search(name)) and tensor.shape == (count, *tensor.shape[1:]) for name, tensor in tensors)
    return layers * chosen * (1 if count <= BYTE_EXPERTS else 2)


def largest_layer(model: str) -> int:
    """Return the number of parameters of the largest numbered layer, with all its experts. Raises the errors of
    `stored_tensors`."""
    sizes: Counter[str] = Counter()
    for name, tensor in stored_tensors(model).items():
        if number := _INSIDE.search(name):
            sizes[name[: number.end()]] += math.prod(tensor.shape)
    return max(sizes.values(), default=0)


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file. Its values, of type `dtype` (`F32`, `BF16`, ...), are bytes `start` to `end` of
    the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def stored_tensors(model: str) -> dict[str, Stored]:
    """Return the tensors in the folder's safetensors files by name. Files that the folder's index does not name are
    left out.

    Raises OSError, or a one-line ValueError naming the file that is missing, truncated or not a safetensors file.
    """
    folder = Path(model)
    files = _indexed_files(folder) or [
        file for file in sorted(folder.glob("*.safetensors")) if file.is_file() and not file.name.startswith(_ADAPTER)
    ]
    return {name: tensor for file in files for name, tensor in _file_tensors(file).items()}


def oddities(model: str) -> tuple[list[str], list[str]]:
    """Return what makes the folder's weights ambiguous or unusable, one line each, and the names of files with weights
    that no loader reads."""
    folder = Path(model)
    files = {file.name for file in folder.glob("*") if file.is_file()}
    adapters = sorted(name for name in files if name.startswith(_ADAPTER))
    index, single = INDEX in files, _WEIGHTS in files
    errors = []
    if adapters:
        beside = any(name.endswith(".safetensors") and name not in adapters for name in files)
        what = "holds an adapter beside its weights" if beside else "holds an adapter without the weights of its base"
        errors.append(f"{what} ({', '.join(adapters)}); merge the adapter into the model, and save it without these")
    if index and single:
        errors.append(f"holds {_WEIGHTS} and {INDEX}, which name different weights; remove the one that is out of date")
    try:
        tensors = stored_tensors(model)
    except (OSError, ValueError):
        return errors, []  # Another check reports it.
    named = {tensor.file.name for tensor in tensors.values()}
    wrapped = next((name for name in tensors if "_orig_mod." in name), "")
    if wrapped:
        errors.append(f"its weights are named as torch.compile wraps them ({wrapped}); save the unwrapped model")
    others = {name for name in files if name.endswith(_OTHER_WEIGHTS) or name.endswith(".safetensors")}
    return errors, sorted(others - named - set(adapters)) if not errors else []


def tied_tables(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> list[list[str]]:
    """Return the names of `tensors` that are one weight according to `config`: the copies, such as a stored output
    head, before the embedding. If `config` does not say whether it ties them, nothing is returned.

    The head's name depends on the architecture, so the tensors are recognized by their shape: in every causal
    architecture of transformers, only the input embedding and what is tied to it have the embedding's shape outside
    the numbered layers. Position embeddings, which may have that shape by chance, are recognized by their name.
    """
    return _tables(config, tensors) if config.get("tie_word_embeddings") is True else []


def _tables(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> list[list[str]]:
    """Return the names of the `tensors` with a row for each token, by shape: output layers before the embedding."""
    tables: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in tensors.items():
        rows = tensor.shape[0] if len(tensor.shape) == _TABLE_DIMENSIONS else None
        if rows and config.get("vocab_size") in (rows, None) and not _OTHER_TABLE.search(name):
            tables.setdefault(tensor.shape, []).append(name)
    groups = [sorted(names, key=lambda name: (bool(_EMBEDDING.search(name)), name)) for names in tables.values()]
    return [names for names in groups if len(names) > 1 and _EMBEDDING.search(names[-1])]


def named_shapes(model: str, head: Head = "language") -> dict[str, list[int]]:
    """Return the name and shape of every weight that a process holds of the model with this head: of tied tensors, only
    one. A value head takes the place of the output layer; the embedding stays, whether or not the two are tied.

    Raises the errors of `stored_tensors`.
    """
    tensors, config = stored_tensors(model), read_config(model)
    copies = {name for names in tied_tables(config, tensors) for name in names[:-1]}
    if head == "value":
        named = {name for name in tensors if name.startswith(_OUTPUT_LAYER)}
        copies = {VALUE_BIAS} | (named or {name for names in _tables(config, tensors) for name in names[:-1]})
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if name not in copies}
    if head == "value" and shapes:
        shapes[VALUE_WEIGHT] = [1, _hidden(config, shapes)]
    return shapes


def _hidden(config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> int:
    """Return the number of values that describe a token: as the configuration says, or else the embedding's columns."""
    columns = (shape[-1] for name, shape in shapes.items() if _EMBEDDING.search(name) and shape)
    size = config.get("hidden_size") or config.get("n_embd")
    return size if isinstance(size, int) else next(columns, 0)


def adapted_layers(model: str, lora: Lora) -> dict[str, list[int]]:
    """Return the shapes [out, in] of the weights of the layers that get an adapter, by the layer's name.

    The layers are recognized by their names and shapes, as `shared.model.adapter.targets_of` does with a model. Raises
    the errors of `stored_tensors`.
    """
    mixture, layers, output = experts(read_config(model)) > 0, dict[str, list[int]](), dict[str, list[int]]()
    for name, tensor in stored_tensors(model).items():
        layer, _, part = name.rpartition(".")
        if part != "weight" or len(tensor.shape) != _TABLE_DIMENSIONS or (mixture and _NOT_LINEAR.search(name)):
            continue
        if _INSIDE.search(name):
            layers[layer] = list(tensor.shape)
        elif name.startswith(_OUTPUT_LAYER) or (_EMBEDDING.search(name) and not output):  # which may be tied to it
            output["lm_head"] = list(tensor.shape)
    if lora.target_modules == WITH_HEAD:
        layers |= output
    elif lora.target_modules != ALL_LINEAR:
        every = layers | output
        layers = {layer: every[layer] for layer in every if any(is_called(layer, name) for name in lora.target_modules)}
    return {
        layer: shape
        for layer, shape in layers.items()
        if not any(is_called(layer, name) for name in lora.exclude_modules)
    }


def version_shapes(model: TrainedModel) -> dict[str, list[int]]:
    """Return the name and shape of every tensor of a version of a trained model: its adapters, or all its weights.

    Raises the errors of `stored_tensors`.
    """
    lora = model.lora
    if lora is None:
        return named_shapes(str(model.folder), model.head)
    shapes: dict[str, list[int]] = {}
    for layer, (outputs, inputs) in adapted_layers(str(model.folder), lora).items():
        shapes |= {f"{layer}.lora_A": [lora.rank, inputs], f"{layer}.lora_B": [outputs, lora.rank]}
    return shapes


def without_head(model: str) -> str:
    """Return, on one line, that the folder has no value head, and a remedy; or an empty string if it has one.

    Raises the errors of `stored_tensors`.
    """
    if VALUE_WEIGHT in stored_tensors(model):
        return ""
    return f"has no value head ({VALUE_WEIGHT}), so it scores nothing; train one with policy.head value"


def parameter_count(model: str, head: Head = "language") -> int:
    """Return the number of parameters that a process holds of the model with this head.

    Raises the errors of `stored_tensors`, and ValueError if the folder has no weights.
    """
    shapes = named_shapes(model, head)
    if not shapes:
        raise ValueError(f"{model} has no safetensors files")
    return sum(map(math.prod, shapes.values()))


def _indexed_files(folder: Path) -> list[Path]:
    """Return the files that the folder's index names, or [] without an index. Raises ValueError if one is missing."""
    named = _object(folder / INDEX).get("weight_map")
    names = sorted({str(file) for file in named.values()}) if isinstance(named, dict) else []
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}, which its {INDEX} names")
    return [folder / name for name in names]


def file_shapes(file: Path) -> dict[str, list[int]]:
    """Return the name and shape of every tensor in a safetensors file. Raises the errors of `stored_tensors`."""
    return {name: list(tensor.shape) for name, tensor in _file_tensors(file).items()}


def _file_tensors(file: Path) -> dict[str, Stored]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_SIZE_BYTES), "little")
        if length > _HEADER_LIMIT_BYTES:
            raise ValueError(f"{file} is not a safetensors file: header of {length} bytes, limit {_HEADER_LIMIT_BYTES}")
        raw = stream.read(length)
    data = _HEADER_SIZE_BYTES + length
    tensors: dict[str, Stored] = {}
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = map(int, entry["data_offsets"])
            shape = tuple(map(int, entry["shape"]))
            tensors[name] = Stored(file, str(entry["dtype"]), shape, data + start, data + end)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{file} is not a safetensors file: unreadable header") from error
    size, whole = file.stat().st_size, max((tensor.end for tensor in tensors.values()), default=data)
    if size != whole:
        raise ValueError(f"{file} has {size} bytes, but its header promises {whole}: it was not copied completely")
    return tensors


# ---------------------------------------------------------------------------------------------- the tokenizer


def has_tokenizer(model: str) -> bool:
    """Return whether the folder holds a file from which a tokenizer can be read."""
    return any(any(Path(model).glob(name)) for name in (*TOKENIZERS, *_OTHER_TOKENIZERS))


def has_chat_template(model: str) -> bool:
    """Return whether messages can be rendered as a prompt."""
    written = any(any(Path(model).glob(name)) for name in _TEMPLATES)
    return written or bool(_object(Path(model) / "tokenizer_config.json").get("chat_template"))


class AnswerEnds(msgspec.Struct, frozen=True):
    """The ids of the tokens that end an answer: `text` for raw prompts, and `turn` for prompts that consist of messages
    (None if there is none). Sampling ends at each token of `stop`."""

    stop: list[int]
    text: int | None
    turn: int | None

    def end(self, messages: bool) -> int:
        """Return the token that ends the answer to a prompt. Raises a one-line ValueError if sampling would not end at
        it, or if there is none."""
        number = self.turn if messages else self.text
        if number is None:
            raise ValueError("the tokenizer has no end-of-sequence token, so an answer could not end")
        if number not in self.stop:
            raise ValueError(
                f"the chat template ends an answer with token {number}, but sampling ends at {self.stop} only; add it "
                "to eos_token_id in the model's generation_config.json"
            )
        return number


def end_tokens(model: str) -> list[int]:
    """Return the ids of the tokens that end a completion: the end-of-sequence tokens of the tokenizer and of
    generation_config.json (or of config.json, if the former names none), in ascending order.

    Raises a one-line ValueError for an id that is not a whole number of at least 0.
    """
    folder = Path(model)
    ids: set[int] = set()
    sources = {"generation_config.json": _object(folder / "generation_config.json"), "config.json": read_config(model)}
    for name, content in sources.items():
        named = content.get("eos_token_id")
        for number in named if isinstance(named, list) else [named] if named is not None else []:
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ValueError(f"{folder / name}: eos_token_id is {named!r:.60}, not a token id or a list of them")
            ids.add(number)
        if ids:
            break
    own = _token_id(folder, _end_text(folder))
    return sorted(ids if own is None else {*ids, own})


def _end_text(folder: Path) -> str:
    """Return the text of the tokenizer's end-of-sequence token, or an empty string if its files name none."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _object(folder / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            return text
    return ""


def _token_id(folder: Path, text: str) -> int | None:
    """Return the id of the token with this text, or None if the files of the tokenizer do not list it."""
    if not text:
        return None
    decoder = _object(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and token.get("content") == text and number.isdecimal():
            return int(number)
    tokenizer = _object(folder / "tokenizer.json")  # it may have megabytes, so it is read only if it must be
    for token in _dicts(tokenizer.get("added_tokens")):
        if token.get("content") == text and isinstance(token.get("id"), int):
            return int(token["id"])
    model = tokenizer.get("model")
    vocabulary = (model.get("vocab") if isinstance(model, dict) else None) or _object(folder / "vocab.json")
    number = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return number if isinstance(number, int) else None


def _dicts(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def vocabulary(model: str) -> int:
    """Return the number of tokens for which the model has an embedding, 0 if its configuration does not say."""
    size = read_config(model).get("vocab_size")
    return size if isinstance(size, int) else 0


def largest_token(model: str) -> int | None:
    """Return the largest token id of the tokenizer, or None if its file format is not supported here."""
    folder = Path(model)
    ids = list(_ids(_object(folder / "tokenizer.json")) or _object(folder / "vocab.json").values())
    if not ids:
        return None
    ids += _object(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    try:
        return max(map(int, ids))
    except (TypeError, ValueError):
        return None


def token_texts(model: str) -> dict[int, str]:
    """Return the text of each token by its id, as `tokenizer.json` spells it, or {} without such a file."""
    tokenizer = _object(Path(model) / "tokenizer.json")
    section = tokenizer.get("model")
    vocabulary = section.get("vocab") if isinstance(section, dict) else None
    texts: dict[int, str] = {}
    if isinstance(vocabulary, dict):
        texts = {number: text for text, number in vocabulary.items() if isinstance(number, int)}
    elif isinstance(vocabulary, list):  # of pairs of a text and its score
        texts = {number: str(entry[0]) for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    added = {token.get("id"): token.get("content") for token in _dicts(tokenizer.get("added_tokens"))}
    return texts | {number: str(text) for number, text in added.items() if isinstance(number, int)}


def _ids(tokenizer: dict[str, Any]) -> Iterator[Any]:
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary.values()
    elif isinstance(vocabulary, list):
        yield len(vocabulary) - 1
    for token in _dicts(added):
        yield token.get("id")


def _object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`, or {} if the file is missing or holds something else."""
    try:
        parsed = json.loads(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
