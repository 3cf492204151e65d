"""Checks that reward functions fit the rows of the data: rows must have the fields that built-in functions declare, and
every other function is called with the first row of each source.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launch.checks.findings import Findings
from launch.checks.functions import REMEDY, named_functions
from launch.processes.programs import child_environment
from proto.ids import make_task_id
from services.rollout.rewards.score import JUDGE, TIMEOUT, Score
from services.rollout.rewards.trial import tried
from services.rollout.user_code.load import Wanted, is_inline, needed_fields
from shared.data import DataError, Row, Source, SourceLost
from shared.rpc.errors import RpcError
from shared.sample import Sample, messages_of
from shared.stages import TRAIN
from shared.topology import Topology

CALL_LIMIT_S = 30.0
"""Maximum seconds for one call of a function before a run starts, even if `reward.timeout_s` allows more."""
MOST_ROWS = 20_000
"""Maximum number of rows of one source whose fields are checked."""
MOST_MADE_ROWS = 100
"""The same for a source whose rows are computed when they are read."""
_MADE = "reasoning-gym:"
_FIELDS_CHARS = 200


@dataclass(frozen=True)
class _SourceRows:
    """The rows of a source that are used: all, or the first `most`. A task of the source has `samples` samples."""

    key: str
    split: str
    source: Source
    most: int
    samples: int

    def usable(self) -> Iterator[tuple[int, Row]]:
        """Yield each usable row with its index."""
        for index in range(min(len(self.source), self.most)):
            try:
                row = self.source.row(index)
            except SourceLost:
                return
            except DataError:
                continue  # another check reports it
            yield index, row

    def place(self, index: int) -> str:
        return f"{self.key} row {index} ({self.source.place(index)})"


@dataclass(frozen=True)
class _Trial:
    """The samples of one row: that of a good answer, and empty ones up to the number of samples of a task."""

    place: str
    samples: Sequence[Sample]

    @property
    def described(self) -> str:
        fields = ", ".join(sorted(self.samples[0].row))[:_FIELDS_CHARS]
        return f"{self.place}, fields {fields}, and the completion {self.samples[0].completion!r:.60}"


def check_fields(topology: Topology, findings: Findings) -> None:
    """Check that rows have the fields that built-in reward functions need."""
    for wanted in _usable(topology, findings):
        fields = needed_fields(wanted.path, wanted.params)
        for rows in _sources(topology, findings) if fields else ():
            most = MOST_MADE_ROWS if rows.source.name.startswith(_MADE) else MOST_ROWS
            wrong, checked = [], 0
            for index, row in itertools.islice(rows.usable(), most):
                checked += 1
                if why := next(filter(None, (field.problem(row) for field in fields)), ""):
                    wrong.append((index, why))
            if wrong:
                index, why = wrong[0]
                findings.error(
                    f"{wanted.key}: {wanted.path} cannot score {len(wrong)} of the {checked} rows that were read: "
                    f"{rows.place(index)} {why}; correct the rows, or name another function"
                )


def check_calls(topology: Topology, findings: Findings) -> None:
    """Call the reward functions that run in processes of their own with the first row of each source.

    Their results are noted. A function that fails is an error, or a warning if a workflow might make the sample fit. A
    function that asks a server is not called any further.
    """
    functions = [wanted for wanted in _usable(topology, findings) if not is_inline(wanted.path)]
    trials = [trial for rows in _sources(topology, findings) for trial in _trial(rows)]
    if not functions or not trials:
        return
    reward = topology.reward
    try:
        answers = asyncio.run(
            tried(
                functions,
                [trial.samples for trial in trials],
                timeout_s=min(reward.timeout_s, CALL_LIMIT_S),
                memory_bytes=reward.memory,
                environment=child_environment(1),
            )
        )
    except RpcError as error:
        findings.error(f"{functions[0].key}: {error}")
        return
    for wanted, scores in zip(functions, answers, strict=True):
        for trial, score in zip(trials, scores, strict=False):
            _tell(wanted, trial, score, topology, findings)


def _tell(wanted: Wanted, trial: _Trial, score: Score, topology: Topology, findings: Findings) -> None:
    """Report how the call of a function ended."""
    line = f"{wanted.key}: {score.failure}, called with {trial.described}"
    if score.value is not None:
        findings.notes.append(f"reward         {wanted.path} gives {score.value:g} for {trial.described}")
    elif score.kind == JUDGE:
        findings.notes.append(f"reward         {score.failure}; no server is asked before the run starts")
    elif score.kind == TIMEOUT and topology.reward.timeout_s > CALL_LIMIT_S:
        findings.warn(f"{wanted.key}: {wanted.path} was not checked: it takes more than {CALL_LIMIT_S:g} s")
    elif topology.workflow is not None:
        findings.warn(f"{line}, without what the workflow would add")
    else:
        findings.error(f"{line}; {REMEDY[wanted.kind].format(key=wanted.key)}, or add --no-call")


def _usable(topology: Topology, findings: Findings) -> list[Wanted]:
    """Return the reward functions about which there is no error yet."""
    rewards = [wanted for wanted in named_functions(topology) if wanted.kind == "reward"]
    return [wanted for wanted in rewards if not findings.has_error(wanted.key)]


def _sources(topology: Topology, findings: Findings) -> Iterator[_SourceRows]:
    """Yield the rows of every data source that is used and can be read."""
    for key, source in findings.opened.items():
        name = key.removeprefix("data.eval.").removesuffix(".source")
        section = topology.data.eval.get(name)
        if section is not None:
            yield _SourceRows(key, name, source, section.rows or len(source), section.samples)
        elif not topology.run.evaluate and not topology.algorithm.loss.from_rows:  # otherwise nothing is scored
            yield _SourceRows(key, TRAIN, source, len(source), topology.algorithm.group_size)


def _trial(rows: _SourceRows) -> Iterator[_Trial]:
    """Yield the samples of the first usable row, if there is one."""
    for index, row in itertools.islice(rows.usable(), 1):
        answer = row.get("answer")
        good = str(answer) if isinstance(answer, str | int | float) else ""
        completions = [good] + [""] * (rows.samples - 1)
        task_id = make_task_id(rows.split, 0, index)
        samples = [Sample(task_id, row, messages_of(row, text), text, [0], "stop") for text in completions]
        yield _Trial(rows.place(index), samples)
