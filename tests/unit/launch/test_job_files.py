"""Tests the files with which Slurm, Kubernetes and Docker start a run: their schemas, and the commands in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ruamel.yaml import YAML

from tests.integration.tiny.harness import free_ports
from tests.unit.launch.kubernetes import Container, JobSet, PodSpec, RayCluster

ROOT = Path(__file__).resolve().parents[3]
JOBS = ROOT / "launch" / "jobs"
LIMIT_S = 60.0


def document(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


def jobset() -> JobSet:
    return msgspec.convert(document(JOBS / "jobset.yaml"), JobSet)


def cluster() -> RayCluster:
    return msgspec.convert(document(JOBS / "kuberay.yaml"), RayCluster)


def pods() -> dict[str, PodSpec]:
    found = {job.name: job.template.spec.template.spec for job in jobset().spec.replicated_jobs}
    spec = cluster().spec
    found["head"] = spec.head_group_spec.template.spec
    return found | {group.group_name: group.template.spec for group in spec.worker_group_specs}


def call(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    folder = str(Path(sys.executable).parent)
    return subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def ports() -> list[str]:
    """Return options for `launch.cluster` with ports that no other run uses."""
    return [f"--set={key}={port}" for key, port in free_ports().items()]


def assert_rollouts_on_two_hosts(done: subprocess.CompletedProcess[str]) -> None:
    """Check the plan that `launch.cluster --dry-run` shows."""
    assert done.returncode == 0, done.stderr
    assert re.search(r"rollout/0 .* host-0 ", done.stdout)
    assert re.search(r"rollout/1 .* host-1 ", done.stdout)


@pytest.mark.parametrize("name", ["slurm-srun.sbatch", "slurm-ray.sbatch"])
def test_shellcheck_reports_no_problems_in_job_scripts(name: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt package shellcheck)")
    done = call("shellcheck", str(JOBS / name))
    assert done.returncode == 0, done.stdout


def test_mounts_of_pods_have_volumes_and_shared_memory_is_limited() -> None:
    for name, pod in pods().items():
        [container] = pod.containers
        volumes = {volume.name: volume for volume in pod.volumes}
        mounts = {mount.mount_path: volumes[mount.name] for mount in container.volume_mounts}
        shared = mounts["/dev/shm"].empty_dir
        assert shared is not None, name
        assert shared.medium == "Memory", name
        assert shared.size_limit is not None, name
        assert {volume.name for volume in mounts.values()} == volumes.keys(), name


def test_the_ray_cluster_has_the_locked_version() -> None:
    locked = re.search(r"^ray==(.*)$", (ROOT / "requirements" / "ray.txt").read_text(), re.MULTILINE)
    assert locked is not None
    assert cluster().spec.ray_version == locked[1]


def test_every_worker_of_the_cluster_opens_the_port_for_its_probes() -> None:
    for group in cluster().spec.worker_group_specs:
        [container] = group.template.spec.containers
        probe = container.liveness_probe.tcp_socket
        assert probe is not None
        assert group.ray_start_params["node-manager-port"] == str(probe.port)


def home_and_agent() -> tuple[Container, Container]:
    home, hosts = jobset().spec.replicated_jobs
    assert hosts.template.spec.completion_mode == "Indexed"
    assert hosts.template.spec.completions == 2
    [first] = home.template.spec.template.spec.containers
    [second] = hosts.template.spec.template.spec.containers
    return first, second


@pytest.mark.slow
def test_the_kubernetes_jobs_start_the_run_that_they_describe(tmp_path: Path) -> None:
    home, _ = home_and_agent()
    assert home.command == ["tini", "--", "bash", "-c"]
    [script] = home.args
    script = " ".join([script.rstrip(), *ports(), "--dry-run"])
    done = call("bash", "-c", script, RUN=str(tmp_path / "run"), POD_IP="127.0.0.1")
    assert_rollouts_on_two_hosts(done)


@pytest.mark.slow
def test_the_compose_file_starts_the_run_that_it_describes(tmp_path: Path) -> None:
    home = document(ROOT / "docker" / "compose.yaml")["services"]["home"]
    here = ("--set=transport.listen=127.0.0.1", f"--export-access={tmp_path / 'access'}", "--dry-run")
    assert_rollouts_on_two_hosts(call("python", "-m", "launch.cluster", *home["command"], *here, *ports()))


@pytest.mark.slow
def test_agents_read_the_access_file_where_the_home_host_writes_it(tmp_path: Path) -> None:
    services = document(ROOT / "docker" / "compose.yaml")["services"]
    home, agent = home_and_agent()
    [run] = [each.value for each in home.env if each.name == "RUN"]
    written = {f"{run}.access", *(word.partition("=")[2] for word in services["home"]["command"] if "access" in word)}
    agents = [[*agent.command, *agent.args]]
    agents += [[*each["entrypoint"], *each["command"]] for name, each in services.items() if name != "home"]
    assert {words[words.index("--access") + 1] for words in agents} == written
    for words in agents:
        assert words[:5] == ["tini", "--", "python", "-m", "launch.host"]
        file = tmp_path / "access"
        done = call(*words[2:], "--access", str(file), "--wait", "0.1")
        assert done.returncode == 1
        assert done.stderr.startswith(f"launch.host: {file}: not written within 0.1 s")
