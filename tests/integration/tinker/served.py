"""A real cluster that serves, at an address of its own and with one client's key. Asserts nothing."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.topology.serve import MADE_KEYS, read_keys
from tests.integration.tinker.client import Client
from tests.integration.whole_cluster import Cluster, cluster
from tests.tinker_recipes import ROOT

SERVE = ROOT / "launch" / "topologies" / "recipes" / "serve.yaml"


@dataclass
class Served:
    """A cluster, the address of its server, and the key of its client."""

    cluster: Cluster
    address: str
    key: str

    def client(self) -> Client:
        return Client(self.address, self.key)


@contextlib.contextmanager
def serving(folder: Path, *overrides: str, limit_s: float, resume: bool = False) -> Iterator[Served]:
    """Serve in `folder`, or resume the run there, and interrupt the cluster at the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with cluster(SERVE, folder, f"serve.listen={address}", *overrides, limit_s=limit_s, resume=resume) as one:
        one.wait_for("all are READY", lambda: one.pid("policy-trainer") and one.pid("rollout"))
        (key,) = read_keys(str(one.run.keys / MADE_KEYS)).values()
        yield Served(one, address, key)
        one.process.send_signal(signal.SIGINT)
        one.process.wait(60)
