"""The rendezvous of a torchrun command: the address where its agents meet, and which agent listens there."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dalsegno.errors import UsageError
from dalsegno.runs.submit.frameworks import LAST_PORT
from dalsegno.runs.submit.values import shown
from dalsegno.runs.torchrun.args import TorchrunArgs
from dalsegno.wire.frames import Message
from dalsegno.wire.handshake import BadProof

LOOPBACK = "127.0.0.1"
C10D_PORT = 29_400
_ENDPOINT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+)?(?::(?P<port>\d+))?", re.ASCII)
_NOT_IN_HOSTS = re.compile(r"[^\w.:-]", re.ASCII)
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


@dataclass(frozen=True)
class Rendezvous:
    """The address to which agents connect.

    `ours` says whether this node may listen on it, and `alone` whether the run has only this node.
    """

    host: str
    port: int  # port of the address; 0 means any free port
    ours: bool
    alone: bool = False


ALONE = Rendezvous(LOOPBACK, 0, ours=True, alone=True)


def find_rendezvous(args: TorchrunArgs, is_ours: Callable[[str], bool]) -> Rendezvous:
    """Return the rendezvous that torchrun would use: the master for `static`, otherwise the endpoint.

    A run on a single node needs neither, and gets a free port on the loopback address.
    """
    if args.standalone or args.nodes.max == 1:
        return ALONE
    if args.backend == "static":
        return _static(args)
    host, port = parse_endpoint(args.endpoint or "localhost", C10D_PORT)
    if port == 0:
        return ALONE  # other nodes cannot know a random port
    is_host = _parse_is_host(args.settings.get("is_host", ""))
    return Rendezvous(host, port, is_ours(host) if is_host is None else is_host)


def _static(args: TorchrunArgs) -> Rendezvous:
    host, port = parse_endpoint(args.endpoint, 0)
    if not port:
        what = f"{shown(args.endpoint)} has no port, and the static rendezvous has no default"
        raise UsageError(what, where="--rdzv-endpoint", hint="write `host:29500`, or `--rdzv-backend c10d`")
    return Rendezvous(host, port, ours=args.node_rank == 0)


def _parse_is_host(text: str) -> bool | None:
    word = text.lower()
    if word and word not in (*_TRUE, *_FALSE):
        what, hint = f"{shown(text)} is neither true nor false", "write `is_host=1` or `is_host=0`"
        raise UsageError(what, where="--rdzv-conf is_host", hint=hint)
    return word in _TRUE if word else None


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Parse `host`, `host:port`, `[::1]:port` or `:port`."""
    found = _ENDPOINT.fullmatch(text.strip())
    if found is None or int(found["port"] or 0) > LAST_PORT:
        raise UsageError(
            f"{shown(text)} is not of the form `host:port`", where="--rdzv-endpoint", hint="write `node-1:29400`"
        )
    host = (found["host"] or "localhost").strip("[]")
    return host, int(found["port"]) if found["port"] is not None else default_port


def is_own_address(host: str) -> bool:
    """Return whether a host name means this node, that is, whether a socket can be bound to its address."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.bind((address[0], 0))
                return True
    return False


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1")


# munge: only processes of the same user, on any node of the cluster, can open a credential


_LIBRARY = "libmunge.so.2"
_SOCKETS = ("/run/munge/munge.socket.2", "/var/run/munge/munge.socket.2")
_SLURM_CONF = "/etc/slurm/slurm.conf"
_AUTH_SOCKET = re.compile(r"^\s*AuthInfo\s*=.*?socket=([^,\s]+)", re.IGNORECASE | re.MULTILINE)
_OPT_SOCKET, _OPT_UID_RESTRICTION = 8, 9  # option numbers from munge.h


class NotSealed(OSError):
    """munge did not confirm that the same user created the credential, or could not create one."""


@dataclass(frozen=True)
class Munge:
    """The munge daemon at `socket`."""

    socket: str

    def seal(self, data: bytes) -> str:
        """Return a credential that contains the data.

        Every credential is different, and each node can open a credential once.
        """
        library, sealed = _load(), ctypes.c_char_p()
        context = self._context(library)
        try:
            library.munge_ctx_set(context, _OPT_UID_RESTRICTION, ctypes.c_uint32(os.getuid()))
            code = library.munge_encode(ctypes.byref(sealed), context, data, len(data))
            if code or sealed.value is None:
                raise NotSealed(_error_text(library, code))
            return sealed.value.decode()
        finally:
            library.munge_ctx_destroy(context)

    def unseal(self, sealed: str) -> bytes:
        library, data, size = _load(), ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        context = self._context(library)
        try:
            code = library.munge_decode(
                sealed.encode(), context, *(ctypes.byref(each) for each in (data, size, uid, gid))
            )
            if code:
                raise NotSealed(_error_text(library, code))
            if uid.value != os.getuid():
                raise NotSealed(f"it was made by the user with UID {uid.value}")
            return ctypes.string_at(data.value or 0, size.value)
        finally:
            library.munge_ctx_destroy(context)

    def _context(self, library: ctypes.CDLL) -> ctypes.c_void_p:
        context = ctypes.c_void_p(library.munge_ctx_create())
        library.munge_ctx_set(context, _OPT_SOCKET, ctypes.c_char_p(self.socket.encode()))
        return context


def find_munge(environ: Mapping[str, str]) -> Munge | None:
    """Return the munge daemon that this node's Slurm uses, or one at a default path; None if none responds."""
    for path in (_slurm_socket(environ.get("SLURM_CONF") or _SLURM_CONF), *_SOCKETS):
        if path and os.path.exists(path) and _answers(Munge(path)):
            return Munge(path)
    return None


