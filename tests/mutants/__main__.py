"""Applies each listed defect to a copy of the tree and runs the test that must find it.

`python -m tests.mutants [WORD...]` applies only defects whose name or file contains one of the words. The exit status
is 1 when a mutant survives, does not apply, or has a test that fails without the mutation. JOBS copies of the working
tree are used concurrently; the tree itself is never changed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.catalogue import MUTATIONS
from tests.mutants.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
JOBS = 2
"""Number of tests that run at the same time."""
LIMIT_S = 300
"""Maximum seconds for one test; a mutant that makes it hang is killed."""
PASSED, FAILED = 0, 1
"""Exit statuses of pytest. Any other status means that the tests did not run."""
VERDICTS = {PASSED: "SURVIVED", FAILED: "killed"}

_versions = itertools.count(1_000_000_000)


def copy_tree(target: Path) -> None:
    """Copy the files of the working tree that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def write(path: Path, text: str) -> None:
    """Write a source file with a unique modification time, so that cached bytecode from another version is not used."""
    path.write_text(text)
    now = next(_versions)
    os.utime(path, (now, now))


def run(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Return the exit status and the output of pytest for these tests in a tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rN", "-p", "no:cacheprovider"]
    command += [f"--timeout={LIMIT_S}", "--hypothesis-profile=mutants"]
    # The profile gives the same examples in each run. With CI set, a test that cannot run here fails instead of being
    # skipped, so it also fails without the mutation.
    done = subprocess.run(
        [*command, *tests],
        cwd=tree,
        env={**os.environ, "CI": "true"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def is_there(tree: Path, mutation: Mutation) -> bool:
    """Return whether the test file of the mutation exists."""
    return (tree / mutation.test.partition("::")[0]).exists()


def judge(tree: Path, mutation: Mutation) -> tuple[bool, str]:
    """Return whether the mutant is killed, and the line to print for it. The tree is restored afterwards."""
    path = tree / mutation.file
    before = path.read_text()
    if not is_there(tree, mutation):
        return False, f"NO SUCH TEST  {mutation.test}: {mutation.name}"
    try:
        after = mutation.apply(before)
    except ValueError as error:
        return False, f"DOES NOT APPLY  {error}"
    write(path, after)
    began = time.monotonic()
    try:
        status, output = run(tree, [mutation.test])
    finally:
        write(path, before)
    seconds = time.monotonic() - began
    verdict = VERDICTS.get(status, "NOT RUN")
    line = f"{verdict:9} {seconds:6.1f} s  {mutation.name}"
    if status == FAILED:
        return True, line
    return False, f"{line}  ({mutation.test})" + (f"\n{output[-2000:]}" if status != PASSED else "")


def main(words: Sequence[str]) -> int:
    chosen = [each for each in MUTATIONS if not words or any(word in f"{each.name} {each.file}" for word in words)]
    if not chosen:
        print(f"no mutation has a name or file that contains {' or '.join(words)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="rlbus-mutants-") as folder, ThreadPoolExecutor(JOBS) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(JOBS):
            copy_tree(Path(folder, str(number)))
            trees.put(Path(folder, str(number)))
        tree = trees.get()
        status, output = run(tree, sorted({each.test for each in chosen if is_there(tree, each)}))
        trees.put(tree)
        if status != PASSED:
            print(f"the tests do not pass without a mutation:\n{output[-4000:]}")
            return 1

        def judge_in_a_tree(mutation: Mutation) -> tuple[bool, str]:
            tree = trees.get()
            try:
                return judge(tree, mutation)
            finally:
                trees.put(tree)

        survived = 0
        for killed, line in pool.map(judge_in_a_tree, chosen):
            survived += not killed
            print(line, flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} mutants killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
