"""The measurements of `bench_train` and `bench_gpu` that run in separate processes: `speed BATCH MODEL`,
`products BATCH MODEL`, `adapter BATCH MODEL RANK`, `memory chunked|whole`, `utilisation cuda|cpu` and `update
ours|fsdp2 BATCH DEVICE`.
"""

from __future__ import annotations

import gc
import json
import math
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from proto.messages import LossSpec
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.loss import BatchLoss
from shared.model import logprobs
from shared.model.adapter import AdapterStart
from shared.model.linear import product
from shared.ranks.layout import Layout
from shared.ranks.process_group import own_device
from shared.topology.lora import Lora
from shared.topology.passes import FASTEST
from tests.bench.model_flops import peak_flops, training_flops
from tests.bench.own_process import full_size
from tests.bench.turns import by_turns
from tests.unit.policy_trainer.training import adamw

ROUNDS = 3
GROUP = 8
"""Number of sequences that begin with the same prompt."""
MICRO_BATCH, PLAIN_MICRO_BATCH = 16_384, 4096
"""Number of tokens in a micro-batch."""
CONVENTIONS: tuple[Literal["whole", "causal"], ...] = ("whole", "causal")
LINEAR = "mkldnn::_linear_pointwise"
PRODUCTS = (LINEAR, "aten::mm", "aten::addmm", "aten::addmm_")
"""Names of the operations that compute matrix products, other than attention."""
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
"""How the names of the attention's forward and backward passes on a CPU begin."""
VOCABULARY, HIDDEN, TOKENS = 150_000, 64, 2048
HIDDEN_7B, INNER_7B, VOCABULARY_7B = 3584, 18_944, 152_064
SLICE_MICRO_BATCH = 8192
STATE_BYTES = 18
"""Bytes of training state per parameter in bfloat16 on one rank."""
FULL = 0.85
"""Share of a GPU's memory that the slice of 7B may take up by estimate."""


def forward_backward_of(
    batch: Path, model: Path, *, adapter: AdapterStart | None = None, updates: bool = False
) -> tuple[int, Callable[[], None]]:
    """Return the number of tokens (prompts included) in a batch, and a function that runs one forward and backward pass
    over it on one thread, and then updates the weights if `updates` is true. With an `adapter`, only it is trained.
    """
    data = json.loads(batch.read_text())
    pairs = list(zip(data["prompts"], data["completions"], strict=True))
    ids = np.concatenate([np.array(prompt + answer, np.int32) for prompt, answer in pairs])
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in pairs], np.int32)
    mask = np.concatenate([np.array([0] * len(prompt) + [1] * len(answer), np.uint8) for prompt, answer in pairs])
    flat = {
        "token_ids": ids,
        "lengths": lengths,
        "rollout_logprobs": np.full(len(ids), -2.0, np.float32),
        "versions": np.zeros(len(ids), np.int32),
    }
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)
    advantages = np.repeat(np.linspace(-1, 1, len(lengths)), lengths).astype(np.float32)
    weights = np.full(len(ids), 1 / mask.sum(), np.float32)
    options = BackendOptions(
        max_tokens=4096,
        threads=1,
        device="cpu",
        scratch=batch.parent / "offloaded",
        passes=FASTEST,
        adapter=adapter,
    )
    backend = TorchBackend(model, "float32", options, Layout(1).place(0))

    def run() -> None:
        loss = BatchLoss(spec, flat, advantages, weights, "cpu")
        backend.forward_backward(Sequences(ids, lengths, mask), 1.0, loss, entropy=loss.entropy)
        if updates:
            backend.step(1, adamw(lr=1e-6))
        backend.drop_gradients()

    return len(ids), run


def adapter(batch: Path, model: Path, rank: int) -> dict[str, Any]:
    """Return the CPU seconds of a training step on one thread, with an adapter of this rank and of all weights, in turn
    for ROUNDS rounds after one to warm up."""
    start = AdapterStart(Lora(rank=rank), seed=0)
    steps = {
        "adapter": forward_backward_of(batch, model, adapter=start, updates=True)[1],
        "full": forward_backward_of(batch, model, updates=True)[1],
    }

    def seconds(step: Callable[[], None]) -> float:
        began = time.process_time()
        step()
        return time.process_time() - began

    made = by_turns({name: partial(seconds, step) for name, step in steps.items()}, 1 + ROUNDS)
    return {name: times[1:] for name, times in made.items()}


