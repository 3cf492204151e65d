"""A reward from a language model: a server with the OpenAI chat API is asked for a grade from 0 to 10."""

from __future__ import annotations

import re
from functools import cache

import httpx2

from shared.sample import Sample

QUESTION = """Question: {question}
Answer: {answer}
Reference: {reference}
Grade the answer from 0 (wrong) to 10 (right). Reply with the grade alone."""
TIMEOUT_S = 30.0


@cache
def _client() -> httpx2.AsyncClient:
    """Return this process's client, which all calls share."""
    return httpx2.AsyncClient(timeout=TIMEOUT_S)


async def score(sample: Sample, *, base_url: str, model: str) -> float:
    """Return the judge's grade, from 0.0 to 1.0.

    HTTP errors are propagated, so that the caller waits for an unreachable judge. Raises ValueError for a reply without
    a grade, which loses only this sample.
    """
    text = QUESTION.format(
        question=sample.row["prompt"], answer=sample.completion, reference=sample.row.get("answer", "none")
    )
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8}
    reply = await _client().post(f"{base_url}/chat/completions", json=body)
    reply.raise_for_status()
    said = reply.json()["choices"][0]["message"]["content"]
    grade = re.search(r"\d+(?:\.\d+)?", said)
    if grade is None:
        raise ValueError(f"the judge said {said[:60]!r} instead of a grade from 0 to 10")
    return min(float(grade[0]), 10.0) / 10
