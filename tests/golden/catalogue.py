"""Writes the message catalogue of proto/SPEC.md from the code: `python -m tests.golden.catalogue`.

Purposes, fields, meanings and errors are taken from the classes and comments in proto/messages. This module itself
contains only the routes, the titles, and the meanings that fields of the same name share. A test fails while the
document and the code differ.
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from proto import messages
from proto.messages import (
    common,
    hosts,
    process,
    registration,
    samples,
    sampling,
    steps,
    store,
    streams,
    tasks,
    telemetry,
    trainer,
    transfer,
)
from proto.registry import Message, Record, Request, all_messages
from shared.security.roles import LEAST_ROLE, Role

SPEC = Path(__file__).resolve().parents[2] / "proto" / "SPEC.md"
BEGIN, END = "<!-- catalogue: made by tests/golden/catalogue.py -->\n", "<!-- end of catalogue -->\n"

WORKERS = "rollout, reference, teacher, reward-model"
ROUTES = {
    "Ping": ("anyone", "anyone"),
    "ServiceReport": ("every service", "supervisor"),
    "RestartService": ("operator", "supervisor"),
    "DrainService": ("operator, supervisor", "supervisor, rollout, reference, teacher, reward-model"),
    "ScaleService": ("operator", "supervisor"),
    "StopRun": ("operator", "supervisor"),
    "GetSupervisorState": ("operator, policy-trainer", "supervisor"),
    "KillInstance": ("scheduler", "supervisor"),
    "HostCheck": ("agents of hosts", "supervisor"),
    "HostReport": ("agents of hosts", "supervisor"),
    "HostGone": ("supervisor", "scheduler"),
    "GetStory": ("operator", "supervisor"),
    "GetWaits": ("operator", "every process"),
    "GetLog": ("operator, supervisor", "supervisor, every service"),
    "Register": ("every service", "scheduler"),
    "Heartbeat": ("every service", "scheduler"),
    "HoldDevices": ("colocated services", "scheduler"),
    "Resolve": ("services on another host, operator", "scheduler"),
    "LeaseRequest": (WORKERS, "scheduler"),
    "Complete": (WORKERS, "scheduler"),
    "ReportShards": ("readers", "scheduler"),
    "GetRunInfo": ("policy-trainer", "scheduler"),
    "NextBatch": ("policy-trainer", "scheduler"),
    "CommitStep": ("policy-trainer", "scheduler"),
    "PublishWeights": ("policy-trainer", "scheduler"),
    "CheckpointSaved": ("policy-trainer", "scheduler"),
    "WaitEvals": ("policy-trainer", "scheduler"),
    "FinishRun": ("policy-trainer", "scheduler"),
    "HoldShards": ("server", "scheduler"),
    "ReleaseShards": ("server", "scheduler"),
    "TakeSamples": ("recorder", "scheduler"),
    "PutBegin": ("producers", "batch-store"),
    "PutSeal": ("producers", "batch-store"),
    "Locate": ("readers", "batch-store"),
    "Clear": ("scheduler, policy-trainer, rollout", "batch-store"),
    "GetInventory": ("scheduler", "batch-store"),
    "GetStoreStats": ("anyone", "batch-store"),
    "OpenStream": ("readers on other hosts", "batch-store"),
    "OpenLine": ("readers on other hosts", "batch-store"),
    "Hold": ("rollout, reference, teacher, batch-store", "batch-store"),
    "GetStorePlace": ("readers", "batch-store"),
    "InitModel": ("policy-trainer", "policy-trainer-worker"),
    "Forward": ("policy-trainer", "policy-trainer-worker"),
    "Credit": ("policy-trainer", "policy-trainer-worker"),
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
    "OpenModel": ("server", "policy-trainer-worker"),
    "SaveState": ("server", "policy-trainer-worker"),
    "CloseModel": ("server", "policy-trainer-worker"),
    "ForwardBackwardModel": ("server", "policy-trainer-worker"),
    "OptimStepModel": ("server", "policy-trainer-worker"),
    "PublishModel": ("server", "policy-trainer-worker"),
    "Meet": ("policy-trainer-worker, reference, teacher, reward-model", "rank 0 of its group"),
    "ScoreTogether": ("reference, teacher, reward-model", "the same service"),
    "LoadVersion": ("policy-trainer", "rollout"),
    "UnloadVersion": ("policy-trainer", "rollout"),
    "SampleTokens": ("policy-trainer", "rollout"),
    "CancelSampling": ("policy-trainer", "rollout"),
    "RenderPrompt": ("policy-trainer", "rollout"),
    "GetStatus": ("operator, monitor", "scheduler"),
    "GetHistory": ("subscribers", "monitor"),
    "GetSnapshot": ("subscribers", "monitor"),
    "Telemetry": ("every service", "monitor (mailbox, one way)"),
    "Update": ("monitor", "subscribers (PUB, one way)"),
}
"""The sender and the receiver of each request or one-way message. Replies travel in the opposite direction."""

MODULES = {
    common: "Every process",
    process: "Processes and logs",
    hosts: "Hosts of a run",
    registration: "Registration, heartbeats, devices",
    tasks: "Tasks, leases and versions of weights",
    steps: "Training steps",
    samples: "Human-readable samples",
    store: "Puts and reads on one host",
    streams: "Reads from another host",
    trainer: "Trainer workers and their ranks",
    transfer: "Weights over collectives",
    sampling: "Sampling for a server",
    telemetry: "Status and telemetry",
}
"""The title for each module of proto/messages, in the order of the catalogue."""

SHARED = {
    "service": "name of a service, such as `batch-store`",
    "instance": "number of the instance, from 0",
    "incarnation": "incarnation of that instance",
    "pid": "id of the process, on its host",
    "rss_bytes": "resident memory of the process",
    "driver": "incarnation of the driver",
    "lease_id": "number of the lease",
    "task_id": "id of the task (section 8)",
    "fence": "fence of the attempt (section 8)",
    "lineage": "lineage of the policy version",
    "step": "number of the training step",
    "seconds": "duration of the call on the worker",
}
"""The meaning of each field, for classes that do not state it."""

VALUES = {
    tasks.TaskState: "Keys of `Status.tasks`",
    tasks.Outcome: "Values of `TaskResult.outcome`",
    tasks.DropReason: "Values of `TaskResult.why`, and keys of `drops` and `dropped`. An unknown one counts as `other`",
    tasks.WeightsKind: "Values of `WeightsRef.kind`. An engine refuses an unknown one",
    tasks.LossReason: "Keys of `lost`. An unknown one counts as `other`",
    process.WaitKind: "Values of `WaitRow.kind`",
    registration.TroubleKind: "Values of `Trouble.kind`",
}
"""What each closed list of values is used for."""

WIDTH = 120
_NAMES = {str: "str", int: "int", float: "float", bool: "bool", type(None): "nil"}


def type_name(hint: Any) -> str:
    """Return the type of a field as SPEC section 3 writes it."""
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


@cache
def _notes(cls: type[Any]) -> dict[str, str]:
    """Return, for each field that the class itself declares, the docstring below it or the comment beside it."""
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        each.start[0]: each.string.removeprefix("#").strip() for each in tokens if each.type == tokenize.COMMENT
    }
    found: dict[str, str] = {}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            else:
                text = comments.get(node.lineno, "")
            if text[1:2].islower() or text[1:2] == " ":
                text = text[0].lower() + text[1:]
            found[ast.unparse(target)] = text.removesuffix(".")
    return found


def meaning(cls: type[Any], field: str) -> str:
    """Return the meaning of a field. Raises LookupError if neither the class nor `SHARED` states it."""
    for each in cls.__mro__:
        if field in inspect.get_annotations(each):
            text = _notes(each).get(field) or SHARED.get(field)
            if text:
                return text
    raise LookupError(f"{cls.__name__}.{field}: needs a comment beside it or a docstring below it")


def _wrapped(text: str, begin: str = "") -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def fields(cls: type[msgspec.Struct]) -> Iterator[str]:
    """Yield `name: type = default` and the meaning of every field, in order."""
    hints = typing.get_type_hints(cls)
    for field in msgspec.structs.fields(cls):
        text = f"{field.encode_name}: {type_name(hints[field.name])}"
        if field.default is not msgspec.NODEFAULT:
            text += f" = {'nil' if field.default is None else repr(field.default).replace(chr(39), chr(34))}"
        elif field.default_factory is not msgspec.NODEFAULT:
            text += " = []" if field.default_factory is list else " = {}"
        text = text.replace("True", "true").replace("False", "false")
        yield _wrapped(f"`{text}`: {meaning(cls, field.name)}.", "- ")


def _doc(cls: type[Any]) -> tuple[list[str], dict[str, str]]:
    """Return the paragraphs of a class's docstring, and the error codes under `Errors:` with their meanings."""
    text, _, listed = (inspect.getdoc(cls) or "").partition("Errors:\n")
    errors: dict[str, str] = {}
    for line in listed.splitlines():
        code, colon, rest = line.strip().partition(": ")
        if colon and line.startswith("    ") and not line.startswith("     "):
            errors[code] = rest
        elif line.strip():
            errors[list(errors)[-1]] += f" {line.strip()}"
    return [" ".join(each.split()) for each in text.strip().split("\n\n")], errors


