"""Opening a cluster for a cluster file whose target is not that of the existing cluster of the same name."""

import json
from itertools import permutations
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli.main import cli
from dalsegno.cluster import ClusterPlace, open_target
from dalsegno.errors import DalsegnoError, UsageError

TARGETS = ("local", "ssh", "parallelcluster", "hyperpod", "oci")
SSH_FILE = "name: demo\ntarget: ssh\nssh: {hosts: {head: 192.0.2.1, train-1: 192.0.2.2}}\n"


def existing(home: Path, state: str) -> ClusterPlace:
    place = ClusterPlace("demo", home)
    place.folder.mkdir(parents=True)
    (place.folder / "state.json").write_text(state)
    return place


@pytest.mark.parametrize(("there", "wanted"), list(permutations(TARGETS, 2)))
def test_cluster_on_another_target_is_refused_with_both_targets(tmp_path: Path, there: str, wanted: str):
    place = existing(tmp_path, json.dumps({"target": there}))
    with pytest.raises(UsageError) as caught:
        open_target(wanted, place)
    assert caught.value.what == f"cluster demo is on target {there}, and the file says {wanted}"
    assert "`dalsegno down demo`, which ends its jobs" in caught.value.hint


@pytest.mark.parametrize("target", TARGETS)
def test_cluster_on_the_target_of_the_file_is_opened(tmp_path: Path, target: str):
    assert open_target(target, existing(tmp_path, json.dumps({"target": target}))).kind == target


def test_file_of_a_cluster_that_is_not_ours_is_refused_for_that_reason(tmp_path: Path):
    with pytest.raises(DalsegnoError, match="did not create"):
        open_target("existing", existing(tmp_path, '{"target": "local"}'))


def test_state_that_names_no_target_is_left_to_the_target_to_report(tmp_path: Path):
    assert open_target("ssh", existing(tmp_path, "{")).kind == "ssh"


@pytest.mark.parametrize("command", ["plan", "up"])
def test_command_with_a_file_of_another_target_names_both(tmp_path: Path, monkeypatch, command: str):
    existing(tmp_path, '{"target": "local"}')
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{SSH_FILE}partitions: [{{name: train, nodes: 1}}]\n")
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path))
    error = CliRunner().invoke(cli, [command, str(file)]).exception
    assert isinstance(error, UsageError), error
    assert error.what == "cluster demo is on target local, and the file says ssh"
