"""A server with vLLM's completions interface that scores prompts with a real model, and that can fail in the ways in
which servers fail."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).resolve().parents[1] / "launch" / "topologies" / "models" / "tiny-qwen3"


class TeacherOnServer:
    """A model behind HTTP. The attributes decide how the next requests are answered."""

    def __init__(self, folder: Path = MODEL, max_logprobs: int = 20) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.max_logprobs = max_logprobs
        self.status = 200
        """Status of every answer."""
        self.retry_after = ""
        """The header Retry-After of errors."""
        self.stalls_s = 0.0
        self.logits = False
        """Whether logits are returned in place of log-probs (--logprobs-mode raw_logits)."""
        self.drops = 0
        """Number of entries by which every answer is too short."""
        self.shift = 0
        """Amount by which the texts of tokens are those of other ids."""
        self.requests = 0
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before."""
        teacher = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "teacher", "max_model_len": 64}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                teacher.requests += 1
                time.sleep(teacher.stalls_s)
                if teacher.status != 200:
                    return self.answer(teacher.status, {"error": {"message": "not now"}})
                if body["prompt_logprobs"] > teacher.max_logprobs:
                    why = f"Requested prompt logprobs of {body['prompt_logprobs']}, greater than max allowed: 20"
                    return self.answer(400, {"error": {"message": why}})
                return self.answer(200, teacher.completion(body))

            def answer(self, status: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                with contextlib.suppress(OSError):  # the client has given up
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    if status != 200 and teacher.retry_after:
                        self.send_header("Retry-After", teacher.retry_after)
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, count = body["prompt"], body["prompt_logprobs"]
        with self._lock, torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([ids])).logits[0]
        values = logits if self.logits else logits.log_softmax(-1)
        entries: list[dict[str, Any] | None] = [None]
        for place, token in enumerate(ids[1:]):
            likeliest = values[place].topk(count).indices.tolist() if count else []
            entries.append(
                {
                    str(each): {
                        "logprob": float(values[place, each]),
                        "decoded_token": self.tokenizer.decode([each + self.shift]),
                    }
                    for each in dict.fromkeys([token, *likeliest])
                }
            )
        return {"choices": [{"text": "", "prompt_logprobs": entries[: len(entries) - self.drops]}]}


@contextlib.contextmanager
def teacher_on_server() -> Iterator[TeacherOnServer]:
    teacher = TeacherOnServer()
    teacher.start()
    try:
        yield teacher
    finally:
        teacher.stop()
