"""The ranks of nodes in a torchrun, and the address of the first."""

from __future__ import annotations

import pytest

from dalsegno.runs.coordinator.generations.group import in_order
from dalsegno.runs.coordinator.site import GenerationLayout
from dalsegno.runs.torchrun.args import TorchrunArgs, parse_torchrun
from dalsegno.runs.torchrun.coordinator import TorchrunSite
from dalsegno.runs.torchrun.rendezvous import agent_name, find_rendezvous, host_of


def read(line: str) -> TorchrunArgs:
    args = parse_torchrun([*line.split(), "train.py"])
    assert args is not None
    return args


def test_names_sort_by_the_given_order() -> None:
    static = [agent_name(TorchrunArgs("t.py", nnodes="12", node_rank=rank), {}, host, 7) for rank, host in
              [(10, "a"), (2, "gpu-node-99"), (0, "z")]]  # fmt: skip
    assert [host_of(name) for name in sorted(static, key=in_order)] == ["z", "gpu-node-99", "a"]
    c10d = TorchrunArgs("t.py", rdzv_backend="c10d", node_rank=5)
    assert agent_name(c10d, {"SLURM_PROCID": "3"}, "n", 7) == "3@n#7"
    assert agent_name(c10d, {}, "n", 7) == "0@n#7"


def test_numbers_in_names_sort_as_numbers() -> None:
    names = ["gpu-10", "gpu-9", "a100-2", "gpu-9b", "gpu"]
    assert sorted(names, key=in_order) == ["a100-2", "gpu", "gpu-9", "gpu-9b", "gpu-10"]


@pytest.mark.parametrize(
    ("line", "hosts", "master"),
    [
        ("--standalone", ["127.0.0.1"], "127.0.0.1"),
        ("--master-addr 10.0.0.9", ["127.0.0.1"], "10.0.0.9"),
        ("--nnodes 2 --master-addr head --node-rank 1", ["10.0.0.1", "10.0.0.2"], "head"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:1", ["10.0.0.1", "10.0.0.2"], "10.0.0.1"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:1", ["127.0.0.1", "10.0.0.2"], "head"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:1", ["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
    ],
)
def test_master_address_is_reachable_by_every_node(line: str, hosts: list[str], master: str) -> None:
    args = read(line)
    site = TorchrunSite(args, "j", "id", 2, find_rendezvous(args, lambda host: True))
    env = site.node_env(GenerationLayout(1, tuple(hosts), 2, 4242, 0), 0, {})
    assert env.common["MASTER_ADDR"] == master
    assert env.common["TORCHELASTIC_SIGNALS_TO_HANDLE"] == args.signals_to_handle


@pytest.mark.parametrize(("agent", "host"), [("0@gpu-1.x#7", "gpu-1.x"), ("0@a\x1b[2J, b\n#7", "a??2J??b?"), ("", "?")])
def test_host_in_an_agents_name_is_safe_to_print(agent: str, host: str) -> None:
    assert host_of(agent) == host