def errors(cls: type[Message]) -> dict[str, str]:
    """Return the meanings, by code, of the errors that are specific to a request."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if issubclass(each, Request) and each is not Request and "Errors:" in (each.__doc__ or ""):
            found |= _doc(each)[1]
    return dict(sorted(found.items()))


def _described(cls: type[msgspec.Struct]) -> list[str]:
    return ["\n".join(fields(cls)) or "It has no fields."]


def _route(cls: type[Message]) -> tuple[str, str]:
    if cls.__name__ not in ROUTES:
        raise LookupError(f"{cls.__name__}: name its sender and its receiver in ROUTES in tests/golden/catalogue.py")
    return ROUTES[cls.__name__]


def _message(cls: type[Message], shown: set[type[Message]]) -> list[str]:
    """Return the catalogue section on a request and its answer, or on a one-way message, as a list of paragraphs."""
    title = f"`{cls.__name__}` ({cls.TYPE})"
    sender, taker = _route(cls)
    role = LEAST_ROLE.get(cls, Role.SERVICE).label
    parts = [_wrapped(each) for each in _doc(cls)[0]]
    if not issubclass(cls, Request):
        route = f"One way. Sent by: {sender}. Received by: {taker}."
        return [f"#### {title}", *parts, _wrapped(route), *_described(cls)]
    reply = cls.REPLY
    route = f"Sent by: {sender}. Answered by: {taker}. Least role: {role}."
    lines = [f"#### {title} → `{reply.__name__}` ({reply.TYPE})", *parts, _wrapped(route), *_described(cls)]
    own = errors(cls)
    if reply not in shown:
        shown.add(reply)
        lines += [_wrapped(f"The answer, `{reply.__name__}`: {' '.join(_doc(reply)[0])}"), *_described(reply)]
    if own:
        lines += ["Errors:", "\n".join(_wrapped(f"`{code}`: {text}", "- ") for code, text in own.items())]
    return lines


def _part(cls: type[msgspec.Struct]) -> list[str]:
    form = "a record" if issubclass(cls, Record) else "a struct"
    return [f"#### `{cls.__name__}`, {form}", *(_wrapped(each) for each in _doc(cls)[0]), *_described(cls)]


def _values(cls: type[Any]) -> list[str]:
    rows = []
    for name, note in _notes(cls).items():
        value = getattr(cls, name)
        known = f"`{value}`" if isinstance(value, str) else f"`{value}` ({name.lower()})"
        rows.append(f"- {known}: {note}." if note else f"- {known}.")
    return [f"#### `{cls.__name__}`", f"{VALUES[cls]}.", "\n".join(rows)]


def catalogue() -> str:
    """Return the overview and the section of each message, in Markdown."""
    lines = ["| no. | message | answered by | from → to | errors of its own |", "|---|---|---|---|---|"]
    everything = {cls: number for number, cls in sorted(all_messages().items())}
    replies = {cls.REPLY for cls in everything if issubclass(cls, Request)} | {messages.Error}
    for cls, number in everything.items():
        if cls not in replies:
            answer = f"`{cls.REPLY.__name__}`" if issubclass(cls, Request) else ""
            sender, taker = _route(cls)
            own = ", ".join(errors(cls)) if issubclass(cls, Request) else ""
            lines.append(f"| {number} | `{cls.__name__}` | {answer} | {sender} → {taker} | {own} |")
    paragraphs = ["\n".join(lines)]
    shown: set[type[Message]] = {messages.Ack}
    for module, title in MODULES.items():
        paragraphs.append(f"### {title}")
        for cls in vars(module).values():
            if not isinstance(cls, type) or cls.__module__ != module.__name__:
                continue
            if cls in VALUES:
                paragraphs += _values(cls)
            elif cls in (messages.Error, messages.Ack):
                paragraphs += [f"#### `{cls.__name__}` ({cls.TYPE})", *(map(_wrapped, _doc(cls)[0])), *_described(cls)]
            elif cls in everything and cls not in replies:
                paragraphs += _message(cls, shown)
            elif issubclass(cls, msgspec.Struct) and not issubclass(cls, Message):
                paragraphs += _part(cls)
    return "\n\n".join(paragraphs) + "\n"


def split_spec() -> tuple[str, str, str]:
    """Return the parts of SPEC.md before, between and after the catalogue's markers."""
    before, rest = SPEC.read_text().split(BEGIN)
    inside, after = rest.split(END)
    return before, inside, after


if __name__ == "__main__":
    head, _, tail = split_spec()
    SPEC.write_text(head + BEGIN + catalogue() + END + tail)
