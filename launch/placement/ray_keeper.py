"""Keeps the agents of a run on the nodes of a Ray cluster, for the launcher: `python -m launch.placement.ray_keeper
RUN_DIR`. The directory of a host is `hosts/<name>` below the same path on its node.

It is a separate process because a Ray driver has threads, signal handlers and memory that the launcher must not have,
and because the launcher forks (`--detach`). It reads one JSON object per line from its input and writes one per line to
its output (`KeeperOrder`, `News`). When its input ends, it and every agent exit.

Each host has one actor, which only keeps the agent: a process in its own session, whose standard input is a pipe from
the actor. However the actor ends, even together with its node's raylet, the pipe closes and the agent stops everything
on its host. Ray itself would leave such processes alive. The actor's class is pickled by value and uses only the
standard library, so that it can report a node that has a different version of rlbus, or none. Neither tensors nor
messages of the run go through Ray. The access to the run is passed to a method, because constructor arguments would
remain in Ray's tables.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

import msgspec

ROOT = str(Path(__file__).resolve().parents[2])
FOLDER = os.getcwd()
NAMESPACE = "rlbus"
LABEL = "rlbus-host"
POLL_S = 0.25
WAIT_S = 10.0
"""Maximum time, in seconds, that one call waits for an agent to exit."""
CONNECT_S = 3.0
AT_ONCE = 64
"""Maximum number of hosts that check themselves at the same time."""
START_S = 60.0
"""Maximum time, in seconds, for an actor to start."""
AGAIN_S = 5.0
"""Seconds before an agent that has exited is started again."""
LOOK_AGAIN_S = 1.0
"""Seconds before the next attempt to place a host that could not be placed."""
USAGE = 2
"""Exit status of an agent for which another start would not help."""
END_S = 5.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class KeeperOrder(msgspec.Struct, frozen=True):
    """An order from the launcher: first `open`, which the keeper answers with events up to `ready` or `failed`; then
    `start`."""

    kind: Literal["open", "start"]
    address: str = ""
    """Address of the cluster, as for `ray.init`."""
    hosts: dict[str, int] = {}
    """The hosts to place, with the number of GPUs of each."""
    home: str = ""
    listen: str = ""
    """Address of home to which the hosts connect, or an empty string for that of its node in the cluster."""
    ports: list[int] = []
    """Ports of home to which the hosts connect."""
    topology: str = ""
    """The topology as YAML, which the hosts check."""
    access: str = ""
    """The access to the run with the role service, encoded in Base64."""


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event that the keeper reports. `host` is the host that the event concerns, or an empty string."""

    kind: Literal["opened", "failed", "warning", "checked", "ready", "lost", "told", "missing", "refused"]
    text: str = ""
    host: str = ""
    address: str = ""
    """`opened`: the address of the launcher's node."""
    facts: str = ""
    """`checked`: JSON of `HostFacts`."""
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """`checked`: this machine's time, then the host's, then this machine's again, in seconds since 1970."""


class HostKeeper:
    """The actor of one host. Its methods use the standard library only, so that they work on a node without rlbus."""

    def __init__(self, run: str) -> None:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)  # Ray starts workers with niceness 15, which their children inherit
        self.run = run
        self.agent: subprocess.Popen[bytes] | None = None
        self.output = ""

    def whose(self) -> str:
        return self.run

    def now(self) -> float:
        return time.time()

    def unreachable(self, doors: list[tuple[str, int]]) -> str:
        """Return the first address to which this node cannot connect, with the reason, or an empty string."""
        for door in doors:
            try:
                socket.create_connection(door, timeout=5).close()
            except OSError as error:
                return f"{door[0]}:{door[1]} ({error.strerror or error})"
        return ""

    def check(self, root: str, folder: str, topology: bytes) -> tuple[int, str, str]:
        """Return the exit status, the output and the errors of `launch.host --check` on this node.

        `root` is the folder of rlbus at home. `folder` is the working directory at home, from which users' modules are
        imported. Each is used if this node has it.
        """
        done = subprocess.run(
            [sys.executable, "-m", "launch.host", "--check"],
            input=topology,
            capture_output=True,
            env=self._environment(root),
            cwd=folder if os.path.isdir(folder) else None,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def start(self, root: str, folder: str, name: str, path: str, access: bytes) -> None:
        """Start the agent. Raises OSError."""
        os.makedirs(os.path.join(path, "logs"), exist_ok=True)
        self.output = os.path.join(path, "logs", "agent.out")
        with open(self.output, "ab") as output:
            output.truncate(0)
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "launch.host", "--access", "-", "--name", name, "--run-dir", path],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environment(root),
                cwd=folder if os.path.isdir(folder) else path,
                start_new_session=True,
            )
        assert self.agent.stdin is not None  # noqa: S101  # it is a pipe
        self.agent.stdin.write(access)
        self.agent.stdin.flush()

    def wait(self, limit_s: float) -> tuple[int, str] | None:
        """Return the agent's exit status and the end of its output, or None if it is still running after `limit_s`."""
        if self.agent is None:
            return None
        try:
            status = self.agent.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        with open(self.output, errors="replace") as output:
            return status, output.read()[-2000:]

    @staticmethod
    def _environment(root: str) -> dict[str, str]:
        """Return the environment with our packages first on the path, because other packages also install a `proto`."""
        old = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, [root if os.path.isdir(root) else "", old]))
        return {**os.environ, "PYTHONPATH": path}


