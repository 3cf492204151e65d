"""Provides entries from the reasoning-gym library by index, for rows and rewards. The library is imported when the
first source of this kind is opened. Processes that must produce the same rows run with PYTHONHASHSEED set to
`gym_process.HASH_SEED`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from shared.data.source import DataError, nearest, require

PACKAGE = "reasoning_gym"
EXTRA = "rewards"
GYM_KEY = "reasoning_gym"
"""Row field from which the entry can be recreated: `{"source", "index"}`."""
SIZE = 1000
_CACHED_ENTRIES = 4096


class GymEntries:
    """Entries in one data set by index. They are generated from the seed, not read from stored rows."""

    def __init__(self, source: str, *, where: str) -> None:
        """`source` is the name in the topology. Raises DataError for an unknown data set or parameter, or if the
        library is missing."""
        require(PACKAGE, EXTRA, f"{where}: source {source!r}")
        from reasoning_gym import factory

        dataset, _, query = source.partition(":")[2].partition("?")
        if dataset not in factory.DATASETS:
            raise DataError(f"{where}: source {source!r} is not a known data set{nearest(dataset, factory.DATASETS)}")
        parameters = {field.name for field in dataclasses.fields(factory.DATASETS[dataset][1])}
        given: dict[str, Any] = {"size": SIZE, "seed": 0}
        for key, text in parse_qsl(query, keep_blank_values=True):
            if key not in parameters:
                raise DataError(f"{where}: source {source!r} has unknown parameter {key!r}{nearest(key, parameters)}")
            given[key] = _value(text)
        try:
            self._dataset = factory.create_dataset(dataset, **given)
        except Exception as error:  # a data set's validation can raise anything
            raise DataError(
                f"{where}: source {source!r} refuses its parameters: {type(error).__name__}: {error}".replace("\n", " ")
            ) from None
        self._cached: Callable[[int], dict[str, Any]] = lru_cache(_CACHED_ENTRIES)(self._dataset.__getitem__)

    def __len__(self) -> int:
        return len(self._dataset)

    def entry(self, index: int) -> dict[str, Any]:
        """Return `{"question", "answer", "metadata"}`. The dict is shared, so do not change it."""
        return self._cached(index)

    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """Return the data set's score for `answer`, from 0.0 to 1.0."""
        return float(self._dataset.score_answer(answer, entry))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
