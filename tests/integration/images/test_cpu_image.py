"""Tests that the CPU image runs the quickstart as its own user, alone and as the Compose file describes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.integration.images.built_image import Container, Image, built_image, container
from tests.integration.star import Host, star
from tests.integration.tiny.harness import ROOT, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

USER = 1000
LIMIT_S = 300.0
STEPS = 10
LINE_BYTES_PER_S = 1 << 30


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with built_image(tmp_path_factory.mktemp("image")) as built:
        yield built


def test_the_image_runs_the_quickstart(image: Image, tmp_path: Path) -> None:
    runs, given = tmp_path / "runs", image.configuration()
    runs.mkdir()
    os.chown(runs, USER, USER)
    sets = [f"--set=run.steps={STEPS}"]
    with container(image, "alone", {"/app/runs": runs}, "2g") as alone:
        run = alone.run(*given["Entrypoint"], *given["Cmd"], *sets)
        try:
            output, _ = run.communicate(timeout=LIMIT_S)
        finally:
            run.kill()
            run.wait()
    assert run.returncode == 0, output
    [path] = runs.iterdir()
    assert len((path / "metrics.jsonl").read_text().splitlines()) == STEPS + 1
    assert list((path / "export").glob("*.safetensors"))
    assert path.stat().st_uid == USER


def volume(folder: Path, given: dict[str, Any] | None, stack: contextlib.ExitStack) -> Path:
    """Create a named volume of the Compose file."""
    folder.mkdir()
    if given is None:
        os.chown(folder, USER, USER)  # as in the image, whose contents a new volume gets
    else:
        options = given["driver_opts"]
        mount = ("mount", "-t", options["type"], "-o", options["o"], options["device"], str(folder))
        subprocess.run(mount, check=True, timeout=20)
        stack.callback(subprocess.run, ["umount", str(folder)], check=True, timeout=20)
    return folder


def of_service(
    image: Image, name: str, service: dict[str, Any], host: Host, volumes: dict[str, Path], folder: Path
) -> contextlib.AbstractContextManager[Container]:
    """Return the container of a service, on `host`. `folder` is for its own files."""
    mounts = {path: volumes[of] for of, _, path in (each.partition(":") for each in service["volumes"])}
    for each in service.get("tmpfs", ()):
        path, _, options = each.partition(":")
        assert options == f"uid={USER}"
        mounts[path] = folder / f"{name}-tmpfs"
        mounts[path].mkdir()
        os.chown(mounts[path], USER, USER)
    return container(image, name, mounts, service["shm_size"].removesuffix("b"), host.command())


@contextlib.contextmanager
def known_names(host: Host, names: str) -> Iterator[None]:
    """Use `names` as /etc/hosts on a host. Its containers inherit the file."""
    folder = Path("/etc/netns") / host.namespace  # `ip netns exec` mounts the files in this folder over those in /etc
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(names)
    try:
        yield
    finally:
        shutil.rmtree(folder)


def trains(runs: Path) -> bool:
    """Return whether a run has committed a step."""
    return any(each.stat().st_size for each in runs.glob("*/metrics.jsonl"))


def test_the_services_of_the_compose_file_train_together_and_pass_their_health_checks(
    image: Image, tmp_path: Path
) -> None:
    given, composed = image.configuration(), YAML(typ="safe").load((ROOT / "docker" / "compose.yaml").read_text())
    services = composed["services"]
    with star(len(services), LINE_BYTES_PER_S) as machines, contextlib.ExitStack() as stack:
        hosts = dict(zip(services, machines, strict=True))
        names = "".join(f"{host.address} {name}\n" for name, host in hosts.items())
        for host in machines:
            stack.enter_context(known_names(host, f"127.0.0.1 localhost\n{names}"))
        volumes = {name: volume(tmp_path / name, each, stack) for name, each in composed["volumes"].items()}
        made: dict[str, Container] = {}
        running: dict[str, subprocess.Popen[str]] = {}
        for name, service in services.items():
            made[name] = stack.enter_context(of_service(image, name, service, hosts[name], volumes, tmp_path))
            more = ["--set=run.steps=100000"] if name == "home" else []
            words = [*service.get("entrypoint", given["Entrypoint"]), *service["command"], *more]
            running[name] = made[name].run(*words)
            stack.callback(running[name].wait)
            stack.callback(running[name].kill)
        try:
            wait_for("the first step", lambda: trains(volumes["runs"]) or running["home"].poll() is not None, LIMIT_S)
        except AssertionError:
            for each in running.values():
                each.kill()
            pytest.fail("\n".join(each.communicate()[0][-2500:] for each in running.values()))
        assert running["home"].poll() is None, running["home"].communicate()[0]
        kind, *check = given["Healthcheck"]["Test"]
        assert kind == "CMD"
        for name, each in made.items():
            wait_for(f"a healthy {name}", lambda each=each: each.run(*check).wait(LIMIT_S) == 0, LIMIT_S)
        stop = made["home"].run("python", "-m", "launch.ctl", "stop")
        output, _ = stop.communicate(timeout=LIMIT_S)
        assert stop.returncode == 0, output
        output, _ = running["home"].communicate(timeout=LIMIT_S)
        assert "stopped by the operator" in output
        assert [running[name].wait(LIMIT_S) for name in services if name != "home"] == [0, 0]
        assert list(volumes["runs"].glob("*/checkpoints/step-*"))
        assert not list(volumes["access"].iterdir())
