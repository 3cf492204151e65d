"""Writes the message catalogue of proto/SPEC.md from the code: `python -m tests.golden.catalogue`.

A test fails while the document and the code differ. It must never describe a message from anywhere but the registry;
only who sends what to whom is said here.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from proto import messages
from proto.registry import Message, Record, Request, all_messages

SPEC = Path(__file__).resolve().parents[2] / "proto" / "SPEC.md"
BEGIN, END = "<!-- catalogue: made by tests/golden/catalogue.py -->\n", "<!-- end of catalogue -->\n"

WORKERS = "rollout, reference"
ROUTES = {
    "Ping": ("anyone", "anyone"),
    "ServiceReport": ("every service", "supervisor"),
    "RestartService": ("operator", "supervisor"),
    "StopRun": ("operator", "supervisor"),
    "GetSupervisorState": ("operator, policy-trainer", "supervisor"),
    "KillInstance": ("scheduler", "supervisor"),
    "GetLog": ("operator, supervisor", "supervisor, every service"),
    "Register": ("every service", "scheduler"),
    "Heartbeat": ("every service", "scheduler"),
    "HoldDevices": ("policy-trainer-worker, rollout, reference", "scheduler"),
    "Resolve": ("services of another host, operator", "scheduler"),
    "LeaseRequest": (WORKERS, "scheduler"),
    "Complete": (WORKERS, "scheduler"),
    "GetRunInfo": ("policy-trainer", "scheduler"),
    "NextBatch": ("policy-trainer", "scheduler"),
    "CommitStep": ("policy-trainer", "scheduler"),
    "PublishWeights": ("policy-trainer", "scheduler"),
    "CheckpointSaved": ("policy-trainer", "scheduler"),
    "WaitEvals": ("policy-trainer", "scheduler"),
    "FinishRun": ("policy-trainer", "scheduler"),
    "PutBegin": ("producers", "batch-store"),
    "PutSeal": ("producers", "batch-store"),
    "Locate": ("readers", "batch-store"),
    "Clear": ("scheduler", "batch-store"),
    "GetInventory": ("scheduler", "batch-store"),
    "GetStoreStats": ("anyone", "batch-store"),
    "OpenStream": ("readers on other hosts", "batch-store"),
    "OpenLine": ("readers on other hosts", "batch-store"),
    "GetStorePlace": ("readers", "batch-store"),
    "InitModel": ("policy-trainer", "policy-trainer-worker"),
    "Forward": ("policy-trainer", "policy-trainer-worker"),
    "ForwardBackward": ("policy-trainer", "policy-trainer-worker"),
    "OptimStep": ("policy-trainer", "policy-trainer-worker"),
    "SkipUpdate": ("policy-trainer", "policy-trainer-worker"),
    "Publish": ("policy-trainer", "policy-trainer-worker"),
    "AskTransfer": ("rollout", "policy-trainer-worker"),
    "EndTransfer": ("rollout", "policy-trainer-worker"),
    "SaveCheckpoint": ("policy-trainer", "policy-trainer-worker"),
    "LoadCheckpoint": ("policy-trainer", "policy-trainer-worker"),
    "SaveModel": ("policy-trainer", "policy-trainer-worker"),
    "GetWorkerState": ("policy-trainer", "policy-trainer-worker"),
    "Move": ("policy-trainer", "policy-trainer-worker"),
    "Meet": ("policy-trainer-worker, reference", "rank 0 of its group"),
    "ScoreTogether": ("reference", "reference"),
    "GetStatus": ("operator, monitor", "scheduler"),
    "GetSnapshot": ("subscribers", "monitor"),
    "Telemetry": ("every service", "monitor (mailbox, one way)"),
    "Update": ("monitor", "subscribers (PUB, one way)"),
}
"""Request or one-way message -> (who sends it, who takes it). Replies go back the same way."""

_NAMES = {str: "str", int: "int", float: "float", bool: "bool", type(None): "nil"}


def type_name(hint: Any) -> str:
    """A field's type in the words of SPEC section 3."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is np.ndarray or origin is np.ndarray:
        return "inline"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(each) for each in inside)
    if origin is list:
        return f"[{type_name(inside[0])}]"
    if origin is dict:
        return f"{{{type_name(inside[0])}: {type_name(inside[1])}}}"
    return _NAMES.get(hint) or str(hint.__name__)


def fields(cls: type[msgspec.Struct]) -> str:
    """`name: type` of every field in order, with its default when it may be left out."""
    hints = typing.get_type_hints(cls)
    parts = []
    for field in msgspec.structs.fields(cls):
        text = f"`{field.encode_name}: {type_name(hints[field.name])}"
        if field.default is not msgspec.NODEFAULT:
            text += f" = {'nil' if field.default is None else repr(field.default).replace(chr(39), chr(34))}"
        elif field.default_factory is not msgspec.NODEFAULT:
            text += " = []" if field.default_factory is list else " = {}"
        parts.append(text.replace("True", "true").replace("False", "false") + "`")
    return ", ".join(parts) or "none"


def first_sentence(cls: type[Any]) -> str:
    line = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    return line.replace("|", "\\|")


def _routes(cls: type[Message]) -> tuple[str, str]:
    if cls.__name__ in ROUTES:
        sender, taker = ROUTES[cls.__name__]
        return sender, taker
    asked = [each for each in all_messages().values() if getattr(each, "REPLY", None) is cls]
    if cls.__name__ in ("Ack", "Error"):
        return "whoever was asked", "whoever asked"
    return ROUTES[asked[0].__name__][1], ROUTES[asked[0].__name__][0]


def catalogue() -> str:
    """The tables of section 6 in Markdown."""
    lines = ["| no. | message | answered by | from → to | fields |", "|---|---|---|---|---|"]
    for number, cls in sorted(all_messages().items()):
        reply = f"`{cls.REPLY.__name__}`" if issubclass(cls, Request) else ""
        sender, taker = _routes(cls)
        lines.append(f"| {number} | `{cls.__name__}` | {reply} | {sender} → {taker} | {fields(cls)} |")
    lines += ["", "Purpose of each message:", ""]
    lines += [f"- `{cls.__name__}`: {first_sentence(cls)}" for _, cls in sorted(all_messages().items())]
    parts = [
        each
        for each in vars(messages).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__module__.startswith(messages.__name__)
        and not issubclass(each, Message)
    ]  # fmt: skip
    lines += ["", "Parts of bodies. A *record* is an array by position, a *struct* a map by field name:", ""]
    lines += ["| part | form | fields | |", "|---|---|---|---|"]
    for each in parts:
        form = "record" if issubclass(each, Record) else "struct"
        lines.append(f"| `{each.__name__}` | {form} | {fields(each)} | {first_sentence(each)} |")
    return "\n".join(lines) + "\n"


def split_spec() -> tuple[str, str, str]:
    """SPEC.md before, inside and after the catalogue's markers."""
    before, rest = SPEC.read_text().split(BEGIN)
    inside, after = rest.split(END)
    return before, inside, after


if __name__ == "__main__":
    head, _, tail = split_spec()
    SPEC.write_text(head + BEGIN + catalogue() + END + tail)