def _answers(munge: Munge) -> bool:
    try:
        return munge.seal(b"") != ""
    except (OSError, NotSealed):  # there is no munge library, or no daemon answers at the socket
        return False


def _slurm_socket(conf: str) -> str:
    try:
        with open(conf, errors="replace") as file:
            found = _AUTH_SOCKET.search(file.read())
    except OSError:
        return ""
    return found[1] if found else ""


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(_LIBRARY)
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_strerror.restype = ctypes.c_char_p
    return library


def _error_text(library: ctypes.CDLL, code: int) -> str:
    return bytes(library.munge_strerror(code) or b"").decode(errors="replace")


# The run's secret. The agent that listens creates it and, with munge, gives it only to agents of the same user


class Sealer(Protocol):
    """munge, or a replacement for it."""

    def seal(self, data: bytes) -> str: ...

    def unseal(self, sealed: str) -> bytes:
        """Return the data in a credential. Raise NotSealed unless a process of the same user made it."""
        ...


@dataclass
class Keys:
    """The run's secret, for the agent that creates it and for agents that receive it.

    `trouble` says why the last greeting was refused.
    """

    run: str
    endpoint: str
    munge: Sealer | None
    alone: bool = False  # whether the run has a single node
    trouble: str = ""
    secret: bytes = field(default=b"", repr=False)

    @property
    def private(self) -> bool:
        """Whether only agents of the same user can know the secret."""
        return self.alone or self.munge is not None

    def make(self) -> bytes:
        self.secret = secrets.token_bytes(32) if self.private else self._derived()
        return self.secret

    def greeting(self) -> Message:
        """Return the first message to a new peer, with a new credential, because munge opens a credential only once."""
        sealed = self.munge.seal(self.mark.encode() + self.secret) if self.munge else ""
        return {"run": self.mark, "sealed": sealed}

    def unlock(self, greeting: Message) -> bytes:
        """Return the secret from a greeting. If this node has munge, refuse a greeting without a credential."""
        if greeting.get("run") != self.mark:
            raise self._refuse(f"{self.endpoint} belongs to another run than `{self.run}`; choose another port")
        sealed = str(greeting.get("sealed") or "")
        if self.munge is None and not sealed:
            return self._derived()
        if self.munge is None:
            raise self._refuse(f"{self.endpoint} uses munge, which does not respond on this node")
        if not sealed:
            raise self._refuse(f"{self.endpoint} does not use munge but this node does, so its identity is unknown")
        return self._unseal(self.munge, sealed)

    def _unseal(self, munge: Sealer, sealed: str) -> bytes:
        try:
            data = munge.unseal(sealed)
        except NotSealed as error:
            raise self._refuse(f"munge does not confirm the identity of {self.endpoint}: {error}") from error
        mark = self.mark.encode()
        if not data.startswith(mark):
            raise self._refuse(f"the credential of {self.endpoint} is for another run")
        self.trouble = ""
        return data[len(mark) :]

    def _refuse(self, why: str) -> BadProof:
        self.trouble = why
        return BadProof(why)

    @property
    def mark(self) -> str:
        """A short name of the run that does not reveal its id."""
        return hashlib.sha256(f"torchrun\0{self.run}".encode()).hexdigest()[:16]

    def _derived(self) -> bytes:
        return hashlib.sha256(f"torchrun\0{self.run}\0{self.endpoint}".encode()).digest()


# Agent names. Several agents may run on one node. New agents get their ranks in the order of their names


def agent_name(args: TorchrunArgs, environ: Mapping[str, str], host: str, pid: int) -> str:
    """Return `ORDER@HOST#PID`.

    ORDER is `--node-rank` with a static rendezvous, otherwise the rank of the Slurm task.
    """
    order = str(args.node_rank) if args.backend == "static" else environ.get("SLURM_PROCID", "")
    return f"{order if order.isdigit() else 0}@{host}#{pid}"


def host_of(agent: str) -> str:
    """Return the host in an agent's name, for the user. Agents choose their names, so unusual characters become `?`."""
    return _NOT_IN_HOSTS.sub("?", agent.partition("@")[2].rpartition("#")[0] or agent)[:255] or "?"
