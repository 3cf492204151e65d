"""Builds an image from `docker/Dockerfile` without a daemon or a registry, and runs containers from it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny.harness import ROOT

BASE = "localhost/base"
IMAGE = "localhost/rlbus:cpu"
SUITE = "bookworm"
"""Debian release that has the image's Python version."""
BUILD_S = 1500.0
_OWN = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_IN_BASE = ('ln -s python3 "$1/usr/bin/python"', 'rm "$1"/usr/lib/python3*/EXTERNALLY-MANAGED')


@dataclass(frozen=True)
class Image:
    """The built image in its own storage."""

    storage: Path

    def buildah(self, *words: str) -> list[str]:
        """Return the command line of a buildah command."""
        root, runroot = str(self.storage / "root"), str(self.storage / "runroot")
        return ["buildah", "--root", root, "--runroot", runroot, "--storage-driver", "vfs", *words]

    def call(self, *words: str, limit_s: float = 120.0) -> str:
        done = subprocess.run(self.buildah(*words), capture_output=True, text=True, timeout=limit_s, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {(done.stdout + done.stderr)[-3000:]}"
        return done.stdout

    def configuration(self) -> dict[str, Any]:
        """Return the image's configuration, with fields such as `Entrypoint`, `Cmd` and `User`."""
        found: dict[str, Any] = json.loads(self.call("inspect", "--type", "image", IMAGE))["Docker"]["config"]
        return found


@dataclass(frozen=True)
class Container:
    """A container of the image. Its processes have their own shared memory and process ids."""

    image: Image
    name: str
    volumes: Mapping[str, Path]
    """Folders on this machine by their paths in the container."""
    shm_size: str
    network: Sequence[str] = ()
    """Command that runs the command after it in the container's network. By default, this is the machine's network."""

    def run(self, *words: str) -> subprocess.Popen[str]:
        """Start a command. When the returned process exits, all processes of the command are killed."""
        volumes = [word for path, folder in self.volumes.items() for word in ("--volume", f"{folder}:{path}")]
        script = f'mount -t tmpfs -o size={self.shm_size} none /dev/shm; exec "$@"'
        inside = self.image.buildah("run", "--isolation", "chroot", *volumes, self.name, "--", *words)
        return subprocess.Popen(
            [*self.network, "unshare", *_OWN, "sh", "-c", script, "container", *inside],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@contextlib.contextmanager
def built_image(folder: Path) -> Iterator[Image]:
    """Build the image for CPUs in `folder`, on a base image made from Debian packages. This takes minutes."""
    for tool in ("buildah", "mmdebstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (apt package {tool})")
    if os.geteuid():
        pytest.skip("containers need root here")
    image, archive = Image(folder), folder / "base.tar"
    try:
        hooks = [f"--customize-hook={hook}" for hook in _IN_BASE]
        packages = "--include=python3,python3-pip,ca-certificates"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", packages, *hooks, SUITE, str(archive)]
        subprocess.run(command, check=True, timeout=BUILD_S)
        image.call("from", "--name", "base", "scratch")
        image.call("add", "base", str(archive), "/", limit_s=BUILD_S)
        image.call("commit", "--rm", "base", BASE, limit_s=BUILD_S)
        archive.unlink()
        image.call(
            *("bud", "--pull-never", "--isolation", "chroot", "--network", "host", "--format", "docker"),
            *("--file", str(ROOT / "docker" / "Dockerfile"), "--build-arg", f"BASE={BASE}", "--tag", IMAGE),
            *("--ignorefile", str(ROOT / "docker" / "Dockerfile.dockerignore"), *_pip_settings(folder), str(ROOT)),
            limit_s=BUILD_S,
        )
        yield image
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def container(
    image: Image, name: str, volumes: Mapping[str, Path], shm_size: str, network: Sequence[str] = ()
) -> Iterator[Container]:
    image.call("from", "--name", name, IMAGE, limit_s=BUILD_S)
    try:
        yield Container(image, name, volumes, shm_size, network)
    finally:
        image.call("rm", name)


def _pip_settings(folder: Path) -> list[str]:
    """Return options that let pip find packages during the build as it does on this machine."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip("'\"")
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    words = {word.removeprefix("file://") for value in settings.values() for word in value.split()}
    # An index folder refers to files beside it.
    paths = {
        path if path.is_file() else path.parent for path in map(Path, words) if path.is_absolute() and path.exists()
    }
    return ["--volume", f"{file}:/etc/pip.conf:ro", *(f"--volume={path}:{path}:ro" for path in sorted(paths))]
