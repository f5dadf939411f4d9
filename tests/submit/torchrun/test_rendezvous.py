"""The rendezvous of a torchrun."""

from __future__ import annotations

import pytest

from dalsegno.errors import UsageError
from dalsegno.runs.torchrun.args import TorchrunArgs, parse_torchrun
from dalsegno.runs.torchrun.launch import LaunchContext, launch
from dalsegno.runs.torchrun.rendezvous import ALONE, Rendezvous, find_rendezvous, is_own_address, parse_endpoint


def read(line: str) -> TorchrunArgs:
    args = parse_torchrun([*line.split(), "train.py"])
    assert args is not None
    return args


@pytest.mark.parametrize(
    ("line", "meeting"),
    [
        ("", ALONE),
        ("--standalone --nproc-per-node 8", ALONE),
        ("--master-port 29501", ALONE),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0", ALONE),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint localhost:0", ALONE),
        ("--nnodes 2 --rdzv-backend c10d", Rendezvous("localhost", 29400, ours=False)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint me", Rendezvous("me", 29400, ours=True)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint me:7", Rendezvous("me", 7, ours=True)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint you:7", Rendezvous("you", 7, ours=False)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint you:7 --rdzv-conf is_host=1", Rendezvous("you", 7, ours=True)),
        (
            "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint me:7 --rdzv-conf is_host=False",
            Rendezvous("me", 7, ours=False),
        ),
        ("--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint me:2379", Rendezvous("me", 2379, ours=True)),
        ("--nnodes 2 --master-addr you --node-rank 0", Rendezvous("you", 29500, ours=True)),
        ("--nnodes 2 --master-addr me --master-port 7 --node-rank 1", Rendezvous("me", 7, ours=False)),
    ],
)
def test_rendezvous_is_found_as_by_torchrun(line: str, meeting: Rendezvous) -> None:
    assert find_rendezvous(read(line), lambda host: host == "me") == meeting


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a", ("a", 1)),
        ("a:7", ("a", 7)),
        ("[::1]:7", ("::1", 7)),
        (":7", ("localhost", 7)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
    ],
)
def test_endpoints_are_parsed(text: str, place: tuple[str, int]) -> None:
    assert parse_endpoint(text, 1) == place


@pytest.mark.parametrize("text", ["a:b", "a:99999", "a b", "::1:7", "a:7:8"])
def test_invalid_endpoint_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_endpoint(text, 1)


@pytest.mark.parametrize(
    "line", ["--nnodes 2 --rdzv-endpoint a", "--nnodes 2 --rdzv-backend c10d --rdzv-conf is_host=x"]
)
def test_impossible_rendezvous_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        find_rendezvous(read(line), lambda host: False)


def test_own_addresses_are_recognised() -> None:
    assert is_own_address("localhost") and is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1") and not is_own_address("no-such-host.invalid")


@pytest.mark.parametrize(
    ("conf", "environ", "where"),
    [
        ("", {"DALSEGNO_RUN_HANG_TIMEOUT": "soon"}, "DALSEGNO_RUN_HANG_TIMEOUT"),
        ("", {"DALSEGNO_RUN_STANDBY": "maybe"}, "DALSEGNO_RUN_STANDBY"),
        (",last_call_timeout=soon", {}, "--rdzv-conf last_call_timeout"),
    ],
)
def test_wrong_values_end_every_node_at_once(conf: str, environ: dict[str, str], where: str) -> None:
    """These values are used only on the node of the rendezvous, for which this node would wait."""
    line = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 192.0.2.1:7 --rdzv-conf join_timeout=1{conf}"
    args = parse_torchrun([*line.split(), __file__])
    assert args is not None
    with pytest.raises(UsageError) as caught:
        launch(args, LaunchContext(environ, lambda text: None, lambda *_: None))
    assert caught.value.where == where