def speed(batch: Path, model: Path) -> dict[str, Any]:
    """Return tokens (prompts included) per CPU second on one thread: the best of ROUNDS rounds."""
    tokens, run = forward_backward_of(batch, model)
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return {"tokens_per_s": tokens / min(times), "seconds": times}


def products(batch: Path, model: Path) -> dict[str, float]:
    """Return the operations per second of the matrix products in the last of ROUNDS forward and backward passes, and
    those of oneDNN alone on the same shapes: the fastest of 20 products of contiguous matrices for each shape. Also
    return the shares of the matrix products and of attention in the time of the pass.
    """
    _, run = forward_backward_of(batch, model)
    for _ in range(ROUNDS - 1):
        run()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        run()
    calls: Counter[tuple[int, int, int]] = Counter()
    spent_s = attention_s = total_s = 0.0
    for event in profiled.key_averages(group_by_input_shape=True):
        total_s += event.self_cpu_time_total / 1e6
        if event.key.startswith(ATTENTION):
            attention_s += event.cpu_time_total / 1e6
        if event.key not in PRODUCTS:
            continue
        rows, weight = event.input_shapes[1:3] if "addmm" in event.key else event.input_shapes[:2]
        out = weight[0] if event.key == LINEAR else weight[1]
        calls[math.prod(rows[:-1]), rows[-1], out] += event.count
        spent_s += event.cpu_time_total / 1e6
    alone_s = sum(count * _fastest_product_s(*shape) for shape, count in calls.items())
    flops = sum(2 * math.prod(shape) * count for shape, count in calls.items())
    shares = {"products_share": spent_s / total_s, "attention_share": attention_s / total_s}
    return {"flops_per_s": flops / spent_s, "alone_flops_per_s": flops / alone_s, "ratio": alone_s / spent_s} | shares


def _fastest_product_s(rows: int, inputs: int, outputs: int) -> float:
    left, right = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        product(left, right)
        times.append(time.perf_counter() - began)
    return min(times)


def qwen3_or_small(device: str) -> Any:
    """Return the configuration of a model as large as Qwen3-0.6B, or, on a CPU, of a small one."""
    sizes = (1024, 3072, 28, 16, 8, 151_936, 128) if full_size(device) else (64, 192, 2, 4, 2, 512, 32)
    return _config("qwen3", sizes, tied=True)


def slice_or_small(device: str) -> Any:
    """Return the configuration of a model with the layers of Qwen2.5-7B, as many as fit on the GPU in training, or, on
    a CPU, of a small one."""
    if not full_size(device):
        return _config("qwen2", (64, 192, 2, 4, 2, 512), tied=False)
    layers = layers_that_fit(torch.cuda.get_device_properties(0).total_memory)
    return _config("qwen2", (HIDDEN_7B, INNER_7B, layers, 28, 4, VOCABULARY_7B), tied=False)


