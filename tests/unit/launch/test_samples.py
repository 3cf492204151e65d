"""`ctl samples` shows the requested samples and escapes hostile text."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console
from typer.testing import CliRunner

from launch import ctl
from launch.viewers.samples import STYLES, Color, choose, completion, show
from services.recorder.files import SampleFiles
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.samples.reader import Order, SampleSelection
from shared.samples.record import SampleRecord, SampleState, plain, shortened

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil\u2066\r\x00\ud800[bold]markup[/bold]"


def record(step: int, index: int, number: int, reward: float, length: int) -> SampleRecord:
    return SampleRecord(
        task=f"train/0/{index}",
        sample=number,
        samples=2,
        step=step,
        prompt="12 + 7 =",
        completion="19",
        answer="19",
        pieces=["1", "9", "<eos>"],
        token_ids=[4, 12, 1],
        logprobs=[-0.01, -1.0, -9.0],
        train_logprobs=[-0.01, -1.1, -6.0],
        reward=reward,
        rewards={"exact": reward},
        advantage=reward - 0.5,
        length=length,
        finish_reason="stop",
        versions=[step - 1],
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    files = SampleFiles(tmp_path / "samples", 1 << 30)
    for step in (1, 2):
        files.append([record(step, step, number, reward=0.5 * number, length=9 - number) for number in range(2)])
        files.append([record(step, step + 7, number, reward=1 - number, length=number) for number in range(2)])
    files.append(
        [
            SampleRecord(
                task="held/2/0", split="eval/held", step=2, state=SampleState.SCORED, completion=HOSTILE[:20] * 1000
            )
        ]
    )
    return tmp_path


def drawn(monkeypatch: pytest.MonkeyPatch, records: list[SampleRecord], color: Color, *, terminal: bool = True) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system="standard" if terminal else None)
    monkeypatch.setattr("rich.console.Console", lambda **options: console)
    show(SampleSelection(records, len(records)), color, full=False)
    return out.getvalue()


def picked(run: Path, order: Order | None = None, count: int = 5, **options: object) -> list[tuple[str, int]]:
    values: dict[str, object] = {"step": None, "task": None, "split": "train", **options}
    found = choose(run, order=order, count=count, **values)  # type: ignore[arg-type]
    return [(each.task, each.sample) for each in found.records]


def test_the_newest_step_is_shown_in_the_requested_order(run: Path) -> None:
    assert picked(run, count=3) == [("train/0/2", 0), ("train/0/2", 1), ("train/0/9", 0)]
    assert picked(run, Order.BEST, 2) == [("train/0/9", 0), ("train/0/2", 1)]
    assert picked(run, Order.WORST, 2) == [("train/0/2", 0), ("train/0/9", 1)]
    assert picked(run, Order.LONGEST, 1, step=1) == [("train/0/1", 0)]
    assert picked(run, task="train/0/8") == [("train/0/8", 0), ("train/0/8", 1)]
    assert picked(run, split="eval/held") == [("held/2/0", 0)]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"step": 9}, "no samples of step 9 in train; available: steps 1-2"),
        ({"task": "train/0/77"}, "no samples of task train/0/77 in train; available: steps 1-2"),
        ({"split": "held"}, "no samples yet in held; available: train, eval/held"),
        ({"split": "../.."}, "no samples yet in ../..; available: train, eval/held"),
    ],
)
def test_a_selection_without_samples_is_a_one_line_error_that_lists_the_available_ones(
    run: Path, options: dict[str, object], line: str
) -> None:
    with pytest.raises(RpcError) as error:
        picked(run, **options)
    assert str(error.value).endswith(line)


def test_tokens_are_coloured_by_log_prob_or_by_mismatch() -> None:
    shown = record(1, 1, 0, 1.0, 3)
    styles = {color: [str(span.style) for span in completion(shown, color, 100).spans] for color in Color}
    assert styles[Color.LOGPROB] == [STYLES[1], STYLES[4]]
    assert styles[Color.MISMATCH] == [STYLES[2], STYLES[4]]
    assert styles[Color.NONE] == []
    tool = replace(shown, sampled=[1, 0, 1])
    assert [str(span.style) for span in completion(tool, Color.LOGPROB, 100).spans] == ["dim italic", STYLES[4]]


def test_all_facts_about_a_sample_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(monkeypatch, [record(4, 1, 0, 1.0, 3)], Color.NONE, terminal=False)
    for fact in ("train/0/1 sample 0 · step 4 · trained", "reward 1", "exact 1", "advantage +0.5", "3 tokens", "stop"):
        assert fact in text
    assert "12 + 7 =" in text
    assert "answer: 19" in text


def test_a_failed_sample_shows_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = replace(record(4, 1, 1, 1.0, 3), reward=None, rewards={}, failure="my:fn: raised ValueError: no", pieces=[])
    fine = replace(record(4, 1, 0, 0.0, 3), info={"found": "19"})
    text = drawn(monkeypatch, [lost], Color.LOGPROB, terminal=False)
    assert "failed: my:fn: raised ValueError: no" in text
    assert "reward" not in text
    assert "19" in text
    assert "found 19" in drawn(monkeypatch, [fine], Color.NONE, terminal=False)


def test_hostile_text_is_escaped_before_it_reaches_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = SampleRecord(
        task=HOSTILE,
        step=1,
        reason=HOSTILE,
        prompt=[{"role": HOSTILE, "content": HOSTILE}],
        completion=HOSTILE * 200_000,
        pieces=[HOSTILE] * 3,
        logprobs=[0.0] * 3,
        answer=HOSTILE,
        rewards={HOSTILE: 1.0},
        info={HOSTILE: HOSTILE},
        reward=None,
        failure=HOSTILE,
        finish_reason=HOSTILE,
    )
    for color in (Color.NONE, Color.LOGPROB):
        text = drawn(monkeypatch, [hostile], color, terminal=False)
        assert len(text) < 60_000
        assert not set(text) & set("\x1b\x07\x9b\u202e\u2066\r\x00\ud800")
        assert "\\x1b[2J" in text
        assert "\\u202eevil" in text
        assert "[bold]markup[/bold]" in text


def test_plain_text_keeps_accents_emoji_and_line_breaks() -> None:
    text = "Zeile\n\tñandú 日本語 🎉 é ∑"
    assert plain(text) == text
    assert shortened("a" * 10, 4) == "aaaa… (6 more characters)"


def test_the_number_of_samples_that_are_left_out_is_shown(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = RunDir(run, run, run)
    monkeypatch.setattr(ctl, "find", lambda *_: where)
    for option, expected in (("3", "the first 3 of 4 samples"), ("4", "")):
        done = CliRunner().invoke(ctl.app, ["samples", "--best", option])
        assert done.output.count("tokens · stop") == int(option)
        assert done.output.splitlines()[-1].startswith(expected or "answer:")


def test_json_output_is_one_document(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = RunDir(run, run, run)
    monkeypatch.setattr(ctl, "find", lambda *_: where)
    done = CliRunner().invoke(ctl.app, ["samples", "--best", "1", "--json"])
    assert done.exit_code == 0
    document = json.loads(done.output)
    assert (document["split"], document["total"]) == ("train", 4)
    assert [(each["task"], each["reward"], each["advantage"]) for each in document["samples"]] == [
        ("train/0/9", 1.0, 0.5)
    ]
    hostile = CliRunner().invoke(ctl.app, ["samples", "--split", "eval/held", "--json"])
    assert hostile.output.isascii()
    assert json.loads(hostile.output)["samples"][0]["completion"].startswith("\x1b[2J")
    both = CliRunner().invoke(ctl.app, ["samples", "--best", "1", "--worst", "1"])
    assert both.exit_code == 2
