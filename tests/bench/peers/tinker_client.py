"""Times training and sampling through the Tinker SDK as its documentation advises: requests are sent before the results
of earlier ones are awaited. Then a second client sends small requests while the first one's are queued. Runs in
`.venv-tinker`; prints a JSON object.

    TINKER_BASE_URL=… TINKER_API_KEY=… OTHER_API_KEY=… python tinker_client.py \\
        MODEL RANK ROWS TOKENS UPDATES PROMPTS SAMPLES NEW_TOKENS QUANTUM_TOKENS
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from typing import Any

import tinker
from tinker import types

REQUEST_DATUMS = 1024
"""The most that the SDK sends in one request."""
QUEUED = 8
SMALL_DATUMS = 4


def main() -> None:
    model, *numbers = sys.argv[1:]
    rank, rows, tokens, updates, prompts, samples, new_tokens, quantum = map(int, numbers)
    client = tinker.ServiceClient()
    trainer = client.create_lora_training_client(base_model=model, rank=rank, seed=1).result()
    drawn = random.Random(0)
    data = [datum([drawn.randrange(4, 60) for _ in range(tokens)]) for _ in range(rows)]
    took = [update(trainer, data) for _ in range(2)]
    began, waiting = time.perf_counter(), []
    for _ in range(updates):
        waiting.append(submit(trainer, data))
    for gradient, step in waiting:
        gradient.result(), step.result()
    trained_s = (time.perf_counter() - began) / updates
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=new_tokens, temperature=1.0)
    asked = [types.ModelInput.from_ints([drawn.randrange(4, 60) for _ in range(32)]) for _ in range(prompts)]
    rates = []
    for _ in range(4):
        began = time.perf_counter()
        futures = [sampler.sample(prompt=one, num_samples=samples, sampling_params=params) for one in asked]
        count = sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)
        rates.append(count / (time.perf_counter() - began))
    found = {"first_s": took, "update_s": trained_s, "sampled_per_s": rates[1:]}
    print(json.dumps(found | beside_a_queue(model, rank, trainer, quantum // REQUEST_DATUMS)))


def beside_a_queue(model: str, rank: int, trainer: Any, tokens: int) -> dict[str, Any]:
    """Return the seconds of small calls of another client, alone and while the first one has a queue of calls of
    `REQUEST_DATUMS` datums of `tokens` tokens, and those of one such call. Each call of the queue is a whole turn."""
    other = tinker.ServiceClient(api_key=os.environ["OTHER_API_KEY"]).create_lora_training_client(
        base_model=model, rank=rank, seed=2
    )
    drawn = random.Random(1)
    large, small = (
        [datum([drawn.randrange(4, 60) for _ in range(tokens + 1)]) for _ in range(count)]
        for count in (REQUEST_DATUMS, SMALL_DATUMS)
    )
    small_trainer = other.result()

    def took(trainer: Any, data: list[types.Datum]) -> float:
        began = time.perf_counter()
        trainer.forward_backward(data, loss_fn="cross_entropy").result()
        return time.perf_counter() - began

    took(small_trainer, small)
    own = [took(small_trainer, small) for _ in range(5)]
    turn = took(trainer, large)
    queue = [trainer.forward_backward(large, loss_fn="cross_entropy") for _ in range(QUEUED)]
    queue[0].result()
    delayed = [took(small_trainer, small) for _ in range(3)]
    waiting = sum(not one.future().done() for one in queue)
    for one in queue:
        one.result()
    return {"small_s": statistics.median(own), "turn_s": turn, "delayed_s": delayed, "still_queued": waiting}


def datum(ids: list[int]) -> types.Datum:
    """Return a sequence whose tokens all have the weight 1."""
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def submit(trainer: Any, data: list[types.Datum]) -> tuple[Any, Any]:
    gradient = trainer.forward_backward(data, loss_fn="cross_entropy")
    return gradient, trainer.optim_step(types.AdamParams(learning_rate=1e-4))


def update(trainer: Any, data: list[types.Datum]) -> float:
    began = time.perf_counter()
    for future in submit(trainer, data):
        future.result()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
