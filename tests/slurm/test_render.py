"""Tests of Slurm's files: whole files against golden files, and single rules that are easy to break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.slurm.layout import Cgroups, DaemonHost, DatabaseStorage, Dbd, Layout, NodePlace, Paths, Spank
from dalsegno.slurm.render import (
    render_cgroup_conf,
    render_gres_conf,
    render_plugstack_conf,
    render_slurm_conf,
    render_slurmdbd_conf,
    render_topology_conf,
)
from dalsegno.slurm.versions import Version, rest_api
from dalsegno.spec.facts import Cluster, Node, Partition, Slurm
from tests.slurm.clusters import CLUSTERS, names, nodes

HERE = Version(22, 5, 8)
RENDERERS = {
    "slurm.conf": render_slurm_conf,
    "gres.conf": render_gres_conf,
    "cgroup.conf": render_cgroup_conf,
    "topology.conf": render_topology_conf,
    "slurmdbd.conf": render_slurmdbd_conf,
}
GOLDEN = [
    (cluster, file) for cluster in CLUSTERS for file in RENDERERS if (cluster, file) != ("smallest", "slurmdbd.conf")
]


@pytest.mark.parametrize(("name", "file"), GOLDEN)
def test_files_match_the_golden_files(name: str, file: str, golden: Callable[[str, str], None]) -> None:
    cluster, layout = CLUSTERS[name]
    golden(f"slurm/{name}/{file}", RENDERERS[file](cluster, layout, HERE))


def cluster_of(*some: Node, **facts: object) -> Cluster:
    return Cluster("c", "local", some, (Partition("main", names(some), default=True),), **facts)  # type: ignore[arg-type]


def layout_of(places: dict[str, NodePlace] | None = None, **facts: object) -> Layout:
    return Layout(Paths.under("/s"), (DaemonHost("head", "10.0.0.1"),), places or {}, **facts)  # type: ignore[arg-type]


def conf(cluster: Cluster, layout: Layout | None = None, slurm: Version = HERE) -> list[str]:
    return render_slurm_conf(cluster, layout or layout_of(), slurm).splitlines()


def starting(lines: list[str], start: str) -> list[str]:
    return [line for line in lines if line.startswith(start)]


def test_256_loopback_nodes_are_one_line() -> None:
    some = nodes("n", 256)
    places = {node.name: NodePlace("127.0.0.1", "box", 17000 + at) for at, node in enumerate(some, 1)}
    (line,) = starting(conf(cluster_of(*some), layout_of(places)), "NodeName")
    assert line.startswith("NodeName=n[1-256] NodeHostname=box NodeAddr=127.0.0.1 Port=[17001-17256] CPUs=4 ")


def test_virtual_hosts_share_a_line_over_their_addresses() -> None:
    some = nodes("train-", 4)
    places = {node.name: NodePlace(f"10.1.0.{10 + at}") for at, node in enumerate(some, 1)}
    (line,) = starting(conf(cluster_of(*some), layout_of(places)), "NodeName")
    assert line.startswith("NodeName=train-[1-4] NodeAddr=10.1.0.[11-14] Port=6818 ")


def test_ports_with_gaps_share_one_bracket() -> None:
    places = {"n1": NodePlace(port=7001), "n2": NodePlace(port=8001)}
    assert "Port=[7001,8001]" in starting(conf(cluster_of(*nodes("n", 2)), layout_of(places)), "NodeName")[0]


def test_different_nodes_get_separate_lines() -> None:
    lines = starting(conf(cluster_of(*nodes("a", 2), *nodes("b", 2, cpus=8))), "NodeName")
    assert [line.split()[0] for line in lines] == ["NodeName=a[1-2]", "NodeName=b[1-2]"]


def test_a_spare_starts_drained() -> None:
    cluster = cluster_of(Node("n1", 4, 8000), Node("n2", 4, 8000, spare=True))
    waiting = starting(conf(cluster), "NodeName=n2")[0]
    assert waiting.endswith("State=DRAIN Reason=dalsegno:spare")


def test_simulated_nodes_have_sockets_and_real_ones_only_a_cpu_count() -> None:
    cluster = cluster_of(Node("n1", 96, 8000))
    assert "CPUs=96 Sockets=2 CoresPerSocket=48" in starting(conf(cluster, layout_of(overrides=True)), "NodeName")[0]
    assert "Sockets" not in starting(conf(cluster), "NodeName")[0]


def test_raw_settings_override_ours_in_any_case() -> None:
    slurm = Slurm(extra={"returntoservice": "2", "Brandnew": "1"})
    lines = conf(cluster_of(*nodes("n", 1), slurm=slurm))
    keys = [line.split("=")[0].lower() for line in lines if "=" in line and not line.startswith(("#", "Node", "Part"))]
    assert len(keys) == len(set(keys))
    assert "returntoservice=2" in lines and "Brandnew=1" in lines


def test_raw_settings_of_a_partition_override_ours() -> None:
    partition = Partition("main", ("n1",), extra={"maxtime": "5", "DefMemPerGPU": "100"})
    cluster = replace(cluster_of(*nodes("n", 1)), partitions=(partition,))
    (line,) = starting(conf(cluster), "PartitionName")
    assert "MaxTime=" not in line and "maxtime=5" in line
    assert "DefMemPerCPU" not in line and "DefMemPerGPU=100" in line


def test_default_cpus_and_memory_are_proportional() -> None:
    (line,) = starting(conf(cluster_of(*nodes("n", 2, cpus=32, memory_mib=64000, gpus=8))), "PartitionName")
    assert "DefCpuPerGPU=4 DefMemPerCPU=2000" in line


@pytest.mark.parametrize("key", ["DefMemPerNode", "defmempercpu"])
def test_a_cluster_wide_memory_default_of_the_user_replaces_ours(key: str) -> None:
    lines = conf(cluster_of(*nodes("n", 1), slurm=Slurm(extra={key: "100"})))
    assert "DefMem" not in starting(lines, "PartitionName")[0] and f"{key}=100" in lines


def test_without_accounting_nothing_points_at_slurmdbd() -> None:
    assert not starting(conf(cluster_of(*nodes("n", 1), slurm=Slurm(enforce=("limits",)))), "AccountingStorage")


def test_devices_other_than_gpus_are_declared_and_counted() -> None:
    chips = nodes("t", 1, gpus=16, gres="neuron", gpu_type="trainium")
    gpus = nodes("g", 1, gpus=8, gpu_type="h100")
    dbd = Dbd(DaemonHost("head"), DatabaseStorage("slurm"))
    some = conf(cluster_of(*chips), layout_of(dbd=dbd))
    assert starting(some, "GresTypes=") == ["GresTypes=neuron"]
    assert starting(some, "AccountingStorageTRES=") == [
        "AccountingStorageTRES=gres/gpu,gres/neuron,gres/neuron:trainium"
    ]
    assert starting(conf(cluster_of(*gpus, *chips)), "GresTypes=") == ["GresTypes=gpu,neuron"]


def test_only_gpus_set_the_default_of_cpus_per_gpu() -> None:
    chips, gpus = nodes("t", 1, cpus=32, gpus=16, gres="neuron"), nodes("g", 1, cpus=32, gpus=8)
    (line,) = starting(conf(cluster_of(*gpus, *chips)), "PartitionName=")
    assert "DefCpuPerGPU=4 " in line
    assert "DefCpuPerGPU" not in "".join(conf(cluster_of(*chips)))


def test_a_backup_takes_over_after_5_seconds() -> None:
    layout = replace(layout_of(), controllers=(DaemonHost("a"), DaemonHost("b")))
    lines = conf(cluster_of(*nodes("n", 1)), layout)
    assert starting(lines, "SlurmctldHost") == ["SlurmctldHost=a", "SlurmctldHost=b"]
    assert "SlurmctldTimeout=5" in lines


def test_paths_with_blanks_are_quoted() -> None:
    layout = replace(layout_of(), paths=Paths.under("/my files"))
    lines = conf(cluster_of(*nodes("n", 1)), layout)
    assert 'AuthInfo="socket=/my files/run/munge.socket"' in lines
    assert 'SlurmdSpoolDir="/my files/spool/%n"' in lines


@pytest.mark.parametrize("value", ['say "hi"', "two\nlines", "ends\\"])
def test_value_that_slurm_files_cannot_contain_is_refused(value: str) -> None:
    with pytest.raises(DalsegnoError, match="cannot contain"):
        conf(cluster_of(*nodes("n", 1), slurm=Slurm(extra={"Foo": value})))


def test_hash_in_a_value_is_escaped() -> None:
    assert "Foo=a\\#b" in conf(cluster_of(*nodes("n", 1), slurm=Slurm(extra={"Foo": "a#b"})))


@pytest.mark.parametrize("file", ["/a b/nvidia0", "/a,b/nvidia0", "/a[1]/nvidia0"])
def test_a_gpu_file_that_slurmd_would_misread_is_refused(file: str) -> None:
    layout = layout_of({"n1": NodePlace(gpu_files=(file,))})
    with pytest.raises(DalsegnoError, match="cannot read the GPU device file"):
        render_gres_conf(cluster_of(*nodes("n", 1, gpus=1)), layout, HERE)


def test_a_gpu_without_its_file_is_refused() -> None:
    layout = layout_of({"n1": NodePlace(gpu_files=("/dev/nvidia0",))})
    with pytest.raises(DalsegnoError, match="2 GPUs but 1 device files"):
        render_gres_conf(cluster_of(*nodes("n", 1, gpus=2)), layout, HERE)


def test_real_gpus_use_driver_device_files() -> None:
    text = render_gres_conf(cluster_of(*nodes("n", 2, gpus=8, gpu_type="h100")), layout_of(), HERE)
    assert "NodeName=n[1-2] Name=gpu Type=h100 File=/dev/nvidia[0-7]" in text


@pytest.mark.parametrize(
    ("slurm", "has", "lacks"),
    [
        (Version(21, 8), "CgroupAutomount=no", "IgnoreSystemd"),
        (Version(22, 5), "IgnoreSystemd=yes", "EnableControllers"),
        (Version(23, 2), "EnableControllers=yes", "nothing"),
        (Version(23, 11), "IgnoreSystemd=yes", "CgroupAutomount"),
        (Version(24, 11), "EnableControllers=yes", "CgroupAutomount"),
    ],
)
def test_cgroup_settings_follow_the_version(slurm: Version, has: str, lacks: str) -> None:
    cluster, layout = CLUSTERS["everything"]
    text = render_cgroup_conf(cluster, layout, slurm)
    assert has in text and lacks not in text


@pytest.mark.parametrize(
    ("plugin", "slurm", "has"),
    [
        ("cgroup/v2", Version(22, 5), "CgroupPlugin=cgroup/v2\nCgroupAutomount=yes\nIgnoreSystemd=yes\n"),
        ("cgroup/v2", Version(23, 2), "CgroupAutomount=no\nIgnoreSystemd=yes\nEnableControllers=yes\n"),
        ("cgroup/v2", Version(24, 11), "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\nEnableControllers=yes\n"),
        ("none", Version(22, 5), "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"),
        ("none", Version(24, 11), "CgroupPlugin=disabled\n"),
    ],
)
def test_cgroup_v2_and_none_at_all_follow_the_version(plugin: str, slurm: Version, has: str) -> None:
    layout = replace(layout_of(), cgroups=Cgroups(plugin=plugin, ignore_systemd=plugin == "cgroup/v2"))
    assert has in render_cgroup_conf(cluster_of(*nodes("n", 1)), layout, slurm)


def test_slurm_conf_settings_follow_the_version() -> None:
    cluster, layout = CLUSTERS["everything"]
    assert "AccountingStoreFlags=job_comment" in conf(cluster, layout, Version(21, 8))
    assert "AccountingStoreJobComment=YES" in conf(cluster, layout, Version(20, 11))


def test_slurmdbd_without_a_host_is_refused() -> None:
    with pytest.raises(DalsegnoError, match="no host for slurmdbd"):
        render_slurmdbd_conf(cluster_of(*nodes("n", 1)), layout_of(), HERE)


@pytest.mark.parametrize(("mode", "written"), [("", "REQUEUE"), ("SUSPEND", "SUSPEND,GANG"), ("cancel", "CANCEL")])
def test_preemption_has_a_mode_slurm_accepts(mode: str, written: str) -> None:
    lines = conf(cluster_of(*nodes("n", 1), slurm=Slurm(preempt_by="partition", preempt_mode=mode)))
    assert "PreemptType=preempt/partition_prio" in lines and f"PreemptMode={written}" in lines


def test_versions_are_parsed_and_ordered() -> None:
    assert Version.parse("slurm-wlm 22.05.8") == (22, 5, 8)
    assert Version.parse("slurm 24.11.0-0rc1") > Version(23, 11, 10)
    assert str(Version(22, 5)) == "22.05.0"
    with pytest.raises(DalsegnoError):
        Version.parse("slurm")


def test_our_plugin_is_required_and_slurm_conf_names_its_file() -> None:
    cluster, layout = CLUSTERS["smallest"]
    layout = replace(layout, spank=Spank("/etc/plugstack.conf", "/lib/ours.so", ("data=/var/%n",)))
    assert "\nPlugStackConfig=/etc/plugstack.conf\n" in render_slurm_conf(cluster, layout, HERE)
    last = render_plugstack_conf(cluster, layout, HERE).splitlines()[-1]
    assert last == "required /lib/ours.so data=/var/%n"


def test_a_plugin_below_a_folder_with_a_blank_is_refused() -> None:
    cluster, layout = CLUSTERS["smallest"]
    layout = replace(layout, spank=Spank("/etc/plugstack.conf", "/my lib/ours.so"))
    with pytest.raises(DalsegnoError, match="does not allow blanks"):
        render_plugstack_conf(cluster, layout, HERE)


# Differences between releases


@pytest.mark.parametrize(
    ("slurm", "listed"),
    [(Version(22, 5, 8), True), (Version(22, 5, 6), False), (Version(22, 5, 9), False), (Version(26, 5, 5), False)],
)
def test_submit_hosts_are_listed_only_for_releases_that_need_them(slurm: Version, listed: bool) -> None:
    cluster, layout = CLUSTERS["smallest"]
    text = render_slurm_conf(cluster, replace(layout, submit_hosts={"login-shell": "10.0.0.1"}), slurm)
    assert ("NodeName=login-shell NodeAddr=10.0.0.1 CPUs=1 State=FUTURE\n" in text) is listed


@pytest.mark.parametrize(
    ("name", "slurm", "hint"),
    [
        ("accountingstorageloc", Version(26, 5, 5), "StorageLoc of slurmdbd.conf"),
        ("SlurmctldPlugstack", Version(23, 2), "leave it out"),
        ("PrologTimeout", Version(24, 11, 5), "PrologEpilogTimeout"),
        ("MetricsType", Version(22, 5, 8), "leave it out"),
    ],
)
def test_setting_unknown_to_the_release_is_refused(name: str, slurm: Version, hint: str) -> None:
    cluster, layout = CLUSTERS["smallest"]
    with pytest.raises(DalsegnoError, match=name) as caught:
        render_slurm_conf(replace(cluster, slurm=Slurm(extra={name: "x"})), layout, slurm)
    assert hint in caught.value.hint


def test_setting_known_to_the_release_is_written() -> None:
    cluster, layout = CLUSTERS["smallest"]
    wanted = replace(cluster, slurm=Slurm(extra={"PrologTimeout": "60"}))
    assert "PrologTimeout=60\n" in render_slurm_conf(wanted, layout, Version(25, 5))


@pytest.mark.parametrize(
    ("slurm", "name"),
    [
        (Version(22, 5, 8), "v0.0.38"),
        (Version(23, 2, 1), "v0.0.39"),
        (Version(23, 11, 4), "slurmctld"),
        (Version(26, 5), "slurmctld"),
    ],
)
def test_rest_api_name_follows_the_release(slurm: Version, name: str) -> None:
    assert rest_api(slurm) == name
