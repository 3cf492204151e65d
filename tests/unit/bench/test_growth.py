"""Tests which series of samples count as growth: noise, single outliers and steps do not, a slow leak does."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from tests.bench.growth import MB, FileBound, Sample, Usage, growths, lasting_slope, name_of, slope, too_large, usages

MINUTES, EVERY_S = 20, 2
POINTS = MINUTES * 60 // EVERY_S
NOISE_MB = 0.5
"""More than the largest standard deviation of a process's memory between two samples of a recorded run."""
Series = list[tuple[float, float]]


def series(seed: int, mean: Callable[[float], float] = lambda _: 0.0) -> Series:
    """Return a series of samples of `mean`, a function of the time in minutes, with noise."""
    chance = random.Random(seed)
    minutes = [at * EVERY_S / 60 for at in range(POINTS)]
    return [(minute, 100 + mean(minute) + chance.gauss(0, NOISE_MB)) for minute in minutes]


def test_the_slope_of_a_line_is_found_whatever_single_samples_are() -> None:
    points = [(float(at), 3.0 * at) for at in range(40)]
    points[7], points[30] = (7.0, 1e9), (30.0, -1e9)
    assert slope(points) == pytest.approx(3.0)
    assert slope([(1.0, 5.0)]) == 0.0


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 0.0,
    "a step of 40 MB": lambda minute: 40.0 * (minute > 7),
    "a step in the middle": lambda minute: 40.0 * (minute > 10),
    "two steps in one part": lambda minute: 10.0 * (minute > 8) + 10.0 * (minute > 11),
    "a cache that fills in three minutes": lambda minute: 30.0 * min(1.0, max(0.0, (minute - 4) / 3)),
    "a sawtooth": lambda minute: 8.0 * (minute % 0.7),
    "a level that falls": lambda minute: -0.5 * minute,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_noise_and_single_steps_are_not_growth(shape: str) -> None:
    assert max(lasting_slope(series(seed, SHAPES[shape])) for seed in range(8)) < 0.1


LEAKS: dict[str, Callable[[float], float]] = {
    "a line": lambda minute: 0.2 * minute,
    "a step as well": lambda minute: 0.2 * minute - 20.0 * (minute > 9),
    "in pieces": lambda minute: 0.2 * math.floor(minute),
    "on a sawtooth": lambda minute: 0.2 * minute + 2.0 * (minute % 0.7),
}


@pytest.mark.parametrize("shape", LEAKS)
def test_a_leak_of_a_fifth_of_a_megabyte_a_minute_is_growth(shape: str) -> None:
    assert min(lasting_slope(series(seed, LEAKS[shape])) for seed in range(8)) > 0.1


def samples(of: Callable[[int], dict[str, Usage]], count: int = 300) -> list[Sample]:
    return [Sample(at / 30, at, of(at)) for at in range(count)]


def test_each_quantity_of_each_lasting_process_is_judged() -> None:
    def usage(at: int) -> dict[str, Usage]:
        found = {"leaks": Usage(100_000_000 + 10_000 * at, 20, 3), "opens": Usage(5_000_000, 20 + at // 20, 4)}
        return found | ({"short": Usage(at * 1_000_000, at, at)} if at < 100 else {})

    found = {(each.process, each.quantity.name): each for each in growths(samples(usage))}
    assert {process for process, _ in found} == {"leaks", "opens"}
    grown = [str(each) for each in found.values() if each.is_too_fast]
    assert grown == [
        "leaks: memory, MB: grows by 0.3 a minute, from 100.14 to 102.84; the limit is 0.1",
        "opens: descriptors: grows by 1.41 a minute, from 20 to 34; the limit is 0",
    ]


def test_a_replaced_process_is_judged_by_its_name() -> None:
    found = growths(samples(lambda at: {"one": Usage(1_000_000, 3, 1)} if at != 150 else {}))
    assert [each.per_min for each in found] == [0, 0, 0]


def test_too_few_samples_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="14 samples are too few to judge growth: take 15 or more"):
        growths(samples(lambda _: {}, 14))


BOUNDS = (
    FileBound("metrics*.jsonl", 1000, per_step=10),
    FileBound("samples/", 5000),
    FileBound("logs/*", 300),
)


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        ({"metrics.jsonl": 2000, "samples/a": 2500, "samples/b/c": 2500, "logs/x": 300}, []),
        ({"metrics.jsonl": 2001}, ["metrics.jsonl: 2,001 bytes after 100 steps; the bound is 2,000"]),
        ({"samples/a": 2500, "samples/b/c": 2501}, ["samples/: 5,001 bytes after 100 steps; the bound is 5,000"]),
        ({"logs/x": 200, "logs/y": 301}, ["logs/y: 301 bytes after 100 steps; the bound is 300"]),
        ({"new": 1}, ["new: 1 bytes; the file has no bound"]),
    ],
)
def test_each_file_and_folder_is_compared_with_its_bound(files: dict[str, int], lines: Sequence[str]) -> None:
    assert list(too_large(Sample(1.0, 100, {}, files), BOUNDS)) == lines


def test_a_sample_survives_its_line() -> None:
    sample = Sample(1.5, 3, {"a": Usage(1, 2, 3)}, {"b": 4})
    assert Sample.from_json(sample.to_json()) == sample


def test_processes_are_sampled_with_their_memory_descriptors_and_threads() -> None:
    size = 30_000_000
    code = f"data = bytearray({size}); file = open('/dev/null'); print(len(data), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline()
        found = usages(os.getpid())
        mine = [each for name, each in found.items() if name.startswith("python")]
        assert any(size < each.memory_bytes < size + 30 * MB and each.threads == 1 for each in mine)
        assert all(each.descriptors >= 3 for each in mine)
    finally:
        child.kill()
        child.communicate()


def test_processes_are_named_by_their_service_script_or_program() -> None:
    assert name_of(["python", "-m", "services.rollout", "--run", "x", "--instance", "0"]) == "services.rollout/0"
    assert name_of(["python", "-m", "launch.cluster", "t.yaml"]) == "launch.cluster"
    assert name_of(["python", "-I", "/a/guard.py", "x"]) == "guard.py"
    assert name_of(["/usr/bin/wandb-core"]) == "wandb-core"
