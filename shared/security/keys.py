"""The CURVE keys of one run: one pair per role, created once, in files that only their owner can read.

Secrets never appear in a log, an error message or a repr.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
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
"""Length of a CURVE key in Z85."""
_FILE_LIMIT_BYTES = 4096
T = TypeVar("T", bound=msgspec.Struct)


class _PairFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `<role>.key`."""

    role: str
    public: str
    secret: str


class _PublicFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `public.json`: the public key of every role, which is the allow-list of the run."""

    service: str
    operator: str
    observer: str


@dataclass(frozen=True)
class Keyring:
    """The keys that a process holds: the key pair of its own role and the public keys of all roles, in Z85."""

    role: Role
    public: bytes
    secret: bytes = field(repr=False)
    known: Mapping[Role, bytes]

    @property
    def server(self) -> bytes:
        """The public key of every endpoint in the run, because only services bind."""
        return self.known[Role.SERVICE]

    def role_of(self, public: bytes) -> Role | None:
        """Return the role of a public key, or None if the key is not one of this run."""
        return next((role for role, key in self.known.items() if key == public), None)


def key_file(folder: Path, role: Role) -> Path:
    return folder / f"{role.label}.key"


def create(folder: Path) -> None:
    """Create a key pair for each role in `folder`, unless the pairs already exist.

    The list of public keys is written after all pairs. Raises RpcError if the list exists but a pair is missing.
    """
    if (folder / PUBLIC_FILE).exists():
        for role in Role:
            load(folder, role)
        return
    if not zmq.has("curve"):
        raise RpcError(ErrorCode.BAD_REQUEST, "libzmq was built without CURVE; install pyzmq from its binary wheel")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    publics: dict[str, str] = {}
    for role in Role:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        write_private(key_file(folder, role), _PairFile(role.label, public, secret))
        publics[role.label] = public
    write_private(folder / PUBLIC_FILE, _PublicFile(**publics))


def load(folder: Path, role: Role) -> Keyring:
    """Return the keys of `role`. Raises RpcError(bad_request) if a file is missing, readable by others, or damaged."""
    pair = read_private(key_file(folder, role), _PairFile)
    publics = read_private(folder / PUBLIC_FILE, _PublicFile)
    if pair.role != role.label:
        raise damaged(key_file(folder, role), "it belongs to another role")
    known = {one: getattr(publics, one.label) for one in Role}
    return keyring(folder, role, pair.public, pair.secret, known)


def keyring(where: Path, role: Role, public: str, secret: str, known: Mapping[Role, str]) -> Keyring:
    """Return the keys that were read from `where`. Raises RpcError(bad_request) when they are not valid."""
    for key in (secret, *known.values()):
        if not _is_key(key):
            raise damaged(where, f"a key is not {KEY_CHARACTERS} characters of Z85")
    if zmq.curve_public(secret.encode()) != public.encode():
        raise damaged(where, f"the two halves of the key of {role.label} do not belong together")
    if known[role] != public or len(set(known.values())) != len(Role):
        raise damaged(where, f"the public keys lack that of {role.label}, or contain a key twice")
    return Keyring(role, public.encode(), secret.encode(), {owner: key.encode() for owner, key in known.items()})


def save(folder: Path, ring: Keyring) -> None:
    """Write the keys of one role, and no other secret, into the new folder `folder`."""
    folder.mkdir(mode=0o700, parents=True)
    pair = _PairFile(ring.role.label, ring.public.decode(), ring.secret.decode())
    write_private(key_file(folder, ring.role), pair)
    publics = {role.label: key.decode() for role, key in ring.known.items()}
    write_private(folder / PUBLIC_FILE, _PublicFile(**publics))


def write_private(path: Path, content: msgspec.Struct) -> None:
    """Atomically write JSON to a file with mode 0600. Raises OSError."""
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    scratch.replace(path)


def read_private(path: Path, kind: type[T], limit_bytes: int = _FILE_LIMIT_BYTES) -> T:
    """Return the content of a private file. Raises RpcError(bad_request) if it is missing, not private or damaged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb") as stream:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            data = stream.read(limit_bytes)
    except OSError as error:
        raise RpcError(
            ErrorCode.BAD_REQUEST, f"keys {path}: {error.strerror}; they come with a run, or from ctl export-access"
        ) from None
    if mode & 0o077:
        raise RpcError(ErrorCode.BAD_REQUEST, f"keys {path}: mode {mode:04o} gives others access; chmod 600 {path}")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError:
        raise damaged(path, "it is not the JSON that was written there") from None


def _is_key(key: str) -> bool:
    if len(key) != KEY_CHARACTERS:
        return False
    try:
        zmq.curve_public(key.encode())
    except zmq.ZMQError:
        return False
    return True


def damaged(path: Path, what: str) -> RpcError:
    """Return the error for an unusable key file. `what` must not contain a secret."""
    return RpcError(ErrorCode.BAD_REQUEST, f"keys {path}: {what}; copy or export it again (ctl export-access)")
