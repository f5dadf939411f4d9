"""Tests of `dalsegno adopt`: from recorded outputs of Slurm to a valid cluster file, the platform, and what works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.adopt.abilities import Reach, find_abilities
from dalsegno.adopt.describe import Description, describe
from dalsegno.adopt.found import FoundCluster, PlatformKind
from dalsegno.adopt.render import render_valid, with_armed
from dalsegno.cli.cluster import adopt as command_module
from dalsegno.errors import DalsegnoError
from dalsegno.slurm.parse.partitions import PartitionSettings, parse_partition_settings, parse_topology
from dalsegno.spec.facts import Cluster
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from tests.adopt.recordings import ALL, SLURM, found_in, without


def text_of(found: FoundCluster) -> str:
    return render_valid(describe(found), "header")


def cluster_of(found: FoundCluster) -> Cluster:
    return resolve(parse_spec(text_of(found)))


def remarks(text: str) -> list[str]:
    return [line.removeprefix("# - ") for line in text.splitlines() if line.startswith("# - ")]


@pytest.mark.parametrize("name", ALL)
def test_every_recorded_cluster_becomes_a_valid_file(name):
    found = found_in(name)
    cluster = cluster_of(found)
    assert cluster.target == "existing" and cluster.partitions
    assert cluster.health.mode == "observe" and cluster.health.armed == ()


@pytest.mark.parametrize("name", SLURM)
def test_recorded_release_is_described(name):
    found = found_in(name)
    cluster = cluster_of(found)
    assert (cluster.name, cluster.head, found.version) == ("lab", "vm", name.removeprefix("slurm-"))
    train, debug, cpu = cluster.partitions
    assert (train.name, train.default, train.time_limit_min, len(train.nodes)) == ("train", True, 120, 15)
    assert (debug.nodes, debug.time_limit_min) == (("n1", "n2"), 10)
    assert cpu.nodes == ("cpu-01",) and cpu.time_limit_min is None
    sizes = {node.name: (node.cpus, node.memory_mib, node.gpus, node.gpu_type) for node in cluster.nodes}
    assert sizes["n1"] == (32, 64000, 8, "h100") and sizes["cpu-01"] == (8, 16000, 0, "")
    assert cluster.slurm.accounting and [qos.name for qos in cluster.slurm.qos] == ["high"]
    assert [account.name for account in cluster.accounts] == ["vision"]
    assert [each.name for each in cluster.reservations] == ["upgrade", "class"]
    assert "partition empty has no nodes and is left out" in remarks(text_of(found))


def test_policy_limits_switches_and_users_are_described():
    found = found_in("slurm-23.11")
    cluster = cluster_of(found)
    everything, a100 = cluster.partitions
    assert (everything.name, everything.time_limit_min, everything.oversubscribe) == ("all", 7 * 24 * 60, "FORCE:2")
    assert (a100.allow_accounts, a100.priority_tier) == (("vision", "nlp"), 10)
    assert cluster.slurm.backup_controller and cluster.head == "ctl1"
    long, low = cluster.slurm.qos
    assert (long.preempts, long.max_tres_per_user, long.max_jobs_per_user) == (("low",), {"gres/gpu": 8}, 4)
    assert low.group_tres == {"node": 2, "cpu": 64}
    assert [switch.name for switch in cluster.slurm.topology] == ["leaf1", "leaf2", "spine"]
    (ana,) = cluster.users
    assert (ana.name, ana.accounts, ana.default_account) == ("ana", ("nlp", "vision"), "vision")


def test_setting_without_a_key_in_the_file_becomes_a_comment():
    text = text_of(found_in("slurm-23.11"))
    said = "\n".join(remarks(text))
    for part in (
        "Slurm's name of the cluster is 'Campus.GPU'",
        "nodes in no partition: old-1",
        "partition all: its nodes cpu[1-2] are different: 32 CPUs",
        "Slurm spells the GPU type 'A100'",
        "slurm.conf: Prolog=/etc/slurm/prolog.sh",
        "hidden.part",  # names that the file refuses
        "bo.b",
        "GPU-Users",
    ):
        assert part in said, part


@pytest.mark.parametrize(
    ("name", "kind", "evidence"),
    [
        ("parallelcluster", PlatformKind.PARALLELCLUSTER, "ResumeProgram is /opt/parallelcluster/scripts/slurm/"),
        ("parallelcluster", PlatformKind.PARALLELCLUSTER, "all nodes are named like gpu-st-p5-1"),
        ("hyperpod", PlatformKind.HYPERPOD, "/opt/sagemaker_cluster exists"),
        ("oci", PlatformKind.OCI, "HealthCheckProgram is /opt/oci-hpc/"),
        ("slurm-23.11", PlatformKind.PLAIN, ""),
    ],
)
def test_platform_is_detected_with_its_evidence(name, kind, evidence):
    found = found_in(name)
    assert found.platform.kind is kind
    assert cluster_of(found).platform == kind.value
    assert any(each.startswith(evidence) for each in found.platform.evidence) or not evidence


def test_nodes_of_a_platform_keep_their_sizes():
    cluster = cluster_of(found_in("parallelcluster"))
    assert {node.name: (node.gpus, node.weight) for node in cluster.nodes if "cpu" in node.name} == {
        f"cpu-dy-c6i-{number}": (0, 1000) for number in (1, 2, 3)
    }


def test_hostile_names_do_not_break_the_file():
    found = found_in("hostile")
    text = text_of(found)
    data = yaml.safe_load(text)
    names = [partition["name"] for partition in data["partitions"]]
    assert names == ["on", "0123", "null"]
    kept = resolve(parse_spec(text)).partitions[0].nodes
    assert kept == ("no", "null", "1e5", "0x10"), "names that YAML reads as other types stay text"
    assert data["name"] == "e-v-il"
    for line in text.splitlines():
        assert line.isprintable()
    assert {each["name"] for each in data.get("accounts", [])} == {"ok"}


TEXTS = st.text(min_size=1, max_size=30)
EXTRAS = st.dictionaries(st.text(min_size=1, max_size=10), TEXTS, max_size=3)


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=4), TEXTS, st.lists(TEXTS, max_size=3), EXTRAS)
def test_any_text_gives_a_valid_file(cluster, nodes, partition, allowed, extra):
    found = FoundCluster(
        {"ClusterName": cluster, "SlurmctldHost[0]": partition, "Prolog": cluster},
        (
            PartitionSettings("main", ("n1",)),
            PartitionSettings(
                partition, tuple(nodes), allow_accounts=tuple(allowed), oversubscribe=cluster, extra=extra
            ),
        ),
        (),
    )
    spec = parse_spec(text_of(found))
    assert spec.partitions[0].name == "main"


def test_a_cluster_without_partitions_is_an_error():
    with pytest.raises(DalsegnoError) as caught:
        render_valid(Description({"name": "x", "target": "existing", "health": {"mode": "observe"}}), "header")
    assert "needs `partitions`" in caught.value.what and caught.value.hint


def test_unreadable_accounts_are_named_and_the_rest_is_described():
    found = without(found_in("hyperpod"), AccountingStorageType="accounting_storage/slurmdbd")
    assert found.has_accounting and not found.accounts.accounts
    assert found_in("slurm-23.11").unread == ()
    assert [each.partition(":")[0] for each in found_in("hyperpod").unread] == ["reservations"]


def reach(found: FoundCluster) -> dict[str, Reach]:
    return {each.command: each.reach for each in find_abilities(found)}


def test_abilities_say_who_can_use_each_command():
    found = found_in("slurm-23.11", user="ana")
    assert {reach(found)[each] for each in ("run", "torchrun", "bench", "exporter", "why")} == {Reach.USER}
    assert reach(found)["run --container-image"] is Reach.ADMINISTRATOR
    assert reach(found)["web"] is Reach.USER
    exporter = next(each.text for each in find_abilities(found) if each.command == "exporter")
    assert "PrivateData hides jobs, users" in exporter


def test_user_without_an_account_cannot_run():
    assert reach(found_in("slurm-23.11", user="eve"))["run"] is Reach.ADMINISTRATOR
    lax = without(found_in("slurm-23.11", user="eve"), AccountingStorageEnforce="none")
    assert reach(lax)["run"] is Reach.USER


def test_container_plugin_is_found_in_plugstack_conf():
    on = found_in("slurm-23.11", plugstack="include /etc/slurm/plugstack.conf.d/*\nrequired spank_pyxis.so\n")
    off = found_in("slurm-23.11", plugstack="# required spank_pyxis.so\n")
    assert (on.container_options, off.container_options) == (True, False)
    assert reach(on)["run --container-image"] is Reach.USER


def test_drains_on_parallelcluster_are_explained():
    texts = {each.command: each.text for each in find_abilities(found_in("parallelcluster"))}
    assert "clustermgtd replaces a drained node" in texts["adopt arm PARTITION"]


# Parsers


def test_partition_settings_keep_what_is_not_at_its_default():
    settings = {
        each.name: each for each in parse_partition_settings((ALL["slurm-23.11"] / "partitions.txt").read_text())
    }
    assert settings["all"].extra == {"QoS": "part-all", "DefMemPerCPU": "2000"}
    assert settings["a100"].allow_groups == ("GPU-Users",) and settings["a100"].max_time_s == 36 * 3600
    assert settings["hidden.part"].hidden


def test_topology_of_another_kind_is_empty():
    assert parse_topology("BlockName=b1 BlockIndex=0 Nodes=n[1-4] BlockSize=4\n") == []


# The command


@pytest.fixture
def call(monkeypatch, tmp_path) -> Callable[..., object]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_module, "find_cluster", lambda: found_in("slurm-23.11"))

    def run(*args: str):
        done = CliRunner().invoke(command_module.command, list(args))
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return run


def test_command_writes_the_file_once(call):
    done = call()
    assert parse_spec(Path("cluster.yaml").read_text()).name == "campus-gpu"
    assert "works as an ordinary user" in done.stderr and "wrote cluster.yaml" in done.stderr and done.stdout == ""
    with pytest.raises(DalsegnoError) as caught:
        call()
    assert caught.value.what == "the file already exists" and "--force" in caught.value.hint
    assert call("--force").exit_code == 0


def test_command_prints_the_file_or_json(call):
    assert parse_spec(call("-o", "-").stdout).target == "existing"
    answer = json.loads(call("-o", "-", "--json").stdout)
    assert (answer["platform"], answer["nodes"], answer["gpus"]) == ("plain", 7, 24)
    assert parse_spec(answer["text"]).name == "campus-gpu"
    assert not Path("cluster.yaml").exists()


def test_arm_and_disarm_change_one_line(call):
    call()
    before = Path("cluster.yaml").read_text()
    call("arm", "all")
    call("arm", "a100")
    assert parse_spec(Path("cluster.yaml").read_text()).health.armed == ["all", "a100"]
    call("disarm", "all")
    call("disarm", "a100")
    assert Path("cluster.yaml").read_text() == before
    with pytest.raises(DalsegnoError) as caught:
        call("arm", "gpu")
    assert "`health.armed` names `gpu`, which is not a partition" in caught.value.what


def test_arming_needs_a_line_to_change():
    assert with_armed("health:\n  mode: observe\n", ["a"]) is None
    assert with_armed("x:\n  armed: [b]\nhealth:\n  # why\n  armed: []  # none\n", ["a"]) == (
        "x:\n  armed: [b]\nhealth:\n  # why\n  armed: [a]  # none\n"
    )
