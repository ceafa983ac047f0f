"""The server: on this machine alone, unless one insists."""

import errno
import ipaddress
import logging
import secrets
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import uvicorn

from elman.errors import UserError
from elman.lab.app import Lab, guarded

SHORTEST_TOKEN = 16
"""Characters of a token that others on a network may try to guess."""


class Opened(NamedTuple):
    """A server that is ready to run."""

    server: uvicorn.Server
    socket: socket.socket
    address: str  # with the token in it
    warning: str

    def run(self) -> None:
        """Serve until Ctrl-C."""
        self.server.run(sockets=[self.socket])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("192.168.1.2")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_lab(
    root: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str = "",
    at_once: int = 2,
    process: subprocess.Popen[bytes] | None = None,
    ready: Callable[[], None] = lambda: None,
) -> Opened:
    """Bind, and say where; what is wrong is said before anything is served."""
    warning = _check(root, host, token)
    listening = _bound(host, port)
    port = listening.getsockname()[1]
    token = token or secrets.token_urlsafe(24)
    name = f"[{host}]" if ":" in host else host
    names = [f"{name}:{port}"]
    if is_loopback(host):
        names += [f"{other}:{port}" for other in ("127.0.0.1", "localhost", "[::1]")]
    lab = Lab(root, at_once, process=process)
    config = uvicorn.Config(
        guarded(lab, token, names),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    return Opened(
        _Server(config, lab, ready), listening, f"http://{names[0]}/?token={token}", warning
    )


class _Server(uvicorn.Server):
    """Says when it can be reached, and to those who listen when it ends."""

    def __init__(self, config: uvicorn.Config, lab: Lab, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.lab, self.ready = lab, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all streams; that long requests are cut off by it is not logged."""
        self.lab.is_ending = True
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)


def _check(root: Path, host: str, token: str) -> str:
    """Refuse what is unsafe or cannot be; returns what there is to warn of."""
    if root.exists() and not root.is_dir():
        raise UserError(f"{root} is a file, not a folder of runs", hint="elman lab runs/")
    if token and not all(c.isascii() and (c.isalnum() or c in "-_") for c in token):
        raise UserError("a token has letters, digits, - and _ only", hint="leave --token out")
    if is_loopback(host):
        return ""
    if host in ("0.0.0.0", "::", ""):
        raise UserError(
            f"--host {host} is every address at once, and a forged request could not be told",
            hint="name the address that others will type, e.g. --host 192.168.1.2",
        )
    if len(token) < SHORTEST_TOKEN:
        raise UserError(
            f"--host {host} can be reached by others: that needs a --token of at least "
            f"{SHORTEST_TOKEN} characters",
            hint=f"--token {secrets.token_urlsafe(18)}",
        )
    return (
        f"whoever reaches {host} and has the token can train and read everything under {root}; "
        "what they send and see travels unencrypted"
    )


def _bound(host: str, port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise UserError(f"--port {port} must be from 0 to 65535", hint="0 takes a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's waiting off only where TCP is named: else each answer takes 40 ms more
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, TypeError) as problem:  # a name that no resolver takes is a TypeError
        listening.close()
        is_taken = getattr(problem, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        raise UserError(
            f"cannot listen on {host} port {port}: {getattr(problem, 'strerror', None) or problem}",
            hint="another --port; 0 takes a free one"
            if is_taken
            else "--host is an address of this machine: 127.0.0.1 is this machine alone",
        ) from problem
    listening.listen(128)
    listening.set_inheritable(False)
    return listening
