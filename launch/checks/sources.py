"""Checks, before a start, that the sources of the training set suit what the topology adds to their prompts, and have
the answers that it learns from."""

from __future__ import annotations

from launch.checks.findings import Findings
from shared.data import DataError, Source
from shared.data.source import ANSWER, answer_text, is_conversation
from shared.topology import Topology

LOOKED_AT = 64
"""Number of rows of a source whose answers are checked before a start."""


def check_prompts(topology: Topology, findings: Findings) -> None:
    """Check that a source with a system message, or with variables of the chat template, has no prompts that are
    text."""
    for key, chosen in topology.data.train_sources.items():
        rows = findings.opened.get(key)
        given = [name for name in ("system", "chat_template") if getattr(chosen, name)]
        if rows is None or not given:
            continue
        for index in range(len(rows)):
            try:
                text = isinstance(rows.row(index)["prompt"], str)
            except DataError:
                continue  # another check reports it
            if text:
                remedy = f"write the prompt as messages, or remove {given[0]}"
                where = f"{key.removesuffix('.source')}.{given[0]}"
                findings.error(f"{where}: has no effect on a prompt that is text ({rows.place(index)}); {remedy}")
                break


def check_answers(topology: Topology, findings: Findings) -> None:
    """Check that rows have the answers that are trained on. A row that lacks one is dropped during the run."""
    fields = topology.algorithm.loss.answers
    for key in topology.data.train_sources if fields else ():
        if (rows := findings.opened.get(key)) is None:
            continue
        looked_at = range(min(len(rows), LOOKED_AT))
        problems = [problem for index in looked_at if (problem := _answer_problem(rows, index, fields))]
        if not problems:
            continue
        text = f"{findings.in_file(key)}: {len(problems)} of the first {len(looked_at)} rows cannot be trained on; the "
        line = f"{text}first is {problems[0]}"
        if len(problems) == len(looked_at):
            findings.error(line)
        else:
            findings.warn(line)


def _answer_problem(rows: Source, index: int, fields: tuple[str, ...]) -> str:
    """Return why a row has no answers to train on, or an empty string, also for a row that cannot be used at all."""
    try:
        row = rows.row(index)
        if ANSWER in fields and is_conversation(row):
            return ""  # every message of the assistant is an answer
        for field in fields:
            answer_text(row, field)
    except DataError:
        return ""  # another check reports it
    except ValueError as error:
        return f"{rows.place(index)}: {error}"
    return ""
