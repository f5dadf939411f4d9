"""Tests of reading a node's expected parts from slurm.conf."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.health.expected import Expected, expected_of

GOLDEN = Path(__file__).parents[1] / "golden" / "slurm"
SMALL = """
ClusterName=x   # ours
SlurmctldHost=head(10.0.0.1)
SlurmctldHost=spare
slurmdport=7000
AuthInfo="socket=/run/m.sock,ttl=60"
NodeName=DEFAULT RealMemory=1000 \\
  Gres=gpu:h100:8
NodeName=gpu-[1-3] NodeAddr=10.0.0.[11-13] Port=[7001-7003]
NodeName=cpu-1 Gres=craynetwork:4
"""


def test_a_node_is_found_in_a_line_for_several_nodes() -> None:
    controllers = ("head", "spare")
    assert expected_of("gpu-2", SMALL) == Expected(
        "gpu-2", True, 8, "h100", 1000, ("10.0.0.12", 7002), "/run/m.sock", controllers
    )
    assert expected_of("cpu-1", SMALL) == Expected(
        "cpu-1", True, 0, "", 1000, ("cpu-1", 7000), "/run/m.sock", controllers
    )


@pytest.mark.parametrize(
    ("gres", "gpus", "kind"),
    [
        ("gpu:8", 8, ""),
        ("gpu:h100:8,nvme:2", 8, "h100"),
        ("gpu:a100:4,gpu:v100:2", 6, ""),
        ("gpu:1g.10gb:14", None, ""),  # parts of GPUs (MIG); Slurm does not report on how many GPUs they are
        ("craygpu:4,shard:h100:32", 0, ""),
        ("gpu:h100:8(S:0-1)", 8, "h100"),
    ],
)
def test_gpus_are_counted_from_gres(gres: str, gpus: int | None, kind: str) -> None:
    found = expected_of("gpu-1", f"NodeName=gpu-1 Gres={gres}")
    assert (found.gpus, found.gpu_type, found.named) == (gpus, kind, True)


def test_our_own_slurm_conf_is_parsed() -> None:
    text = (GOLDEN / "everything" / "slurm.conf").read_text()
    found = expected_of("train-6", text)
    assert (found.gpus, found.gpu_type, found.slurmd) == (8, "a100", ("10.1.0.16", 6818))
    assert found.munge == "/var/lib/dalsegno/clusters/prod/run/munge.socket"


@pytest.mark.parametrize("text", ["", "NodeName=gpu-[1-", "NodeName\n=\n\x00", "NodeName=gpu-1 Port=x Gres=gpu:many"])
def test_nothing_is_expected_without_a_valid_line(text: str) -> None:
    assert expected_of("gpu-1", text).gpus in (None, 0)
    assert expected_of("gpu-1", "").munge is None
    assert expected_of("gpu-1", "AuthType=auth/slurm\nNodeName=gpu-1").munge is None


def test_the_spool_folder_may_contain_the_node_name():
    assert expected_of("gpu-1", "SlurmdSpoolDir=/scratch/%n/spool\nNodeName=gpu-1\n").spool == "/scratch/gpu-1/spool"
    assert expected_of("gpu-1", "NodeName=gpu-1\n").spool == "/var/spool/slurmd"
