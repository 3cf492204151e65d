import os
import subprocess
import sys
from pathlib import Path

from tests.bench.called_functions import ROOT, Function, read, recorded
from tests.bench.path_of_a_task import report

CALLS_IN_A_THREAD_AND_A_FORK = """
import os
import threading

from proto.ids import make_task_id, split_task_id

thread = threading.Thread(target=make_task_id, args=("train", 0, 1))
thread.start()
thread.join()
if child := os.fork():
    os.waitpid(child, 0)
else:
    split_task_id("train/0/1")
    os._exit(0)
"""


def run_child(folder: Path, on: bool) -> dict[str, set[Function]]:
    with recorded(folder) as (switch, environment):
        switch.turn(on)
        command = [sys.executable, "-c", CALLS_IN_A_THREAD_AND_A_FORK]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True)
    return read(folder)


def test_calls_of_threads_and_forks_are_recorded(tmp_path: Path) -> None:
    (functions,) = run_child(tmp_path, on=True).values()
    assert Function("proto/ids.py", "make_task_id") in functions
    assert Function("proto/ids.py", "split_task_id") in functions


def test_nothing_is_recorded_while_the_switch_is_off(tmp_path: Path) -> None:
    assert run_child(tmp_path, on=False) == {}


def test_the_last_line_leaves_out_programs_that_launch_and_observe() -> None:
    programs = {
        "services.rollout": {Function("shared/lease.py", "a"), Function("shared/lease.py", "b")},
        "services.monitor": {Function("shared/view/rows.py", "c")},
        "launch.cluster": {Function("launch/cluster.py", "main")},
    }
    lines = report(programs, listed=True)
    assert lines[0] == "   2  shared/lease.py"
    assert lines[-2].endswith("3 files, 4 functions")
    assert lines[-1] == "1 files, 2 functions"
