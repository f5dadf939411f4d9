"""Tests of which peers the agents of a torchrun trust, with munge and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dalsegno.runs.agent.snapshots import Snapshots
from dalsegno.runs.torchrun.rendezvous import Keys, NotSealed, find_munge
from dalsegno.wire.handshake import BadProof


class FakeMunge:
    """A munge for tests: `user` seals, and opens what the same user sealed."""

    def __init__(self, user: str) -> None:
        self.user = user

    def seal(self, data: bytes) -> str:
        return f"{self.user}:{data.hex()}"

    def unseal(self, sealed: str) -> bytes:
        user, _, data = sealed.partition(":")
        if user != self.user:
            raise NotSealed(f"made by {user}")
        return bytes.fromhex(data)


def test_secret_is_sealed_differently_each_time() -> None:
    host, other = Keys("j", "h:1", FakeMunge("ada")), Keys("j", "h:1", FakeMunge("ada"))
    assert other.unlock(host.greeting() | {"nonce": "x"}) == host.secret == b""
    assert host.make() != Keys("j", "h:1", FakeMunge("ada")).make()
    assert other.unlock(host.greeting()) == host.secret != b""


def test_key_without_munge_is_derived_from_run_and_endpoint() -> None:
    host, other = Keys("j", "h:1", None), Keys("j", "h:1", None)
    assert host.make() == other.unlock(host.greeting())
    assert host.secret != Keys("j", "h:2", None).make()
    assert host.secret.hex() not in str(host.greeting()) and host.secret.hex() not in repr(host)


@pytest.mark.parametrize(
    ("host", "other", "why"),
    [
        (Keys("j", "h:1", FakeMunge("eve")), Keys("j", "h:1", FakeMunge("ada")), "munge does not confirm"),
        (Keys("j", "h:1", None), Keys("j", "h:1", FakeMunge("ada")), "its identity is unknown"),
        (Keys("j", "h:1", FakeMunge("ada")), Keys("j", "h:1", None), "munge, which does not respond on this node"),
        (Keys("k", "h:1", None), Keys("j", "h:1", None), "h:1 belongs to another run than `j`"),
    ],
)
def test_unusable_greetings_are_refused(host: Keys, other: Keys, why: str) -> None:
    host.make()
    with pytest.raises(BadProof):
        other.unlock(host.greeting())
    assert why in other.trouble


def test_socket_without_a_daemon_is_not_munge(tmp_path: Path) -> None:
    (tmp_path / "socket").touch()
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"ClusterName=x\nAuthInfo=ttl=60,socket={tmp_path / 'socket'}\n")
    found = find_munge({"SLURM_CONF": str(conf)})
    assert found is None or found.socket != str(tmp_path / "socket")


def test_keepers_use_the_sealed_secret() -> None:
    """An agent starts without the secret; keepers without it would accept anyone."""
    orders: list[dict[str, Any]] = []
    snapshots = Snapshots("j", "n1", b"", "door", lambda *task: True, lambda message: None)
    snapshots.handle({"keeper": 1}, orders.append)
    snapshots.take_secret(b"sealed")
    assert orders[-1]["keep"]["secret"] == b"sealed".hex()


def test_snapshots_stay_on_the_node_without_a_private_secret() -> None:
    assert not Keys("j", "h:1", None).private
    assert Keys("j", "h:1", FakeMunge("ada")).private and Keys("j", "h:1", None, alone=True).private
    snapshots = Snapshots("j", "n1", b"", "door", lambda *task: True, lambda message: None)
    snapshots.keep_local()
    snapshots.take_secret(b"guessed")
    orders: list[dict[str, Any]] = []
    snapshots.handle({"keeper": 1}, orders.append)
    assert orders[-1]["keep"]["secret"] not in ("", b"guessed".hex())
    assert snapshots.hello()["keeper"] == 0, "no node learns where to send or fetch copies"
