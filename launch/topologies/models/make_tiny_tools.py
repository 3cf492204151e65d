"""Makes the model that recipes/tools.yaml trains: a 0.1M-parameter Qwen3 that calls a calculator badly.

    python -m launch.topologies.models.make_tiny_tools --out launch/topologies/models/tiny-tools

The warm start shows builtin:addition's train split in two ways: half of the rows are answered from memory, and half
with a call of the calculator whose result is copied. It stops early on purpose, when a sampled answer is right with the
probability --success. Tool calls have the format of the Qwen models. The same seed, machine type and torch version give
the same bytes. Nothing imports this file.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from launch.topologies.models.make_tiny_qwen3 import IGNORED, Labelled, label_logits, learn, make_model, save
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.user_code.builtin import CALCULATOR
from shared.data import Row, Source, open_source

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
ASCII = [chr(code) for code in range(32, 127)] + ["\n"]
VOCAB_SIZE = 192
LEARNING_RATE, BATCH, MAX_STEPS = 8e-3, 32, 3000
SHOWN_ROWS, PROBE_ROWS, PROBE_EVERY = 768, 128, 10
CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\ntools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call_text(expression: str) -> str:
    """Return the answer that passes `expression` to the calculator."""
    return f'{CALL}\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n{CALL_END}'


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary consists of characters and of the texts of chats and tool calls. Each digit
    is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.decoder = decoders.Fuse()
    skeleton = call_text("0+0").removeprefix(CALL).removesuffix(CALL_END)
    texts = ["system\ntools: calculator", "\n", "user\n", "assistant\n", "tool\n", skeleton]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[PAD, START, END], initial_alphabet=ASCII, show_progress=False
    )
    tokenizer.train_from_iterator(texts * 2, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (CALL, CALL_END)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


class Demonstrations:
    """Renders rows as the rollout does: with its prompts, and with the tool's result between two answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, model: Qwen3ForCausalLM) -> None:
        self._tokenizer = tokenizer
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            model.config.save_pretrained(folder)
            self._prompts = PromptBuilder(Path(folder), add_generation_prompt=True)

    def ways(self, source: Source, rows: int) -> tuple[list[Labelled], list[Labelled]]:
        """Return the first `rows` rows, answered from memory and with the tool."""
        some = [source.row(index) for index in range(rows)]
        return [self._from_memory(row) for row in some], [self._with_tool(row) for row in some]

    def _from_memory(self, row: Row) -> Labelled:
        return self._labelled(self._prompt(row), self._answer(row["answer"]))

    def _with_tool(self, row: Row) -> Labelled:
        prompt, call = self._prompt(row), self._answer(call_text(row["prompt"].rstrip("=")))
        result = {"role": "tool", "content": row["answer"]}
        between = self._prompts.continuation([result], [CALCULATOR], [*prompt, *call])
        return self._labelled(prompt, call, between, self._answer(row["answer"]))

    def _prompt(self, row: Row) -> list[int]:
        return self._prompts.token_ids({"prompt": [{"role": "user", "content": row["prompt"]}], "tools": [CALCULATOR]})

    def _answer(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]

    @staticmethod
    def _labelled(*parts: list[int]) -> Labelled:
        """Return the ids of all parts and their labels. Every second part is an answer."""
        labels = [part if number % 2 else [IGNORED] * len(part) for number, part in enumerate(parts)]
        return [*chain(*parts)], [*chain(*labels)]


@torch.no_grad()
def success(model: Qwen3ForCausalLM, samples: list[Labelled]) -> float:
    """Return the mean probability of sampling exactly the answers of `samples`."""
    logits_BTV, labels_BT = label_logits(model, samples)
    nll_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), labels_BT, reduction="none")
    return float((-nll_BT.sum(1)).exp().mean())


def warm_start(model: Qwen3ForCausalLM, ways: Sequence[list[Labelled]], *, wanted: float, seed: int) -> int:
    """Train on demonstrations, the same number of each way, until a sampled answer to the first rows is right with the
    probability `wanted`. Return the number of steps."""
    picker = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(1, MAX_STEPS + 1):
        samples = [sample for way in ways for sample in picker.sample(way, BATCH // len(ways))]
        learn(model, optimizer, samples)
        if step % PROBE_EVERY == 0:
            right = [success(model, way[:PROBE_ROWS]) for way in ways]
            print(f"step {step}: {right[0]:.3f} from memory, {right[1]:.3f} by tool", flush=True)
            if sum(right) >= wanted:
                return step
    raise SystemExit(f"warm start: success {wanted} not reached in {MAX_STEPS} steps; try a different --seed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the model of recipes/tools.yaml and measures it.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--success", type=float, default=0.2, help="probability at which the warm start stops")
    args = parser.parse_args()

    torch.set_num_threads(1)  # A different thread count changes the order of additions and thus the bits.
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, vocabulary=len(tokenizer), hidden=64, layers=2, positions=tokenizer.model_max_length)
    shown = Demonstrations(tokenizer, model)
    train = open_source("builtin:addition", where="make_tiny_tools")
    test = open_source("builtin:addition?split=test", where="make_tiny_tools")
    steps = warm_start(model, shown.ways(train, SHOWN_ROWS), wanted=args.success, seed=args.seed)
    # The file has bfloat16 weights, so these are measured.
    model.bfloat16().float()  # type: ignore[no-untyped-call]
    memory, tool = (success(model, way) for way in shown.ways(test, len(test)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{parameters} parameters, {steps} steps, right on held-out rows: {memory:.3f} from memory, {tool:.3f} by tool"
    )
    if not 0.5 * args.success <= memory + tool <= 1.5 * args.success:
        raise SystemExit("the held-out rows differ from the training rows: nothing was written; try another --seed")
    save(model.bfloat16(), tokenizer, args.out)


if __name__ == "__main__":
    main()