@dataclass
class _PlacedHost:
    """A host with its actor."""

    name: str
    node: str
    actor: Any
    waiting: Any = None
    """Ray's reference to the pending call of `wait`, once the agent has been started."""
    answer: Any = None
    """Ray's reference to the call, made at `asked_at`, whose answer shows that the actor has started."""
    asked_at: float = 0.0


class Keeper:
    """The Ray driver that keeps an agent on every host."""

    def __init__(self, ray: Any, order: KeeperOrder, path: Path) -> None:
        self._ray, self._order, self._path = ray, order, path
        self._placed: dict[str, _PlacedHost] = {}
        self._access = b""
        self._again_at: dict[str, float] = {}
        self._said: dict[str, str] = {}
        """The last reported reason why a host could not be placed, by host."""
        self._home = ray.get_runtime_context().get_node_id()
        self._actor_class = ray.remote(HostKeeper)

    def check(self) -> None:
        """Find a node for every host, have the hosts check themselves in parallel, and report the results."""
        nodes = self._ray.nodes()
        here = next((node["Labels"].get(LABEL, "") for node in nodes if node["NodeID"] == self._home), "")
        if here and self._order.home and here != self._order.home:
            text = (
                f"the trainer's host is {self._order.home}, but this node is labelled {here}; start the launcher there"
            )
            tell(News("refused", text))
        for name in self._order.hosts:
            if text := self._create(name, nodes):
                self._say("missing", name, text)
        with contextlib.ExitStack() as stack:
            address = self._order.listen or self._ray.util.get_node_ip_address()
            doors = _open_doors([(address, port) for port in self._order.ports], len(self._placed), stack)
            pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
            for news in pool.map(functools.partial(self._checked, doors=doors), list(self._placed.values())):
                tell(news)

    def _checked(self, placed: _PlacedHost, doors: list[tuple[str, int]]) -> News:
        name = placed.name
        if text := self._begun(placed, START_S):
            return News("refused", f"host {name}: {text}", name)
        try:
            sent_at = time.time()
            there_at = self._ray.get(placed.actor.now.remote(), timeout=START_S)
            times = (sent_at, there_at, time.time())
            unreachable = self._ray.get(placed.actor.unreachable.remote(doors), timeout=START_S)
            call = placed.actor.check.remote(ROOT, FOLDER, self._order.topology.encode())
            status, output, errors = self._ray.get(call, timeout=2 * START_S)
        except self._ray.exceptions.RayError as error:
            return News("refused", f"host {name} could not be checked: {_line(error)}; see `ray status`", name)
        if unreachable:
            text = f"it cannot connect to this machine at {unreachable}; open that port, or set transport.listen"
            return News("refused", f"host {name}: {text} to an address of this machine that it can reach", name)
        if status:
            why = (errors.strip().splitlines() or ["no output"])[-1]
            text = f"`python -m launch.host --check` fails there: {why}; install rlbus at {ROOT}, or as a package"
            return News("refused", f"host {name}: {text}", name)
        return News("checked", host=name, facts=output, times=times)

    def start(self, access: bytes) -> None:
        """Keep an agent on every host from now on."""
        self._access = access

    def look(self) -> None:
        """Find the agents that have ended, and start those that are missing."""
        nodes = self._ray.nodes()
        dead = {node["NodeID"]: node for node in nodes if not node["Alive"]}
        for placed in list(self._placed.values()):
            if placed.node in dead:
                reason = dead[placed.node].get("DeathReasonMessage") or "it left the cluster"
                self._lose(placed, f"its node is dead: {_line(reason)}")
            elif placed.waiting is not None:
                self._look_at(placed)
        now = time.monotonic()
        for name in self._order.hosts if self._access else ():
            if self._again_at.get(name, 0.0) > now:
                continue
            text = "" if name in self._placed else self._create(name, nodes)
            if not text and self._placed[name].waiting is None:
                text = self._try_to_start(self._placed[name], now)
            if text:
                self._say("told", name, text)
                self._again_at[name] = now + LOOK_AGAIN_S

    def close(self) -> None:
        """Stop every agent, and leave the cluster."""
        for placed in self._placed.values():
            self._ray.kill(placed.actor)
        self._ray.shutdown()

    def _create(self, name: str, nodes: list[dict[str, Any]]) -> str:
        """Create the actor of a host on its node. Return the reason why this is currently impossible, or an empty
        string."""
        gpus = self._order.hosts[name]
        alive = [node for node in nodes if node["Alive"]]
        used = {placed.node for placed in self._placed.values()}
        fit = [node for node in alive if node["Labels"].get(LABEL) == name]
        if not fit:
            free = [node for node in alive if LABEL not in node["Labels"] and node["NodeID"] != self._home]
            fit = [node for node in free if node["NodeID"] not in used and node["Resources"].get("GPU", 0) >= gpus]
        if not fit:
            there = ", ".join(sorted(node["Labels"].get(LABEL, node["NodeManagerAddress"]) for node in alive))
            wanted = f" with {gpus} GPUs" if gpus else ""
            return (
                f"no node has the label {LABEL}={name}, and no other node{wanted} is free (nodes: {there}); "
                f"label one with `ray start --address … --labels {LABEL}={name}`"
            )
        node = fit[0]
        if node["Resources"].get("GPU", 0) < gpus:
            has = f"its node has {node['Resources'].get('GPU', 0):g} GPUs"
            return f"{has}, but placement.hosts.{name}.gpus is {gpus}; lower that, or label another node"
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actor_name = f"host-{node['NodeID']}"
        try:
            actor = self._actor_class.options(
                name=actor_name, num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy, max_concurrency=2
            ).remote(self._path.name)
        except ValueError:  # the name is taken
            return f"its node is already a host of run {self._whose(actor_name)!r}; end that run first"
        self._placed[name] = _PlacedHost(name, node["NodeID"], actor)
        return ""

    def _try_to_start(self, placed: _PlacedHost, now: float) -> str:
        """Start the agent of a host if its actor answers, without waiting.

        Return the reason why it cannot be started, or an empty string.
        """
        if placed.answer is None:
            placed.answer, placed.asked_at = placed.actor.whose.remote(), now
        ready, _ = self._ray.wait([placed.answer], timeout=0)
        if not ready and now - placed.asked_at < START_S:
            return ""
        return self._begun(placed, START_S if ready else 0.0) or self._start(placed)

    def _begun(self, placed: _PlacedHost, limit_s: float) -> str:
        """Wait for the actor of a host. Return the reason why it does not start, or an empty string."""
        try:
            self._ray.get(placed.answer or placed.actor.whose.remote(), timeout=limit_s)
        except self._ray.exceptions.GetTimeoutError:
            gpus = self._order.hosts[placed.name]
            text = f"its node did not start an actor with {gpus} GPUs within {START_S:g} s; free GPUs on that node"
        except self._ray.exceptions.RayError as error:
            text = f"its actor cannot start: {_line(error)}"
        else:
            return ""
        self._give_up(placed)
        return text

    def _whose(self, actor_name: str) -> str:
        try:
            return str(self._ray.get(self._ray.get_actor(actor_name).whose.remote(), timeout=END_S))
        except (ValueError, self._ray.exceptions.RayError):
            return "(unknown)"

    def _start(self, placed: _PlacedHost) -> str:
        path = str(self._path / "hosts" / placed.name)
        try:
            self._ray.get(placed.actor.start.remote(ROOT, FOLDER, placed.name, path, self._access), timeout=START_S)
        except self._ray.exceptions.RayTaskError as error:
            return f"its agent cannot be started: {_line(error.cause)}; the run directory must be writable there"
        except self._ray.exceptions.RayError as error:
            self._lose(placed, _line(error))
            return f"its agent cannot be started: {_line(error)}"
        placed.waiting = placed.actor.wait.remote(WAIT_S)
        self._said.pop(placed.name, None)
        return ""

    def _look_at(self, placed: _PlacedHost) -> None:
        ready, _ = self._ray.wait([placed.waiting], timeout=0)
        if not ready:
            return
        try:
            ended = self._ray.get(placed.waiting)
        except self._ray.exceptions.RayError as error:
            self._lose(placed, f"its agent's actor ended: {_line(error)}")
            return
        if ended is None:
            placed.waiting = placed.actor.wait.remote(WAIT_S)
            return
        status, output = ended
        why = (output.strip().splitlines() or [f"exit status {status}"])[-1]
        self._again_at[placed.name] = time.monotonic() + AGAIN_S
        if status == USAGE:
            self._give_up(placed)
            self._say("refused", placed.name, why)
        else:
            self._lose(placed, f"its agent ended: {why}" if status else "its agent ended")

    def _say(self, kind: Literal["told", "missing", "refused"], host: str, text: str) -> None:
        """Report `text`, unless it was also the last report about the host."""
        if self._said.get(host) != text:
            tell(News(kind, f"host {host}: {text}", host))
        self._said[host] = text

    def _give_up(self, placed: _PlacedHost) -> None:
        self._ray.kill(placed.actor)
        del self._placed[placed.name]

    def _lose(self, placed: _PlacedHost, cause: str) -> None:
        self._give_up(placed)
        tell(News("lost", cause, placed.name))


