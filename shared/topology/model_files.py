"""Reads the configuration, the shapes of the weights, and facts about the tokenizer from a model folder.

It does not import a model library or read weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER_LIMIT_BYTES = 100 * 1024**2
_HEADER_SIZE_BYTES = 8
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
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


def weight_shapes(model: str) -> list[list[int]]:
    """Return the shape of every tensor in the folder's safetensors files. Raises the errors of `named_shapes`."""
    return [shape for file in _weight_files(Path(model)) for shape in file_shapes(file).values()]


def named_shapes(model: str) -> dict[str, list[int]]:
    """Return the name and shape of every tensor in the folder's safetensors files.

    Raises OSError, or a one-line ValueError naming the file that is missing, truncated or not a safetensors file.
    """
    shapes: dict[str, list[int]] = {}
    for file in _weight_files(Path(model)):
        shapes |= file_shapes(file)
    return shapes


def parameter_count(model: str) -> int:
    """Return the number of parameters that a process with the model holds.

    Files that the index does not name are left out, as is the stored copy of an embedding to which the head is tied.
    Raises the errors of `named_shapes`, and ValueError if the folder has no weights.
    """
    folder = Path(model)
    shapes: dict[str, list[int]] = {}
    for file in _indexed_files(folder) or _weight_files(folder):
        shapes |= file_shapes(file)
    if read_config(model).get("tie_word_embeddings") is True and any("embed" in name for name in shapes):
        shapes.pop("lm_head.weight", None)
    if not shapes:
        raise ValueError(f"{folder} has no safetensors files")
    return sum(map(math.prod, shapes.values()))


def _weight_files(folder: Path) -> list[Path]:
    _indexed_files(folder)
    return sorted(folder.glob("*.safetensors"))


def _indexed_files(folder: Path) -> list[Path]:
    """Return the files that the folder's index names, or [] without an index. Raises ValueError if one is missing."""
    named = _object(folder / "model.safetensors.index.json").get("weight_map")
    names = sorted({str(each) for each in named.values()}) if isinstance(named, dict) else []
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}, which its model.safetensors.index.json names")
    return [folder / name for name in names]


def file_shapes(file: Path) -> dict[str, list[int]]:
    """Return the name and shape of every tensor in a safetensors file. Raises the errors of `named_shapes`."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_SIZE_BYTES), "little")
        if length > _HEADER_LIMIT_BYTES:
            raise ValueError(f"{file} is not a safetensors file: header of {length} bytes, limit {_HEADER_LIMIT_BYTES}")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: [int(size) for size in entry["shape"]] for name, entry in entries.items()}
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{file} is not a safetensors file: unreadable header") from error
    size, whole = file.stat().st_size, _HEADER_SIZE_BYTES + length + max(ends, default=0)
    if size != whole:
        raise ValueError(f"{file} has {size} bytes, but its header promises {whole}: it was not copied completely")
    return shapes


# ---------------------------------------------------------------------------------------------- the tokenizer


def has_tokenizer(model: str) -> bool:
    """Return whether the folder holds a file from which a tokenizer can be read."""
    return any(any(Path(model).glob(name)) for name in (*TOKENIZERS, *_OTHER_TOKENIZERS))


def has_chat_template(model: str) -> bool:
    """Return whether messages can be rendered as a prompt."""
    written = any(any(Path(model).glob(name)) for name in _TEMPLATES)
    return written or bool(_object(Path(model) / "tokenizer_config.json").get("chat_template"))


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


def _ids(tokenizer: dict[str, Any]) -> Iterator[Any]:
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary.values()
    elif isinstance(vocabulary, list):
        yield len(vocabulary) - 1
    for token in added if isinstance(added, list) else ():
        yield token["id"]


def _object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`, or {} if the file is missing or holds something else."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
