"""The addresses about checkpoints and the models (training runs) that they belong to."""

from __future__ import annotations

import asyncio
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from services.policy_trainer.tinker import bodies
from services.policy_trainer.tinker.errors import BadRequest, NotThere
from services.policy_trainer.tinker.events import Deleted
from services.policy_trainer.tinker.exchange import answer, key_of, read
from services.policy_trainer.tinker.records import Model, SavedWeights
from services.policy_trainer.tinker.server import Server
from services.policy_trainer.tinker.trainer import weights_folder

BODY_BYTES = 64 << 10
MOST_LISTED = 1000
PART_BYTES = 1 << 20
"""Size of the parts in which an archive is sent."""


class CheckpointHandlers:
    """Answers what is asked about checkpoints."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._own = server.state.own

    async def info(self, request: Request) -> Response:
        from_path = await read(request, BODY_BYTES, bodies.OfPath)
        checkpoint = self._own.checkpoint(key_of(request), from_path.tinker_path)
        adapter = checkpoint.adapter
        return answer(
            {
                "base_model": checkpoint.base,
                "is_lora": adapter.rank > 0,
                "lora_rank": adapter.rank,
                "train_unembed": adapter.trains("unembed"),
                "train_mlp": adapter.trains("mlp"),
                "train_attn": adapter.trains("attention"),
            }
        )

    async def copy(self, request: Request) -> Response:
        """Copy a checkpoint for training to another model of the same key."""
        body = await read(request, BODY_BYTES, bodies.CopyWeights)
        source = self._own.checkpoint(key_of(request), body.source_path)
        if body.session_id is None or body.model_seq_id is None:
            raise BadRequest("copy_weights: there are no projects here; give session_id and model_seq_id")
        session = self._own.session(key_of(request), body.session_id)
        model = self._own.model(key_of(request), f"{session.id}:train:{body.model_seq_id}")
        if source.sampler:
            raise BadRequest(f"source_path: {source.path} is for sampling, and is bound to its model's versions")
        name = source.name.partition("/")[2]
        path = bodies.checkpoint_path(model.id, name, sampler=False)
        if path in self._own.checkpoints:
            raise BadRequest(f"source_path: there is a checkpoint {path}", 409)
        folder = weights_folder(model, name, sampler=False)
        await asyncio.to_thread(self._copy, source.folder, folder)
        now = self._server.now()
        expires = None if body.ttl_seconds is None else now + body.ttl_seconds
        self._server.keep(
            msgspec.structs.replace(
                source, path=path, model=model.id, key=model.key, folder=folder, at=now, expires=expires
            )
        )
        return answer({"tinker_path": path})

    def _copy(self, source: str, target: str) -> None:
        shutil.copytree(self._server.folder / source, self._server.folder / target, dirs_exist_ok=True)

    async def runs(self, request: Request) -> Response:
        own = [model for model in self._own.models.values() if model.key == key_of(request) and model.steps >= 0]
        listed, cursor = _page(request, own)
        return answer({"training_runs": [self._described(model) for model in listed], "cursor": cursor})

    async def run(self, request: Request) -> Response:
        return answer(self._described(self._own.model(key_of(request), request.path_params["model"])))

    async def of_run(self, request: Request) -> Response:
        model = self._own.model(key_of(request), request.path_params["model"])
        return answer({"checkpoints": [_described(one) for one in self._own.checkpoints_of(model.id)]})

    async def all(self, request: Request) -> Response:
        own = [one for one in self._own.checkpoints.values() if one.key == key_of(request)]
        listed, cursor = _page(request, own)
        return answer({"checkpoints": [_described(one) for one in listed], "cursor": cursor})

    async def delete(self, request: Request) -> Response:
        self._server.handle(Deleted(self._named(request).path))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        checkpoint = self._named(request)
        ttl = (await read(request, BODY_BYTES, bodies.SetTtl)).ttl_seconds
        if ttl is not None and ttl < 1:
            raise BadRequest(f"ttl_seconds: {ttl} is out of range; it must be 1 or more")
        checkpoint.expires = None if ttl is None else self._server.now() + ttl
        self._server.keep(checkpoint)
        return Response(status_code=204)

    async def archive(self, request: Request) -> Response:
        """Return the folder of a checkpoint, as a tar file."""
        folder = self._server.folder / self._named(request).folder
        file, size = await asyncio.to_thread(_tar, folder)
        return StreamingResponse(_parts(file), media_type="application/x-tar", headers={"content-length": str(size)})

    def _named(self, request: Request) -> SavedWeights:
        names = request.path_params
        if names["kind"] not in bodies.WEIGHTS_KINDS:
            raise NotThere(f"checkpoint {names['kind'][:40]}/{names['name'][:80]}: not there")
        path = bodies.checkpoint_path(
            names["model"], names["name"], sampler=names["kind"] == bodies.weights_kind(sampler=True)
        )
        return self._own.checkpoint(key_of(request), path)

    def _described(self, model: Model) -> dict[str, Any]:
        own = sorted(self._own.checkpoints_of(model.id), key=lambda one: one.at)
        for_training = [_described(one) for one in own if not one.sampler]
        for_sampling = [_described(one) for one in own if one.sampler]
        metadata = model.metadata or {}
        return {
            "training_run_id": model.id,
            "base_model": model.base,
            "model_owner": model.key,
            "is_lora": model.adapter.rank > 0,
            "corrupted": bool(model.lost),
            "lora_rank": model.adapter.rank,
            "last_request_time": _time(model.used),
            "last_checkpoint": for_training[-1] if for_training else None,
            "last_sampler_checkpoint": for_sampling[-1] if for_sampling else None,
            "user_metadata": {key: str(value) for key, value in metadata.items()} or None,
        }


def _described(checkpoint: SavedWeights) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.name,
        "checkpoint_type": "sampler" if checkpoint.sampler else "training",
        "time": _time(checkpoint.at),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.nbytes,
        "public": False,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
    }


def _page(request: Request, things: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the part of a list that a request asks for, and where it is in the list."""
    numbers = {}
    for name, default in (("limit", 100), ("offset", 0)):
        given = request.query_params.get(name, str(default))
        if not given.isdecimal() or int(given) > MOST_LISTED * MOST_LISTED:
            raise BadRequest(f"{name}: {given[:40]!r} is no number")
        numbers[name] = int(given)
    limit, offset = min(numbers["limit"], MOST_LISTED), numbers["offset"]
    return things[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(things)}


def _tar(folder: Path) -> tuple[IO[bytes], int]:
    """Return the folder as a tar file, which is gone once it is closed, and the file's size in bytes."""
    with ExitStack() as on_failure:
        file = on_failure.enter_context(tempfile.TemporaryFile(dir=folder.parent))
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(folder, arcname=".")
        size = file.tell()
        file.seek(0)
        on_failure.pop_all()
    return file, size


def _parts(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a file in parts, and close it."""
    with file:
        yield from iter(partial(file.read, PART_BYTES), b"")


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