def _line(error: object) -> str:
    """Return the text of an error in one line. For an error in an actor, that is the error that the actor raised."""
    words = _ANSI.sub("", str(getattr(error, "cause", None) or error)).split()
    return " ".join(words)[:300] or type(error).__name__


def _open_doors(doors: list[tuple[str, int]], hosts: int, stack: contextlib.ExitStack) -> list[tuple[str, int]]:
    """Listen at addresses to which `hosts` hosts will connect, until the stack is closed. Return those that can be
    used; the launcher reports the others.
    """
    opened = []
    for door in doors:
        with contextlib.suppress(OSError):
            # Nothing accepts the connections, so the queue must have room for all of them.
            stack.enter_context(socket.create_server(door, backlog=hosts + 8))
            opened.append(door)
    return opened


def _remedy(error: str) -> str:
    """Return what to do about an error of `ray.init`."""
    if "ersion mismatch" in error:
        return "use the cluster's versions of Ray and Python here"
    if "Could not find any running Ray instance" in error:
        return "start one with `ray start --head`, or set RAY_ADDRESS"
    return "set RAY_AUTH_MODE and RAY_AUTH_TOKEN as for its `ray start`, and check `ray status`"


def tell(news: News) -> None:
    """Write one line to the launcher."""
    os.write(sys.stdout.fileno(), msgspec.json.encode(news) + b"\n")