def layers_that_fit(device_bytes: int) -> int:
    """Return the number of layers of Qwen2.5-7B whose training takes up at most `FULL` of a device.

    A parameter takes 18 bytes (`shared/topology/memory_plan.py`). What a layer keeps until its backward pass is
    estimated as 40 bytes per token and hidden unit, and 8 bytes per token and unit of the MLP. A chunk of logits takes
    less than 4 GiB.
    """
    key_width = HIDDEN_7B // 7
    layer = 2 * HIDDEN_7B**2 + 2 * HIDDEN_7B * key_width + 3 * HIDDEN_7B * INNER_7B
    kept = SLICE_MICRO_BATCH * (40 * HIDDEN_7B + 8 * INNER_7B)
    room = FULL * device_bytes - 2 * STATE_BYTES * HIDDEN_7B * VOCABULARY_7B - (4 << 30)
    return int(room // (STATE_BYTES * layer + kept))


def _config(kind: str, sizes: tuple[int, ...], *, tied: bool) -> Any:
    from transformers import AutoConfig

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    given = dict(zip((*names, "vocab_size", "head_dim"), sizes, strict=False))
    return AutoConfig.for_model(kind, tie_word_embeddings=tied, max_position_embeddings=8192, **given)


def save_model(config: Any, folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Save a random model, and return it without its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return model.to("meta")


def new_lengths(rng: np.random.Generator, device: str) -> np.ndarray:
    """Return lengths of the sequences of one round: on a GPU, 32 of 512 to 4,096 tokens."""
    return (rng.integers(512, 4097, 32) if full_size(device) else rng.integers(16, 129, 8)).astype(np.int32)


def utilisation(
    device: str, config_of: Callable[[str], Any] = qwen3_or_small, micro_batch: int = MICRO_BATCH
) -> dict[str, Any]:
    """Return operations per second of forward and backward in bfloat16, and the MFU if the peak rate of the device is
    known.

    Both are means over the rounds, whose individual values are also returned, for each way of counting attention
    (`model_flops`). A prompt counts once for each of its sequences, even where it is computed only once. Every round
    has new lengths, like every step of a run, so a library that has to prepare for each new shape does so in every
    round. The whole training state, with the optimizer's, is on the device.
    """
    config = config_of(device)
    rng = np.random.default_rng(0)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-train-") as name:
        model = save_model(config, Path(name) / "model", device)
        options = BackendOptions(max_tokens=micro_batch, threads=1, device=device, scratch=Path(name) / "offloaded")
        backend = TorchBackend(Path(name) / "model", "bfloat16", options, Layout(1).place(0))
        round_s(backend, new_lengths(rng, device), config.vocab_size, device, keep=True)  # the warm-up
        backend.step(1, adamw(lr=1e-4))
        for _ in range(ROUNDS):
            lengths = new_lengths(rng, device)
            seconds = round_s(backend, lengths, config.vocab_size, device)
            counts = {how: training_flops(model, config, lengths.tolist(), how) for how in CONVENTIONS}
            rounds.append({"lengths": lengths.tolist(), "seconds": seconds, **counts})
    peak = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
    total_s = sum(each["seconds"] for each in rounds)
    rates = {how: sum(each[how] for each in rounds) / total_s for how in CONVENTIONS}
    return {
        "layers": config.num_hidden_layers,
        "flops_per_s": rates,
        "mfu": {how: rate / peak for how, rate in rates.items()} if peak else None,
        "tokens_per_s": sum(sum(each["lengths"]) for each in rounds) / total_s,
        "rounds": rounds,
    }


def against_plain(
    device: str, config_of: Callable[[str], Any] = qwen3_or_small, micro_batch: int = MICRO_BATCH
) -> dict[str, Any]:
    """Return the means of `utilisation`, and the tokens/s of a plain transformers loop over the same lengths."""
    own_device(device, 0)
    found = utilisation(device, config_of, micro_batch)
    gc.collect()  # the model's hooks keep it in memory until then
    if device == "cuda":
        torch.cuda.empty_cache()
    plain = plain_tokens_per_s(device, [each["lengths"] for each in found.pop("rounds")], config_of)
    return found | {"plain_tokens_per_s": plain}


def plain_tokens_per_s(
    device: str, rounds: Sequence[Sequence[int]], config_of: Callable[[str], Any] = qwen3_or_small
) -> float:
    """Return tokens/s of transformers' own model and attention over padded micro-batches of the same lengths.

    The model is the same as in `utilisation`. A micro-batch has at most `PLAIN_MICRO_BATCH` tokens, including padding;
    the float32 logits of that many tokens need 2.5 GB with the vocabulary of Qwen3.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(device)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).train()
    total_s = 0.0
    for number, lengths in enumerate([rounds[0], *rounds]):
        seconds = padded_round_s(model, lengths, config.vocab_size, device, micro_batch=PLAIN_MICRO_BATCH)
        total_s += seconds if number else 0.0  # the first is the warm-up
        model.zero_grad(set_to_none=False)
    return sum(map(sum, rounds)) / total_s


def padded_round_s(
    model: Any, lengths: Sequence[int], vocabulary: int, device: str, *, micro_batch: int, prompt: int = 1
) -> float:
    """Return how long, in seconds, forward and backward of a transformers model take over padded micro-batches of at
    most `micro_batch` tokens. The first `prompt` tokens of a sequence are not scored.

    The loss is the mean log-prob of the other tokens, whose gradient costs as much as a policy gradient.
    """
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    left = sorted(lengths, reverse=True)
    while left:
        rows = max(micro_batch // left[0], 1)
        taken, left = left[:rows], left[rows:]
        ids = torch.from_numpy(rng.integers(0, vocabulary, (len(taken), taken[0]))).to(device)
        mask = (torch.arange(taken[0])[None] < torch.tensor(taken)[:, None]).to(device)
        labels = ids.masked_fill(~mask, -100)
        labels[:, :prompt] = -100
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def update(side: str, batch: Path, device: str) -> dict[str, float]:
    """Return tokens/s of forward and backward, and of a whole update, on the lengths in the file `batch`: of our torch
    backend (`ours`), or of a plain loop with a transformers model under FSDP2 (`fsdp2`). Both have one rank, float32
    masters and micro-batches of equally many tokens.
    """
    given = json.loads(batch.read_text())
    config, lengths, prompt = qwen3_or_small(device), given["lengths"], given["prompt"]
    limit: int = given["micro_batch"]
    with tempfile.TemporaryDirectory(prefix="bench-train-") as name:
        if side == "ours":
            own_device(device, 0)
            save_model(config, Path(name) / "model", device)
            options = BackendOptions(max_tokens=limit, threads=1, device=device, scratch=Path(name) / "offloaded")
            backend = TorchBackend(Path(name) / "model", "bfloat16", options, Layout(1).place(0))
            array = np.array(lengths, np.int32)

            def pass_s() -> float:
                return round_s(backend, array, config.vocab_size, device, keep=True, prompt=prompt)

            def step() -> object:
                return backend.step(1, adamw(lr=1e-6))
        else:
            model, optimizer = _under_fsdp2(config, device)

            def pass_s() -> float:
                return padded_round_s(model, lengths, config.vocab_size, device, micro_batch=limit, prompt=prompt)

            def step() -> object:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                return optimizer.zero_grad()

        passes, steps = [], []
        for _ in range(ROUNDS + 1):
            passes.append(pass_s())
            began = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            steps.append(time.perf_counter() - began)
    tokens = sum(lengths) * ROUNDS  # the first round is the warm-up
    return {"tokens_per_s": tokens / sum(passes[1:]), "update_tokens_per_s": tokens / sum(passes[1:] + steps[1:])}


def _under_fsdp2(config: Any, device: str) -> tuple[Any, torch.optim.Optimizer]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    kinds = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(kinds, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)


def round_s(
    backend: TorchBackend, lengths: np.ndarray, vocabulary: int, device: str, *, keep: bool = False, prompt: int = 1
) -> float:
    """Return how long, in seconds, one forward and backward pass over random sequences of `lengths` takes. The first
    `prompt` tokens of a sequence are not scored. With `keep`, the gradient is kept for an update.

    As in GRPO, GROUP sequences share a prompt. If `prompt` is 1, it is a quarter as long as the shortest sequence.
    """
    ids = np.random.default_rng(int(lengths.sum())).integers(0, vocabulary, int(lengths.sum())).astype(np.int32)
    mask = np.ones(len(ids), np.uint8)
    starts, shared = np.cumsum(lengths) - lengths, prompt if prompt > 1 else int(lengths.min()) // 4
    for number, start in enumerate(starts):
        first = starts[number - number % GROUP]
        ids[start : start + shared] = ids[first : first + shared]
        mask[start : start + prompt] = 0
    flat = {
        "token_ids": ids,
        "lengths": lengths,
        "rollout_logprobs": np.full(len(ids), -2.0, np.float32),
        "versions": np.zeros(len(ids), np.int32),
    }
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)
    ones = np.ones(len(ids), np.float32)
    began = time.perf_counter()
    loss = BatchLoss(spec, flat, ones, ones / mask.sum(), device)
    backend.forward_backward(Sequences(ids, lengths, mask), 1.0, loss, entropy=loss.entropy)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    if not keep:
        backend.drop_gradients()
    return seconds


def memory(how: str) -> dict[str, Any]:
    """Return the number of bytes by which one forward and backward pass over TOKENS tokens, all of them scored, raises
    the peak resident memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    if how == "whole":
        logprobs.MAX_LOGITS = TOKENS * VOCABULARY
    rng = np.random.default_rng(0)
    lengths = np.full(8, TOKENS // 8)
    mask = np.ones(TOKENS, np.uint8)
    mask[:: TOKENS // 8] = 0
    ids = rng.integers(0, VOCABULARY, TOKENS)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for part in logprobs.score(model, ids, lengths, mask, 1.0, TOKENS, entropy="value"):
        part.outputs.sum().backward()  # type: ignore[no-untyped-call]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_bytes": (peak - before) * 1024}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found: dict[str, Any]
    if sys.argv[1] == "update":
        found = update(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    elif sys.argv[1] == "adapter":
        found = adapter(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1] in ("speed", "products"):
        found = {"speed": speed, "products": products}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        found = {"memory": memory, "utilisation": utilisation}[sys.argv[1]](sys.argv[2])
    print(json.dumps(found))
