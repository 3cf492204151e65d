"""Checks, before a start, that the teacher of a run reads the policy's tokens as the policy does."""

from __future__ import annotations

from pathlib import Path

from launch.checks.findings import Findings
from shared.topology import Topology
from shared.topology.model_files import largest_token, token_texts, vocabulary
from shared.topology.models import TEACHER

_SHOWN_TOKENS = 3


def check_teacher(topology: Topology, findings: Findings) -> None:
    """Check the vocabulary of the teacher, to which token ids go as they are."""
    teacher, policy = topology.teacher, topology.policy.model
    if teacher is None or not Path(teacher.model).is_dir() or not Path(policy).is_dir():
        return  # no teacher, or a model that still has to be downloaded
    where = f"{TEACHER}.model: {teacher.model}"
    largest, size = largest_token(policy), vocabulary(teacher.model)
    if largest is not None and size and largest >= size:
        findings.error(
            f"{where} has a vocabulary of {size}, but the policy's tokenizer has token {largest}; use a model whose "
            f"config.json has a vocab_size of at least {largest + 1}"
        )
    if problem := vocabulary_problem(policy, teacher.model):
        findings.error(f"{where}: {problem}")


def vocabulary_problem(policy: str, teacher: str) -> str:
    """Return, on one line, the first tokens of the policy that have another text in the teacher's tokenizer, or why the
    two cannot be compared; or an empty string."""
    if policy == teacher:
        return ""
    own, others = token_texts(policy), token_texts(teacher)
    for model, texts in ((policy, own), (teacher, others)):
        if not texts:
            text = f"{model} has no tokenizer.json that lists its tokens, so the vocabularies cannot be compared"
            return f"{text}; write one with save_pretrained of a fast tokenizer"
    differ = [number for number in sorted(own) if others.get(number) != own[number]]
    if not differ:
        return ""
    shown = "; ".join(
        f"token {number} is {own[number]!r} in the policy's tokenizer and "
        + (f"{others[number]!r} in the teacher's" if number in others else "not in the teacher's")
        for number in differ[:_SHOWN_TOKENS]
    )
    more = f"; {len(differ)} tokens differ" if len(differ) > _SHOWN_TOKENS else ""
    return f"{shown}{more}; use a teacher with the policy's vocabulary"
