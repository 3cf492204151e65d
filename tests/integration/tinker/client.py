"""A client of the server that speaks its protocol by hand, so that a test controls the order of requests and repeats
them. The recorded requests of the SDK (tests/unit/tinker) show that the protocol is the SDK's."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec
import numpy as np

from services.policy_trainer.tinker import protobuf

FORM = "application/x-protobuf"
MODEL = "Qwen/Qwen3-8B-Base"
PATIENCE_S = 120.0


class Failed(Exception):
    """A future ended with an error."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(f"{answer['category']}: {answer['error']}")
        self.category, self.error = answer["category"], answer["error"]


@dataclass
class Client:
    """A client with one session and, after `begin`, one model."""

    address: str
    key: str
    session: str = ""
    model: str = ""
    seq: int = 0
    http: httpx2.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx2.AsyncClient(
            base_url=f"http://{self.address}/api/v1/", headers={"x-api-key": self.key}, timeout=60, trust_env=False
        )

    async def close(self) -> None:
        await self.http.aclose()

    async def send(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        """POST a request, again if the connection is refused or the server asks for it, as the SDK does."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = await self.http.post(path, content=content, headers=headers)
            except httpx2.TransportError:
                if time.monotonic() > until:
                    raise
            else:
                if answer.status_code not in (408, 409, 429, 503) or time.monotonic() > until:
                    return answer
            await asyncio.sleep(0.2)  # only paces the attempts

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        answer = await self.send(path, body)
        assert answer.status_code == 200, (path, answer.status_code, answer.text[:300])
        return msgspec.json.decode(answer.content)  # type: ignore[no-any-return]

    async def result(self, future: dict[str, Any]) -> Any:
        """Return the result of a future: JSON, or the bytes of a message."""
        answer = await self.send("retrieve_future", {"request_id": future["request_id"]})
        assert answer.status_code == 200, (future, answer.status_code, answer.text[:300])
        if answer.headers["content-type"] == FORM:
            return answer.content
        decoded = msgspec.json.decode(answer.content)
        if "error" in decoded:
            raise Failed(decoded)
        return decoded

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    async def begin(self, rank: int = 8, seed: int = 1, **flags: bool) -> None:
        """Open a session with one model."""
        self.session = (await self.post("create_session", {"tags": [], "sdk_version": "0.38.0"}))["session_id"]
        lora = {"rank": rank, "seed": seed, **flags}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
        future = await self.post("create_model", body)
        self.model = (await self.result(future))["model_id"]

    async def forward_backward(self, data: Sequence[bytes], loss: str = "cross_entropy", **how: Any) -> dict[str, Any]:
        """Submit data. Return the future."""
        return await self.post("forward_backward", self.body_of(data, loss, **how))

    def body_of(
        self,
        data: Sequence[bytes],
        loss: str = "cross_entropy",
        *,
        seq: int = 0,
        forward_only: bool = False,
        **numbers: float,
    ) -> bytes:
        message = protobuf.new("ForwardBackwardRequest")
        message.model_id, message.seq_id, message.loss_fn = self.model, seq or self.next_seq(), loss
        message.forward_only = forward_only
        for one in data:
            message.data.add().ParseFromString(one)
        for name, value in numbers.items():
            message.loss_fn_config[name] = value
        return bytes(message.SerializeToString())

    async def optim_step(self, lr: float = 1e-3, **numbers: float) -> dict[str, Any]:
        adam = {"learning_rate": lr, "eps": 1e-8, **numbers}
        return await self.post("optim_step", {"model_id": self.model, "seq_id": self.next_seq(), "adam_params": adam})

    async def save(self, name: str) -> str:
        body = {"model_id": self.model, "seq_id": self.next_seq(), "path": name}
        path: str = (await self.result(await self.post("save_weights", body)))["path"]
        return path

    async def step(
        self, data: Sequence[bytes], loss: str = "cross_entropy", lr: float = 1e-3, **numbers: float
    ) -> float:
        """Take one training step. Return the loss."""
        gradient = await self.forward_backward(data, loss, **numbers)
        update = await self.optim_step(lr)
        output = protobuf.parse("ForwardBackwardOutput", await self.result(gradient))
        await self.result(update)
        return float(output.metrics["loss:sum"])


def datum(tokens: Sequence[int], **inputs: Any) -> bytes:
    """Return a datum whose targets are the next tokens, unless given. Other inputs are arrays by name."""
    message = protobuf.new("Datum")
    ids = np.asarray(tokens, "<i4")
    message.model_input.add().encoded_text.tokens = ids[:-1].tobytes()
    arrays = {"target_tokens": ids[1:].astype("<i8"), **inputs}
    for name, values in arrays.items():
        array = np.asarray(values)
        array = array.astype("<i8" if array.dtype.kind == "i" else "<f4")
        tensor = message.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = array.tobytes(), 2 if array.dtype.kind == "i" else 1
        tensor.shape.extend(array.shape)
    return bytes(message.SerializeToString())


def logprobs(output: bytes) -> list[np.ndarray]:
    """Return the log-probs of a result, one array for each datum."""
    arrays: list[np.ndarray] = []
    for record in protobuf.parse("ForwardBackwardOutput", output).loss_fn_outputs:
        tensor = record.fields["logprobs"]
        values = np.frombuffer(tensor.data, "<f4")
        offsets = np.frombuffer(tensor.offsets, "<i8") // 4
        for begin, end in itertools.pairwise(offsets):
            arrays.append(values[begin:end].reshape(-1, *tensor.trailing_shape))
    return arrays
