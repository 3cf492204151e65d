"""Saves the page of a run as one file, which needs neither a server nor the network.

The file holds the scripts of the live page and the data that they would request: all curves, warnings, the last states
of the processes and their last work and waits, the newest log lines, and a few samples of the newest step and of each
evaluation. One or more other runs can be compared with the run.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from services.web import parts
from services.web.samples import body
from shared.runfiles.files import RunFiles
from shared.samples.reader import read, splits, steps
from shared.samples.record import FOLDER, SampleRecord, file_of, rank, shortened
from shared.stages import TRAIN
from shared.view import look
from shared.view.curves import PANELS, Panel, Point

LIMIT_BYTES = 2_000_000
"""Maximum size of the file."""
POINTS = 30_000
"""Maximum number of points of all curves together, except that both ends and a peak of each curve are kept."""
LOG_LINES, LOG_CHARS = 500, 600
TEXT_CHARS, TOKENS = 4000, 500
"""Maximum length of a text and maximum number of tokens of a sample."""
WINDOWS_S = (30, 60, 300)
"""The windows of the timeline that the page offers."""
SAMPLES_BYTES = 16 << 20
"""Maximum size, in bytes, of a sample file that is read."""
BEST, WORST, LONGEST, EVALUATED = 4, 4, 2, 4
"""Numbers of samples from the newest step with samples, and from each evaluation set."""
POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; base-uri 'none'"
_LINKS = re.compile(r'<link rel="(?:icon|modulepreload)"[^>]*>\n')
_STYLES = re.compile(r'<link rel="stylesheet" href="(.*?)">')
_SCRIPTS = '<script src="uPlot.js" defer></script>\n<script src="page.js" type="module"></script>'
_IMPORT = re.compile(r'from "\./(\w+)\.js"')


def page(folders: Sequence[Path], panels: Sequence[Panel] = PANELS) -> str:
    """Return the page of the first run, which compares it with the other runs. Raises OSError.

    If the page is larger than `LIMIT_BYTES`, texts are cut and curves are thinned more than usual.
    """
    runs = {_name(folder, folders): RunFiles(folder) for folder in folders}
    for files in runs.values():
        while files.read():
            pass
    first = next(iter(runs.values()))
    first.read_logs()
    first.read_last()
    records = {split: _chosen(first.path, split) for split in splits(first.path)}
    template, share = _template(), 1.0
    while True:
        text = template.replace("{data}", _as_json(_data(runs, records, panels, share)), 1)
        if len(text.encode()) <= LIMIT_BYTES or share < 0.001:
            return text
        share /= 2


def thinned(points: Sequence[Point], pieces: int) -> list[Point]:
    """Return both ends of a curve, and the lowest and the highest point of each of `pieces` pieces: peaks stay."""
    if len(points) <= 2 * pieces:
        return list(points)
    kept = {points[0]: None}
    for index in range(pieces):
        piece = points[index * len(points) // pieces : (index + 1) * len(points) // pieces]
        kept |= dict.fromkeys(sorted({min(piece, key=_value), max(piece, key=_value)}))
    return list(kept | {points[-1]: None})


def _value(point: Point) -> float:
    return point[1]


def _name(folder: Path, folders: Sequence[Path]) -> str:
    """Return the name of a run. Runs whose folders have the same name are named by their paths."""
    names = [run.absolute().name for run in folders]
    return folder.absolute().name if names.count(folder.absolute().name) == 1 else str(folder)


def _data(
    runs: dict[str, RunFiles],
    records: dict[str, tuple[int, int, list[SampleRecord]]],
    panels: Sequence[Panel],
    share: float,
) -> dict[str, Any]:
    """Return the data of the page, each part of which has at most `share` of its maximum size."""
    run, *others = runs
    files = runs[run]
    chars, tokens = int(share * TEXT_CHARS), int(share * TOKENS)
    notices, view = parts.notices(files), files.view
    newest = files.view.warnings()[-max(1, int(share * len(notices["warnings"]))) :]
    return {
        "look": look.document(),
        "services": view.services(view.newest_at),
        "pipeline": view.pipeline(),
        "timeline": {
            seconds: parts.timeline(files, view.timeline_end or 0.0, seconds, share=share) for seconds in WINDOWS_S
        },
        "head": {**parts.head(files, others, panels=panels), "run": run, "compared": others},
        "notices": {
            **notices,
            "warnings": newest,
            "left_out": notices["left_out"] + len(notices["warnings"]) - len(newest),
        },
        "curves": {name: _curves(item, int(share * POINTS / len(runs))) for name, item in runs.items()},
        "samples": {
            split: {
                "step": step,
                "total": total,
                "records": [body(item, max_chars=chars, max_tokens=tokens) for item in chosen],
            }
            for split, (step, total, chosen) in records.items()
        },
        "log": [
            {**msgspec.to_builtins(line), "text": shortened(line.text, LOG_CHARS)}
            for line in files.view.log.lines()[-max(1, int(share * LOG_LINES)) :]
        ],
    }


def _curves(files: RunFiles, points: int) -> dict[str, Any]:
    curves = files.points(files.names(), -1.0)
    pieces = max(1, points // (2 * max(1, len(curves))))
    return {"last": files.last_step, "points": {name: thinned(curve, pieces) for name, curve in curves.items()}}


def _chosen(run: Path, split: str) -> tuple[int, int, list[SampleRecord]]:
    """Return the newest step with samples, their number, and those with the highest and lowest rewards and the longest.

    Of an evaluation, return those with the lowest rewards.
    """
    step = next((number for number in reversed(steps(run, split)) if _is_small(run, split, number)), -1)
    records = [record for record in read(run, step=step, split=split) if record.sample >= 0]
    by_reward = sorted(records, key=rank)
    if split != TRAIN:
        return step, len(records), by_reward[:EVALUATED]
    by_length = sorted(records, key=lambda record: -record.length)
    chosen = [*by_reward[::-1][:BEST], *by_reward[:WORST], *by_length[:LONGEST]]
    return step, len(records), list({(record.task, record.sample): record for record in chosen}.values())


def _is_small(run: Path, split: str, step: int) -> bool:
    try:
        return (run / FOLDER / file_of(split, step)).stat().st_size <= SAMPLES_BYTES
    except OSError:
        return False


def _as_json(data: dict[str, Any]) -> str:
    """Return data as JSON that cannot end the script element that contains it."""
    return json.dumps(msgspec.to_builtins(data), separators=(",", ":")).replace("<", "\\u003c")


def _template() -> str:
    """Return the page with its styles and scripts inside, and `{data}` in place of the data.

    A module without an address cannot import another one by its file name, so that each has a name in an import map.
    """
    static = resources.files("services.web").joinpath("static")
    texts = {file.name: file.read_text("utf-8") for file in static.iterdir()}
    modules = {}
    for name, text in texts.items():
        if name.endswith(".js") and name not in ("uPlot.js", "api.js"):
            code = base64.b64encode(_IMPORT.sub(r'from "rlbus/\1"', text).encode()).decode()
            modules[f"rlbus/{name[:-3]}"] = f"data:text/javascript;charset=utf-8;base64,{code}"
    modules["rlbus/api"] = modules.pop("rlbus/saved")
    index = _STYLES.sub(lambda link: f"<style>{texts[link[1]]}</style>", _LINKS.sub("", texts["index.html"]))
    head, _, rest = index.partition(_SCRIPTS)
    return (
        head.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">', 1)
        + f'<script type="importmap">{json.dumps({"imports": modules})}</script>\n'
        + f"<script>{texts['uPlot.js']}</script>\n"
        + '<script id="saved" type="application/json">{data}</script>\n'
        + '<script type="module">import "rlbus/page";</script>'
        + rest
    )
