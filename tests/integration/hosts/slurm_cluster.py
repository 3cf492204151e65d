"""A real Slurm cluster of two nodes on this machine: each is a set of namespaces with its own network, processes and
host name."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.netns import Host, two_hosts
from tests.integration.tiny.harness import ROOT, wait_for

LIMIT_S = 60.0
NAMES = ("node-a", "node-b")
_OWN = ("--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={home}({address})
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=15
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""


@dataclass(frozen=True)
class SlurmCluster:
    """The cluster and the host from which jobs are submitted. That host is also the first node."""

    home: Host
    configuration: Path

    def command(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command."""
        words = [f"{name}={value}" for name, value in environment.items()]
        return subprocess.run(
            self.home.command("env", f"SLURM_CONF={self.configuration}", *words, *arguments),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def submit(self, script: Path, output: Path, *arguments: str, nodes: int = 2, **environment: str) -> str:
        """Submit a job that writes to `output`, and return its number."""
        options = ("--parsable", f"--output={output}", f"--nodes={nodes}")
        done = self.command("sbatch", *options, str(script), *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as PENDING, RUNNING, COMPLETED or FAILED."""
        done = self.command("scontrol", "--oneliner", "show", "job", job)
        return dict(word.partition("=")[::2] for word in done.stdout.split() if "=" in word)["JobState"]


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start a cluster with its files in `folder`. At the end, all processes that its jobs have started are gone."""
    for tool in ("slurmctld", "slurmd", "sbatch"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (apt packages slurmctld, slurmd and slurm-client)")
    configuration = folder / "slurm.conf"
    with two_hosts() as hosts, contextlib.ExitStack() as stack:
        nodes = [
            f"NodeName={name} NodeAddr={host.address} CPUs=1 State=UNKNOWN"
            for name, host in zip(NAMES, hosts, strict=True)
        ]
        text = _CONFIGURATION.format(home=NAMES[0], address=hosts[0].address, folder=folder, nodes="\n".join(nodes))
        configuration.write_text(text)
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}\n")  # no cgroup is used
        made = SlurmCluster(hosts[0], configuration)
        for name, host in zip(NAMES, hosts, strict=True):
            stack.enter_context(_node(name, host, configuration, controls=name == NAMES[0]))
        wait_for("both nodes", lambda: made.command("sinfo", "-h", "-o", "%T %D").stdout == "idle 2\n", LIMIT_S)
        yield made


@contextlib.contextmanager
def _node(name: str, host: Host, configuration: Path, *, controls: bool) -> Iterator[None]:
    """Run the daemons of one node. When the node's first process exits, all of its other processes are killed."""
    script = f"hostname {name}; mount -t tmpfs none /dev/shm; "
    script += f"slurmctld -D -f {configuration} & " if controls else ""
    script += f"slurmd -D -N {name} -f {configuration} & wait"  # the shell is process 1 and reaps orphans
    log = configuration.parent / f"{name}.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            host.command("unshare", *_OWN, "sh", "-c", script),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        child.kill()
        child.wait(20)
