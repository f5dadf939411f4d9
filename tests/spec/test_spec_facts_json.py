"""Tests of converting facts to JSON and back."""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.spec.facts import Cluster, Node, Qos, facts_from_json, facts_to_json

TEXT = """
name: demo
target: local
partitions:
  - {name: train, nodes: 3, spares: 1, instance: p5.48xlarge, extra: {GraceTime: 5}}
  - {name: debug, nodes_from: train, time_limit: 1h}
slurm:
  enforce: limits
  qos: [{name: high, preempts: low, max_tres_per_user: {gres/gpu: 8}, usage_factor: 0.5}, {name: low}]
  topology: {nodes_per_switch: 2}
users: [{name: ann}]
"""


def test_cluster_survives_a_json_round_trip(cluster):
    found = cluster(TEXT)
    text = json.dumps(facts_to_json(found))
    assert facts_from_json(Cluster, json.loads(text)) == found


def test_json_of_another_version_is_read():
    assert facts_from_json(Node, {"name": "n", "cpus": 1, "memory_mib": 2, "colour": "red"}) == Node("n", 1, 2)


def test_integer_is_accepted_for_a_float():
    assert facts_from_json(Qos, {"name": "a", "usage_factor": 2}).usage_factor == 2.0


@pytest.mark.parametrize(
    "data", [{}, {"name": "n"}, {"name": 3, "cpus": 1, "memory_mib": 2}, {"name": "n", "cpus": "1", "memory_mib": 2}]
)
def test_invalid_node_is_refused(data):
    with pytest.raises(DalsegnoError, match="a saved node cannot be read"):
        facts_from_json(Node, data)


def test_any_dataclass_can_be_converted():
    @dataclass(frozen=True)
    class Mark:
        step: int = 0
        ratio: float = 0.0

    assert facts_to_json(Mark(3, 0.5)) == {"step": 3, "ratio": 0.5}


def test_facts_do_not_import_pydantic():
    code = "import sys, dalsegno.spec.facts; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
