"""Writes the golden byte vectors in proto/golden/: `python -m tests.golden.vectors`.

A vector never changes: one that a new version of the protocol needs is added, with that version's `minor`. Do not run
this to hide a change to the wire format. Only refused.json follows the newest version.
Each vector is a file with the frames of one message, one after the other, and an entry in index.json with the sizes of
the frames and all values in plain JSON, so that another implementation can check itself without this code. files.json
holds the values of the block files, and refused.json holds messages that a mailbox refuses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from proto import codec, dtypes, envelope
from proto.envelope import FLAG_ONE_WAY, FLAG_REPLY
from proto.limits import CONTROL, Limits
from proto.messages import (
    Ack,
    AdamW,
    AdapterSpec,
    BatchMeta,
    BatchPart,
    Canary,
    Complete,
    CompleteAck,
    Credit,
    CreditDone,
    CreditSpec,
    Error,
    ErrorCode,
    Forward,
    ForwardBackward,
    ForwardBackwardModel,
    ForwardDone,
    Heartbeat,
    LeaseGrant,
    LeaseProgress,
    LossSpec,
    OpenModel,
    OptimStep,
    Outcome,
    Parcel,
    Ping,
    PutSeal,
    PutSealed,
    Refusal,
    SampledTokens,
    SampleTokens,
    SaveCheckpoint,
    SkipUpdate,
    StoreStats,
    TaskHandle,
    TaskResult,
    Telemetry,
    TopicRow,
    Update,
    WeightsKind,
    WeightsRef,
)
from proto.registry import Message
from proto.tensors import Array
from tests.golden import block_files, refusals
from tests.golden.values import plain, tensor

FOLDER = Path(__file__).resolve().parents[2] / "proto" / "golden"
INDEX = FOLDER / "index.json"
FILES = FOLDER / "files.json"
REFUSED = FOLDER / "refused.json"
SMALL_FRAMES = Limits(body_bytes=1 << 10, frames=8, frame_bytes=16, total_bytes=1 << 12)
"""Limits with frames of 16 bytes, so that a tensor of 40 bytes takes three frames."""


@dataclass(frozen=True)
class Vector:
    """A message, with the fields of its header and its limits."""

    name: str
    purpose: str
    body: Message
    arrays: tuple[Array, ...] = ()
    flags: int = 0
    request_id: int = 1
    incarnation: int = 0x0123456789ABCDEF
    remaining_s: float = 0.0
    limits: Limits = CONTROL
    minor: int = 0
    """Minor version of the protocol that introduced the vector. A later version reads it, but its own differ in this
    number."""

    def frames(self) -> list[bytes]:
        head, *others = [
            bytes(frame)
            for frame in codec.encode(
                self.body,
                request_id=self.request_id,
                incarnation=self.incarnation,
                flags=self.flags,
                remaining_s=self.remaining_s,
                arrays=self.arrays,
                limits=self.limits,
            )
        ]
        return [msgspec.structs.replace(envelope.unpack(head, self.limits), minor=self.minor).pack(), *others]


def _canary(length: int) -> Canary:
    logprobs = -np.arange(1, length, dtype=np.float32) / 4
    token_ids = np.arange(length, dtype=np.int32)
    if length == 3:  # A trainer from an earlier release would send this message.
        return Canary(token_ids=token_ids, logprobs=logprobs, tolerance=1e-4)
    return Canary(
        token_ids=token_ids,
        logprobs=logprobs,
        tolerance=0.25,
        digests=[0, 2**64 - 1],
        quantile=0.5,
        floor=0.02,
    )


def _lease() -> LeaseGrant:
    handles = [TaskHandle("train/0/7", 3, 8, 512, 9000, [0, 1]), TaskHandle("eval-math/12/0", 1)]
    return LeaseGrant(
        lease_id=2**53 + 1,
        stage="rollout",
        split="train",
        lease_s=30.5,
        batch=BatchMeta(
            tasks=handles, parts=[BatchPart("rollout", ["token_ids", "lengths"])], stores=["batch-store/0"]
        ),
        min_step=4,
        exact=True,
        group_size=8,
        weights=WeightsRef(
            lineage=1,
            step=4,
            task_id="weights/1/4",
            fence=1,
            store="batch-store/0",
            nbytes=1 << 20,
            canary=_canary(5),
            drill=_canary(3),
            drill_seed=2**63 - 1,
            drill_factors=[1.0, 7.5],
            kind=WeightsKind.ADAPTER,
            base="9f86d081884c7d65",
            base_digests=[3, 2**64 - 1],
        ),
    )


def _every_dtype() -> tuple[Array, ...]:
    patterns = np.arange(8 * 3, dtype=np.uint8)
    return tuple(
        patterns[: 3 * row.itemsize].view(row.numpy) if row.name != "bool" else np.array([True, False, True])
        for row in dtypes.TABLE
    )


def vectors() -> list[Vector]:
    """Return all vectors, in the order of the index."""
    matrix = np.arange(12, dtype="<i4").reshape(3, 4)
    results = [
        TaskResult("train/0/7", 3, Outcome.DONE, "batch-store/0", 2**64 - 1, 2, 40, 960),
        TaskResult("train/0/8", 1, Outcome.DROP, reason="prompt of 900 tokens: limit is 512", samples_failed=8),
    ]
    scalars = {
        "reward": np.array([1.0, 0.0], np.float32),
        "length": np.array([3, 5], np.int32),
        "truncated": np.array([0, 1], np.uint8),
        "empty": np.zeros((0, 2), np.float64),
    }
    return [
        Vector("ping", "a request without fields", Ping(), remaining_s=2.5, request_id=2**64 - 1),
        Vector("ack", "a reply without fields", Ack(), flags=FLAG_REPLY),
        Vector(
            "error",
            "a refusal: text in UTF-8, a float, a list of names",
            Error(code=ErrorCode.BUSY, message="store-0: voll, μ≤2", retry_after_s=0.25, names=["train/0/1#token_ids"]),
            flags=FLAG_REPLY,
        ),
        Vector(
            "heartbeat",
            "negative and large integers, booleans, records as arrays",
            Heartbeat(
                service="rollout",
                instance=1,
                incarnation=5,
                state="READY",
                rss_bytes=2**40,
                holds_step=-1,
                leases=[LeaseProgress(1, 2), LeaseProgress(2**31, 0)],
            ),
        ),
        Vector("lease", "nested structs, records with defaults, inline arrays", _lease(), flags=FLAG_REPLY),
        Vector(
            "complete",
            "a map of inline arrays, one of them empty and two-dimensional",
            Complete(lease_id=9, stage="rollout", incarnation=77, results=results, scalars=scalars),
            remaining_s=30.0,
        ),
        Vector(
            "complete_ack",
            "a list of records in a reply",
            CompleteAck(refused=[Refusal("train/0/7", 2, ErrorCode.LOST, "fence 2 is not 3")]),
            flags=FLAG_REPLY,
        ),
        Vector(
            "telemetry",
            "one way; a map whose values are numbers or text",
            Telemetry(
                service="monitor",
                instance=0,
                incarnation=1,
                sequence=3,
                dropped=1,
                at=1.5,
                topic="service",
                values={"state": "READY", "x": -0.0, "big": 1e300},
            ),
            flags=FLAG_ONE_WAY,
            request_id=0,
        ),
        Vector(
            "store_stats",
            "integers of every msgpack width",
            StoreStats(
                bytes=127,
                limit_bytes=128,
                shards=255,
                tasks=256,
                files=65535,
                zombie_bytes=65536,
                tombstones=2**32 - 1,
                puts=2**32,
                clears=2**63,
                busy=2**64 - 1,
            ),
            flags=FLAG_REPLY,
        ),
        Vector(
            "update",
            "the second and third frame of a change that the monitor publishes; the first is the topic, `service`",
            Update(sequence=2**53 + 1, row=TopicRow("rollout", 0, "service", 1.5, {"state": "READY", "x": -0.0})),
            flags=FLAG_ONE_WAY,
            request_id=0,
        ),
        Vector(
            "put_seal",
            "the request of the worked exchange in section 14",
            PutSeal(put_id=refusals.PUT_ID),
            remaining_s=30.0,
            request_id=258,
        ),
        Vector(
            "put_sealed",
            "its answer",
            PutSealed(nbytes=len(block_files.block_files()[1].data())),
            flags=FLAG_REPLY,
            request_id=258,
            incarnation=0x0FEDCBA987654321,
        ),
        Vector(
            "forward",
            "log-probs of one task at a temperature",
            Forward(
                driver=7,
                order=1,
                batch=BatchMeta(tasks=[TaskHandle("train/0/7", 3, 8, 512, 9000, [0])], stores=["batch-store/0"]),
                keys=["prox_logprobs"],
                temperature=0.7,
            ),
            remaining_s=3600.0,
        ),
        Vector(
            "forward_adapter_off",
            "log-probs of one task with the adapter on and off, and its KL",
            Forward(
                driver=7,
                order=1,
                batch=BatchMeta(tasks=[TaskHandle("train/0/7", 3, 2, 12, 900, [0])], stores=["batch-store/0"]),
                keys=["prox_logprobs", "ref_logprobs"],
                temperature=0.7,
                kl_estimator="k3",
            ),
            remaining_s=3600.0,
            minor=4,
        ),
        Vector(
            "credit",
            "advantages per token of a task with two samples, with a KL in the reward",
            Credit(
                driver=7,
                order=2,
                batch=BatchMeta(
                    tasks=[TaskHandle("train/0/7", 3, 2, 12, 900, [0])],
                    stores=["batch-store/0"],
                    scalars={
                        "shaped": np.array([1.0, 0.0], np.float32),
                        "loss_tokens": np.array([4, 0], np.int32),
                        "truncated": np.array([0, 1], np.uint8),
                    },
                ),
                credit=CreditSpec(name="reinforce", gamma=1.0, kl_estimator="k1", kl_coef=0.01),
            ),
            remaining_s=3600.0,
            minor=2,
        ),
        Vector(
            "sample_tokens",
            "a server's request for two samples of a prompt that it carries itself, with every field",
            SampleTokens(
                name="123456789abcdef/7",
                task_id="weights/3/12",
                fence=2,
                prompt=Parcel(arrays={"token_ids": np.array([5, 6, 7], np.int32)}),
                samples=2,
                max_tokens=16,
                temperature=0.7,
                top_k=20,
                top_p=0.9,
                stop=["\n\n"],
                stop_ids=[2, 3],
                ends=False,
                seed=2**63 - 1,
                prompt_logprobs=True,
                top_prompt_logprobs=1,
                texts=True,
            ),
            remaining_s=600.0,
            minor=6,
        ),
        Vector(
            "sampled_tokens",
            "its answer",
            SampledTokens(
                parcel=Parcel(
                    arrays={
                        "lengths": np.array([2, 1], np.int32),
                        "token_ids": np.array([8, 2, 3], np.int32),
                        "logprobs": np.array([-0.5, -0.25, -2.0], np.float32),
                        "versions": np.array([12, 12, 12], np.int32),
                        "prompt_logprobs": np.array([-1.0, -1.5], np.float32),
                        "top_ids": np.array([[6], [9]], np.int32),
                        "top_logprobs": np.array([[-1.0], [-0.5]], np.float32),
                    }
                ),
                reasons=["stop", "stop"],
                texts=["a", ""],
            ),
            flags=FLAG_REPLY,
            minor=6,
        ),
        Vector(
            "sampled_tokens_in_a_store",
            "an answer whose arrays are larger than 64 KiB",
            SampledTokens(
                parcel=Parcel(
                    batch=BatchMeta(
                        tasks=[TaskHandle("parcel/81985529216486895/0", 1, 0, 0, 98560, [0])], stores=["batch-store/0"]
                    )
                ),
                reasons=["length"],
            ),
            flags=FLAG_REPLY,
            minor=6,
        ),
        Vector(
            "forward_values",
            "a critic's values of one task, with those after the end",
            Forward(
                driver=7,
                order=1,
                batch=BatchMeta(tasks=[TaskHandle("train/0/7", 3, 2, 12, 900, [0])], stores=["batch-store/0"]),
                keys=["values"],
                temperature=1.0,
                ends=True,
            ),
            remaining_s=3600.0,
            minor=3,
        ),
        Vector(
            "forward_values_done",
            "its answer",
            ForwardDone(
                meta=BatchMeta(
                    tasks=[TaskHandle("train/0/7", 3, 2, 12, 48, [0])],
                    parts=[BatchPart("values", ["values:7-1"])],
                    stores=["batch-store/0"],
                    scalars={"value_after": np.array([0.5, 0.0], np.float32)},
                ),
                seconds=0.25,
            ),
            flags=FLAG_REPLY,
            minor=3,
        ),
        Vector(
            "credit_with_values",
            "advantages and returns per token of a task with one sample, after a critic has valued its tokens",
            Credit(
                driver=7,
                order=2,
                batch=BatchMeta(
                    tasks=[TaskHandle("train/0/7", 3, 1, 6, 450, [0])],
                    stores=["batch-store/0"],
                    scalars={
                        "shaped": np.array([1.0], np.float32),
                        "loss_tokens": np.array([4], np.int32),
                        "truncated": np.array([1], np.uint8),
                        "value_after": np.array([0.5], np.float32),
                    },
                ),
                credit=CreditSpec(name="gae", gamma=1.0, lam=0.95, lam_value=1.0, values=True, bootstrap=True),
            ),
            remaining_s=3600.0,
            minor=3,
        ),
        Vector(
            "credit_distill",
            "rewards of tokens that include the difference to a teacher",
            Credit(
                driver=7,
                order=2,
                batch=BatchMeta(
                    tasks=[TaskHandle("train/0/7", 3, 1, 12, 900, [0])],
                    parts=[BatchPart("rollout", ["token_ids"]), BatchPart("teacher", ["teacher_logprobs"])],
                    stores=["batch-store/0"],
                    scalars={
                        "shaped": np.array([1.0], np.float32),
                        "loss_tokens": np.array([4], np.int32),
                        "truncated": np.array([0], np.uint8),
                    },
                ),
                credit=CreditSpec(name="reinforce", gamma=0.9, distill_coef=0.5),
            ),
            remaining_s=3600.0,
            minor=5,
        ),
        Vector(
            "forward_backward_distill",
            "a loss that distils a teacher's two likeliest tokens",
            ForwardBackward(
                driver=7,
                order=3,
                batch=BatchMeta(
                    tasks=[TaskHandle("train/0/7", 3, 1, 12, 900, [0])],
                    parts=[
                        BatchPart("rollout", ["token_ids"]),
                        BatchPart("teacher", ["teacher_ids", "teacher_topk"]),
                    ],
                    stores=["batch-store/0"],
                    scalars={"advantages": np.array([0.0], np.float32), "weights": np.array([0.25], np.float32)},
                ),
                loss=LossSpec(
                    name="ppo_clip",
                    clip_low=0.2,
                    clip_high=0.2,
                    anchor="rollout",
                    temperature=1.0,
                    distill_coef=0.5,
                    distill_top_k=2,
                ),
            ),
            remaining_s=3600.0,
            minor=5,
        ),
        Vector(
            "skip_update",
            "an update that is skipped, with a snapshot after it",
            SkipUpdate(driver=7, order=3, step=2, last=True, snapshot_lineage=1),
            remaining_s=3600.0,
            minor=3,
        ),
        Vector(
            "credit_done",
            "its answer",
            CreditDone(
                meta=BatchMeta(
                    tasks=[TaskHandle("train/0/7", 3, 2, 12, 48, [0])],
                    parts=[BatchPart("credit", ["token_advantages:7-2"])],
                    stores=["batch-store/0"],
                ),
                statistics={"count": np.array([4.0]), "mean": np.array([1.0]), "squares": np.array([0.0])},
                seconds=0.25,
            ),
            flags=FLAG_REPLY,
            minor=2,
        ),
        Vector(
            "optim_step",
            "an update with all its numbers",
            OptimStep(
                driver=7,
                order=3,
                step=12,
                last=True,
                optimizer=AdamW(lr=3e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, clip_norm=1.0),
                snapshot_lineage=2,
            ),
            remaining_s=3600.0,
        ),
        Vector(
            "open_model",
            "a client's model, continued from its snapshot after a loss",
            OpenModel(
                driver=7,
                order=5,
                model=3,
                adapter=AdapterSpec(rank=8, alpha=32.0, seed=2**64 - 1, groups=["attention", "mlp", "unembed"]),
                snapshot=True,
                step=12,
                failed="api/3/17: target_tokens has 99",
            ),
            remaining_s=3600.0,
            minor=6,
        ),
        Vector(
            "forward_backward_model",
            "the gradient of a client's loss over one sequence",
            ForwardBackwardModel(
                driver=7,
                order=6,
                model=3,
                batch=BatchMeta(
                    tasks=[TaskHandle("api/3/18", 1, 1, 12, 196, [0])],
                    parts=[BatchPart("given", ["token_ids", "lengths", "target_tokens", "token_weights"])],
                    stores=["batch-store/0"],
                ),
                loss=LossSpec(name="dro", clip_low=0.0, clip_high=0.0, anchor="given", temperature=1.0, beta=0.05),
                forward_only=True,
            ),
            remaining_s=3600.0,
            minor=6,
        ),
        Vector(
            "save_checkpoint",
            "a checkpoint outside the regular interval",
            SaveCheckpoint(driver=7, order=4, step=12, at_stop=True),
            remaining_s=3600.0,
        ),
        Vector("tensors_every_dtype", "three elements of each dtype code, in order", Ack(), _every_dtype()),
        Vector(
            "tensors_shapes",
            "0-d, empty, transposed, strided, big-endian and eight-dimensional sources",
            Ack(),
            (
                np.array(7, np.int64),
                np.zeros((0, 3), np.float32),
                matrix.T,
                matrix[::2, 1:3],
                matrix.astype(">i4"),
                np.arange(2, dtype=np.uint8).reshape(1, 1, 1, 1, 1, 1, 1, 2),
            ),
        ),
        Vector(
            "tensors_many_frames",
            "frames of at most 16 bytes: an empty tensor between tensors of three frames and one",
            Ack(),
            (np.arange(10, dtype=np.float32), np.zeros(0, np.int8), np.arange(4, dtype=np.uint16)),
            limits=SMALL_FRAMES,
        ),
        Vector("ping_1_1", "a request of version 1.1 without fields", Ping(), remaining_s=2.5, minor=1),
    ]


def entry(vector: Vector, frames: list[bytes]) -> dict[str, Any]:
    """Return the entry for one vector in index.json."""
    values = {
        "name": vector.name,
        "purpose": vector.purpose,
        "file": f"{vector.name}.bin",
        "frames": [len(frame) for frame in frames],
        "frame_bytes_limit": vector.limits.frame_bytes,
        "minor": vector.minor,
        "type": vector.body.TYPE,
        "message": type(vector.body).__name__,
        "flags": vector.flags | (envelope.FLAG_TABLE if vector.arrays else 0),
        "request_id": vector.request_id,
        "incarnation": vector.incarnation,
        "remaining_ms": int(vector.remaining_s * 1000),
        "body": plain(vector.body),
        "tensors": [tensor(array) for array in vector.arrays],
    }
    return dict(plain(values))


def read(name: str, sizes: list[int]) -> list[bytes]:
    """Return the frames of a stored vector."""
    data = (FOLDER / f"{name}.bin").read_bytes()
    ends = np.cumsum(sizes).tolist()
    assert ends[-1] == len(data)
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    entries = []
    for vector in vectors():
        frames = vector.frames()
        (FOLDER / f"{vector.name}.bin").write_bytes(b"".join(frames))
        entries.append(entry(vector, frames))
    _write(INDEX, entries)
    files = []
    for block in block_files.block_files():
        data = block.data()
        (FOLDER / f"{block.name}.blk").write_bytes(data)
        files.append(block_files.entry(block, data))
    _write(FILES, files)
    _write(REFUSED, [refusals.entry(each) for each in refusals.refusals()])


def _write(index: Path, entries: list[dict[str, Any]]) -> None:
    index.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
