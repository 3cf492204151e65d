"""The section for the browser page (`monitor.web`), and checks of its address and its tokens.

The topology names the files that hold tokens, never the tokens: a run directory shows its topology to everyone who can
read the directory.
"""

from __future__ import annotations

import ipaddress
import stat
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from shared.topology.fields import LocalPath, Section
from shared.topology.problem import Found

MIN_TOKEN = 16
"""Minimum number of characters in a token."""
_MAKE = "openssl rand -hex 24 > FILE; chmod 600 FILE"
_SECTION = ("services", "monitor", "web")


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 address is written in brackets. Raises ValueError for other text."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address with a port; write one such as 127.0.0.1:8080")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. Host names other than localhost are considered reachable by
    others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(address: str) -> str:
    """Return `address`. Raises ValueError if it is not `host:port` with a port other than 0."""
    _, port = split_address(address)
    if port == 0:
        raise ValueError(f"{address!r} has no valid port; write one from 1 to 65535")
    return address


class Web(Section):
    listen: Annotated[str, AfterValidator(check_address)] = Field(
        default="127.0.0.1:8080", description="address and TCP port of the page"
    )
    token: LocalPath | None = Field(
        default=None,
        description="file with the token that visitors need; required unless only this machine can reach the address",
    )
    operator_token: LocalPath | None = Field(
        default=None,
        description="file with another token, needed to restart and drain services from the page; default: the page "
        "has no buttons",
    )


class TokenError(ValueError):
    """A file does not hold a usable token. The message is one line that names the file, the fault and the remedy."""


def read_token(file: str) -> str:
    """Return the token in `file`. Raises TokenError if it is missing, too short, or readable by others."""
    path = Path(file)
    try:
        mode, token = path.stat().st_mode, path.read_text().strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise TokenError(f"{file}: {why}; write a token into a file: {_MAKE}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokenError(f"{file}: others may read it (mode {stat.S_IMODE(mode):04o}); run chmod 600 {file}")
    if len(token) < MIN_TOKEN or not token.isascii() or any(each.isspace() for each in token):
        raise TokenError(f"{file}: {len(token)} characters; it must be one ASCII word of {MIN_TOKEN} or more: {_MAKE}")
    return token


def check(web: Web | None) -> Found:
    """Yield a problem if others can reach the address without a token."""
    if web is not None:
        yield from check_reach(_SECTION, web.listen, web.token)


def check_reach(section: tuple[str, ...], listen: str, token: str | None) -> Found:
    """Yield a problem if others can reach the address `listen` of a section whose `token` is not set."""
    if token is None and not is_loopback(split_address(listen)[0]):
        message = f"{listen}: others reach this address, and {'.'.join(section[1:])}.token is not set"
        yield (*section, "listen"), f"{message}; set it ({_MAKE}), or listen on 127.0.0.1"


def token_problems(web: Web) -> Found:
    """Yield the problems with the token files. Only the host that serves the page has these files."""
    tokens: dict[str, str] = {}
    for key, file in (("token", web.token), ("operator_token", web.operator_token)):
        if file is not None:
            try:
                tokens[key] = read_token(file)
            except TokenError as error:
                yield (*_SECTION, key), str(error)
    if len(tokens) == 2 and tokens["token"] == tokens["operator_token"]:
        yield (*_SECTION, "operator_token"), f"{web.operator_token}: the same token as monitor.web.token; make another"
