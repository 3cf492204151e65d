"""The CURVE keys of one run: a pair for each role, made once, in files that only their owner reads.

A secret must never reach a log, an error message or a repr.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.security.roles import Role

PUBLIC_FILE = "public.json"
KEY_CHARACTERS = 40
"""A CURVE key in Z85."""
_FILE_LIMIT_BYTES = 4096
T = TypeVar("T", bound=msgspec.Struct)


class _PairFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`<role>.key`."""

    role: str
    public: str
    secret: str


class _PublicFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`public.json`: the public key of every role, which is the allow-list of the run."""

    service: str
    operator: str
    observer: str


@dataclass(frozen=True)
class Keyring:
    """What a process of one role holds: its own pair, and everybody's public keys (Z85)."""

    role: Role
    public: bytes
    secret: bytes = field(repr=False)
    known: Mapping[Role, bytes]

    @property
    def server(self) -> bytes:
        """The public key of every endpoint of the run: services alone bind."""
        return self.known[Role.SERVICE]

    def role_of(self, public: bytes) -> Role | None:
        """Whose key this is; None for a stranger's."""
        return next((role for role, key in self.known.items() if key == public), None)


def key_file(folder: Path, role: Role) -> Path:
    return folder / f"{role.label}.key"


def create(folder: Path) -> None:
    """Make a pair for each role in `folder`, unless it has them. Raises RpcError when only a part is there.

    The list of public keys is written last: where it is, the pairs are whole.
    """
    if (folder / PUBLIC_FILE).exists():
        for role in Role:
            load(folder, role)
        return
    if not zmq.has("curve"):
        raise RpcError(ErrorCode.BAD_REQUEST, "libzmq was built without CURVE; install pyzmq from its own wheel")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    publics: dict[str, str] = {}
    for role in Role:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        _write(key_file(folder, role), _PairFile(role.label, public, secret))
        publics[role.label] = public
    _write(folder / PUBLIC_FILE, _PublicFile(**publics))


def load(folder: Path, role: Role) -> Keyring:
    """The keys of `role`. Raises RpcError(bad_request) naming the file: missing, readable by others, or damaged."""
    pair = _read(key_file(folder, role), _PairFile)
    publics = _read(folder / PUBLIC_FILE, _PublicFile)
    known = {each: getattr(publics, each.label).encode() for each in Role}
    for key in (pair.secret.encode(), *known.values()):
        if not _is_key(key):
            raise _damaged(folder, f"a key is not {KEY_CHARACTERS} characters of Z85")
    if pair.role != role.label or zmq.curve_public(pair.secret.encode()) != pair.public.encode():
        raise _damaged(key_file(folder, role), "it is another role's, or its two halves do not belong together")
    if known[role] != pair.public.encode() or len(set(known.values())) != len(Role):
        raise _damaged(folder / PUBLIC_FILE, f"it does not list the key of {role.label}, or one key twice")
    return Keyring(role, pair.public.encode(), pair.secret.encode(), known)


def export(folder: Path, target: Path, roles: Iterable[Role]) -> None:
    """Copy what a host or a person of these roles needs, and no other secret, into the new folder `target`."""
    rings = [load(folder, role) for role in roles]
    target.mkdir(mode=0o700, parents=True)
    for ring in rings:
        _write(key_file(target, ring.role), _PairFile(ring.role.label, ring.public.decode(), ring.secret.decode()))
    _write(target / PUBLIC_FILE, _read(folder / PUBLIC_FILE, _PublicFile))


def _write(path: Path, content: msgspec.Struct) -> None:
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    scratch.replace(path)


def _read(path: Path, kind: type[T]) -> T:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb") as stream:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            data = stream.read(_FILE_LIMIT_BYTES)
    except OSError as error:
        raise RpcError(
            ErrorCode.BAD_REQUEST, f"keys {path}: {error.strerror}; the launcher makes them with the run directory"
        ) from None
    if mode & 0o077:
        raise RpcError(ErrorCode.BAD_REQUEST, f"keys {path}: mode {mode:04o} lets others at it; chmod 600 {path}")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError:
        raise _damaged(path, "it is not the JSON that was written there") from None


def _is_key(key: bytes) -> bool:
    if len(key) != KEY_CHARACTERS:
        return False
    try:
        zmq.curve_public(key)
    except zmq.ZMQError:
        return False
    return True


def _damaged(path: Path, what: str) -> RpcError:
    return RpcError(ErrorCode.BAD_REQUEST, f"keys {path}: {what}; copy it from the launcher's run directory again")