def _read_orders(orders: SimpleQueue[KeeperOrder | None]) -> None:
    """Put the orders from the input into the queue. None marks the end of the input."""
    for line in sys.stdin.buffer:
        orders.put(msgspec.json.decode(line, type=KeeperOrder))
    orders.put(None)


def _closed(address: str) -> str:
    """Return the reason why no cluster can be reached at `HOST:PORT`, or an empty string.

    Ray itself would try for a minute and then abort.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return ""  # such as `auto`
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _open(order: KeeperOrder) -> Keeper | None:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        tell(News("failed", f"ray is not installed here ({error}); run `make setup-ray`, or use engine: local"))
        return None
    if closed := _closed(order.address):
        tell(News("failed", f"no Ray cluster at {order.address!r} ({closed}); start one with `ray start --head`"))
        return None
    try:
        ray.init(address=order.address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        text = f"cannot connect to a Ray cluster at {order.address!r} ({_line(error)})"
        tell(News("failed", f"{text}; {_remedy(str(error))}"))
        return None
    if os.environ.get("RAY_AUTH_MODE") != "token" and os.environ.get("RAY_USE_TLS") != "1":
        text = "this Ray cluster has neither a token (RAY_AUTH_MODE=token) nor TLS (RAY_USE_TLS=1)"
        tell(News("warning", f"{text}: anyone who can reach its ports can run code on it and take the run's keys"))
    keeper = Keeper(ray, order, Path(sys.argv[1]))
    tell(News("opened", address=ray.util.get_node_ip_address()))
    keeper.check()
    tell(News("ready"))
    return keeper


def main() -> None:
    """Serve the launcher until it ends. Anything else that is printed goes to standard error."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    orders: SimpleQueue[KeeperOrder | None] = SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), name="orders", daemon=True).start()
    try:
        _serve(orders)
    except Exception as error:
        tell(News("failed", f"the keeper of the hosts on Ray failed: {type(error).__name__}: {_line(error)}"))
        raise


def _serve(orders: SimpleQueue[KeeperOrder | None]) -> None:
    first = orders.get()
    keeper = _open(first) if first is not None else None
    if keeper is None:
        sys.exit(1)
    try:
        while True:
            try:
                order = orders.get(timeout=POLL_S)
            except Empty:
                keeper.look()
                continue
            if order is None:
                return
            keeper.start(base64.b64decode(order.access))
    finally:
        keeper.close()


if __name__ == "__main__":
    main()
