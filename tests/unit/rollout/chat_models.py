"""Makes model folders with a tokenizer and a chat template, but without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<start>", "<end>", "<eos>")
START, END, EOS = 1, 2, 3
CHATML = (
    "{% for m in messages %}{{ '<start>' + m['role'] + '\n' + m['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' and not (loop.index0 > 0 and messages[loop.index0 - 1].get('tool_calls')) %}"
    "{{ raise_exception('tool message without a call') }}{% endif %}"
    "{{ '<start>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m.get('tool_calls') or [] %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)
"""A template like that of gpt-oss: a tool's result may only follow a message with tool calls."""


def chat_model(
    folder: Path,
    *,
    eos: str = "<end>",
    template: str | None = CHATML,
    generation: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    appended: bool = False,
) -> Path:
    """Write a tokenizer of bytes with the tokens `SPECIAL`, and return its folder. If `appended`, the tokenizer ends
    every text with `<end>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["system user assistant tool"], trainer)
    if appended:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <end>", pair="$A $B <end>", special_tokens=[("<end>", END)]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=eos)
    if template is not None:
        made.chat_template = template
    made.save_pretrained(folder)
    values = {"vocab_size": 512, "eos_token_id": EOS, **(config or {})}
    written = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
