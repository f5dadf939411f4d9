"""The plans of a cluster on ssh hosts: what each host gets, what is refused, and what `plan` says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.errors import TargetError
from dalsegno.setup.delivery import ChangeAction, ChangeKind, MachineChange
from dalsegno.setup.inspect import HostFacts, HostGroup, HostUser, InspectedDisk, InspectedGpu, ListeningPort
from dalsegno.setup.node_plan import NodePlan
from dalsegno.spec.facts import (
    Cluster,
    Containers,
    Health,
    Monitoring,
    Node,
    Partition,
    Slurm,
    SshAccess,
    SshHost,
    Storage,
    User,
)
from dalsegno.targets.ssh.desired import ClusterOnHosts, host_plan
from dalsegno.targets.ssh.folder import ClusterSecrets
from dalsegno.targets.ssh.people import AssignedIds, assign_ids, check_accounts, known_ids
from dalsegno.targets.ssh.plan import (
    SshPlan,
    check_hosts,
    check_monitoring,
    check_releases,
    describe_host,
    foreign_programs,
    refuse_unbuilt,
    summarize,
)
from dalsegno.targets.ssh.programs import check_containers
from dalsegno.targets.ssh.releases import slurm_version
from dalsegno.targets.ssh.storage import check_storage

FACTS = HostFacts(
    "head",
    os_id="debian",
    os_version="12",
    machine="x86_64",
    python=(3, 11, 2),
    hostname="head",
    systemd=True,
    cpus=32,
    memory_mib=128_000,
    cgroup_version=2,
    disks=(InspectedDisk("/", "ext4", free_mib=50_000),),
)
GPUS = (InspectedGpu("NVIDIA H100 80GB HBM3", 81_559),) * 8
HOSTS = {
    "head": FACTS,
    "login-1": replace(FACTS, host="login-1", hostname="login-1"),
    "gpu-1": replace(FACTS, host="gpu-1", hostname="gpu-1", cpus=192, memory_mib=2_000_000, gpus=GPUS),
    "gpu-2": replace(FACTS, host="gpu-2", hostname="c0-rack7", cpus=192, memory_mib=2_000_000, gpus=GPUS),
}
CLUSTER = Cluster(
    "lab",
    "ssh",
    nodes=(Node("gpu-1", 0, 0, gpu_type="h100"), Node("gpu-2", 0, 0, gpu_type="h100")),
    partitions=(Partition("train", ("gpu-1", "gpu-2"), default=True),),
    logins=("login-1",),
    users=(User("ada", ("default",), "default"),),
    ssh=SshAccess(
        tuple(SshHost(name, f"10.0.0.{number}") for number, name in enumerate(HOSTS, start=1)),
        packages=("htop",),
    ),
)
SECRETS = ClusterSecrets("key of munge", "token", {"gpu-1": "secret of gpu-1", "gpu-2": "secret of gpu-2"})
ON = ClusterOnHosts(CLUSTER, HOSTS, SECRETS, "c0ffee", dict.fromkeys(HOSTS, "0.1-abc"), "ops@desk")


def names(plan: NodePlan) -> list[str]:
    return [service.name for service in plan.services]


def test_each_host_runs_its_own_daemons():
    assert names(host_plan(ON, "head")) == ["munge", "mariadb", "slurmdbd", "slurmctld", "controller", "observer"]
    assert names(host_plan(ON, "gpu-1")) == ["munge", "slurmd", "node-agent"]
    assert names(host_plan(ON, "login-1")) == ["munge"]


def test_slurm_conf_is_the_same_on_all_hosts(golden):
    texts = {host_plan(ON, host).file("/etc/slurm/slurm.conf").content for host in HOSTS}
    assert len(texts) == 1
    golden("ssh/slurm.conf", texts.pop())


def test_files_of_each_host(golden):
    lines = []
    for host in HOSTS:
        plan = host_plan(ON, host)
        lines.append(f"{host}: {' '.join(plan.packages)}\n")
        lines += [f"  {file.mode:04o} {file.owner}:{file.group} {file.path}\n" for file in plan.files]
        lines += [f"  {folder.mode:04o} {folder.owner}:{folder.group} {folder.path}/\n" for folder in plan.folders]
        lines += [f"  {link.path} -> {link.to}\n" for link in plan.links]
        lines += [f"  once: {command.name}\n" for command in plan.commands]
    golden("ssh/hosts.txt", "".join(lines))


def test_secrets_go_only_where_they_are_needed():
    head, node, login = (str(host_plan(ON, host)) for host in ("head", "gpu-1", "login-1"))
    assert "secret of gpu-1" in head
    assert "secret of gpu-2" in head
    assert "secret of gpu-1" in node
    assert "secret of gpu-2" not in node
    assert "secret of gpu" not in login
    assert "token" in head
    assert all(file.secret for file in host_plan(ON, "head").files if "secret" in file.content)


def test_new_settings_restart_slurm_and_others_do_not():
    def revisions(cluster: Cluster) -> dict[str, str]:
        plan = host_plan(replace(ON, cluster=cluster), "head")
        return {service.name: service.revision for service in plan.services}

    before = revisions(CLUSTER)
    part = replace(CLUSTER.partitions[0], time_limit_min=60)
    assert revisions(replace(CLUSTER, partitions=(part,))) == before
    strict = revisions(replace(CLUSTER, slurm=replace(CLUSTER.slurm, enforce=("limits",))))
    assert {name for name in before if strict[name] != before[name]} == {"slurmctld"}


def test_new_code_restarts_only_our_own_daemons():
    before, after = (host_plan(replace(ON, codes={"head": code}), "head").services for code in ("0.1-abc", "0.1-def"))
    changed = [old.name for old, new in zip(before, after, strict=True) if old.revision != new.revision]
    assert changed == ["controller", "observer"]


def test_node_whose_machine_was_never_seen_is_left_out():
    seen = {name: facts for name, facts in HOSTS.items() if name != "gpu-2"}
    conf = host_plan(replace(ON, facts=seen), "head").file("/etc/slurm/slurm.conf").content
    assert "NodeName=gpu-1 " in conf
    assert "gpu-2" not in conf
    assert "Nodes=gpu-1 " in conf


def test_cgroup_v2_without_systemd_is_not_used():
    bare = {name: replace(facts, systemd=False) for name, facts in HOSTS.items()}
    plan = host_plan(replace(ON, facts=bare), "gpu-1")
    assert "ProctrackType=proctrack/linuxproc" in plan.file("/etc/slurm/slurm.conf").content
    assert any(folder.path == "/run/munge" for folder in plan.folders)


def test_users_have_one_uid_on_all_hosts():
    cluster = replace(CLUSTER, users=(User("ada", (), ""), User("bob", (), ""), User("cem", (), "", uid=4000)))
    first = replace(FACTS, users=(HostUser("root", 0, 0), HostUser("bob", 1007, 1007)))
    second = replace(FACTS, users=(HostUser("somebody", 20001, 20001),))
    ids = assign_ids(cluster, {"gpu-1": second, "head": first}, AssignedIds())
    assert ids.uids == {"ada": 20002, "bob": 1007, "cem": 4000}
    assert {user.uid for host in HOSTS for user in host_plan(replace(ON, before=ids), host).users} == {20002}


def test_uid_of_a_removed_user_is_not_assigned_again():
    before = AssignedIds({"zoe": 20001})
    assert assign_ids(CLUSTER, HOSTS, before).uids == {"zoe": 20001, "ada": 20002}


def test_accounts_of_an_earlier_cluster_keep_their_uids_as_the_head_says():
    liar = replace(FACTS, users=(HostUser("ada", 1000, 1000, ours=True),))
    head = replace(FACTS, users=(HostUser("ada", 20007, 20007, ours=True),))
    facts = {"gpu-1": liar, "head": head}
    assert assign_ids(CLUSTER, facts, known_ids(CLUSTER, facts, AssignedIds())).uids == {"ada": 20007}


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"users": (HostUser("ada", 33, 33),)}, "`ada` is a system account of this machine (uid 33)"),
        (
            {"users": (HostUser("ada", 1000, 1000),), "groups": (HostGroup("sudo", 27, ("ada",)),)},
            "`ada` is an account of this machine with the rights of sudo",
        ),
        ({"groups": (HostGroup("ada", 1000),)}, "`ada` is a group of this machine"),
    ],
)
def test_user_who_would_get_the_rights_of_an_account_leaves_that_host_out(facts, fault):
    found = check_accounts(CLUSTER, {**HOSTS, "gpu-1": replace(FACTS, **facts)}, AssignedIds())
    assert {host: error.what for host, error in found.items()} == {"gpu-1": f"gpu-1: {fault}"}


HOME, SCRATCH = Storage("home", "/home", home=True), Storage("scratch", "/scratch", "scratch")


def test_homes_on_shared_storage_are_created_by_the_head_only():
    on = replace(ON, cluster=replace(CLUSTER, storage=(HOME,)))
    made = {host: [(user.make_home, user.cluster_key) for user in host_plan(on, host).users] for host in HOSTS}
    others = {host: [(False, True)] for host in HOSTS if host != "head"}
    assert made == {"head": [(True, True)], **others}
    assert [(user.make_home, user.cluster_key) for user in host_plan(ON, "gpu-1").users] == [(True, False)]


def test_reboot_makes_no_command_due_again():
    """A boot empties /run, so a file there cannot show that a command has run."""
    on = replace(ON, cluster=replace(CLUSTER, storage=(HOME,), containers=Containers(enabled=True)))
    created = {command.creates for host in HOSTS for command in host_plan(on, host).commands} - {""}
    assert created and not [path for path in created if path.startswith("/run/")]


def test_head_exports_folders_and_the_others_mount_them(golden):
    on = replace(ON, cluster=replace(CLUSTER, storage=(HOME, SCRATCH)))
    lines = []
    for host in ("head", "gpu-1"):
        plan, bare = host_plan(on, host), host_plan(ON, host)
        lines.append(f"{host}: {' '.join(name for name in plan.packages if name not in bare.packages)}\n")
        lines += [f"  {each.path} ({each.mode:04o})\n" for each in plan.folders if each not in bare.folders]
        known = {file.path for file in bare.files} - {"/etc/slurm/slurm-prolog"}
        new = [each for each in plan.files if each.path not in known]
        lines += [f"  {each.path} ({each.mode:04o}):\n{each.content}" for each in new]
        lines += [f"  mounts {each.path}\n" for each in plan.mounts]
        lines += [f"  once: {each.name}\n" for each in plan.commands if each not in bare.commands]
        lines += [f"  service: {each.unit}\n" for each in plan.services if each.name not in names(bare)]
    golden("ssh/storage.txt", "".join(lines))
    conf = host_plan(on, "gpu-1").file("/etc/slurm/slurm.conf").content
    assert "Prolog=/etc/slurm/slurm-prolog" in conf and "TaskProlog=/etc/slurm/slurm-task-prolog" in conf


def test_mode_decides_what_slurms_programs_do_and_its_change_needs_no_restart():
    def on(health: Health) -> ClusterOnHosts:
        return replace(ON, cluster=replace(CLUSTER, health=health))

    auto, observe, armed = Health(), Health(mode="observe"), Health(mode="observe", armed=("train",))
    for health, acts in ((auto, True), (observe, False), (armed, True)):
        plan = host_plan(on(health), "gpu-1")
        for name in ("slurm-prolog", "slurm-health-check"):
            program = plan.file(f"/etc/slurm/{name}")
            assert (program.mode, program.owner) == (0o755, "root")
            assert ("/usr/local/bin/dalsegno health" in program.content) is acts
        assert plan.services == host_plan(ON, "gpu-1").services
    assert not any("slurm-prolog" in file.path for file in host_plan(ON, "head").files)


def test_prolog_calls_the_program_of_the_file_and_slurm_conf_names_only_ours():
    extra = {"prolog": "/etc/site/prolog", "HealthCheckInterval": "60"}
    plan = host_plan(replace(ON, cluster=replace(CLUSTER, slurm=Slurm(extra=extra))), "gpu-1")
    conf = plan.file("/etc/slurm/slurm.conf").content
    assert "\nProlog=/etc/slurm/slurm-prolog\n" in conf and "/etc/site/prolog" not in conf
    assert "\nHealthCheckInterval=60\n" in conf and "nohold_on_prolog_fail" in conf
    assert "/etc/site/prolog || exit $?\n" in plan.file("/etc/slurm/slurm-prolog").content
    own = replace(CLUSTER, slurm=Slurm(extra={"HealthCheckProgram": "/etc/site/check"}))
    conf = host_plan(replace(ON, cluster=own), "gpu-1").file("/etc/slurm/slurm.conf").content
    assert "\nHealthCheckProgram=/etc/site/check\n" in conf and "slurm-health-check" not in conf


def test_head_is_changed_first_if_the_others_mount_its_folders():
    mount = change(ChangeKind.MOUNT, "/home", ChangeAction.CREATE)
    serving = {"head": host_plan(replace(ON, cluster=replace(CLUSTER, storage=(HOME,))), "head")}
    plan = SshPlan(CLUSTER, serving, {"head": (), "gpu-1": (mount,)}, HOSTS, "c0ffee", SECRETS)
    assert plan.head_first
    assert not replace(plan, changes={"gpu-1": ()}).head_first
    assert not replace(plan, plans={"head": host_plan(ON, "head")}).head_first
    assert summarize([mount]) == ["mounts /home"]


def test_host_that_lacks_an_existing_mount_is_left_out():
    cluster = replace(CLUSTER, storage=(Storage("fsx", "/fsx/team", "existing"),))
    mounted = replace(FACTS, disks=(*FACTS.disks, InspectedDisk("/fsx", "lustre")))
    found = check_storage(cluster, {"head": mounted, "gpu-1": FACTS})
    assert {host: error.what for host, error in found.items()} == {"gpu-1": "gpu-1: nothing is mounted at /fsx/team"}


def test_head_without_systemd_serves_no_nfs():
    cluster = replace(CLUSTER, storage=(HOME,))
    found = check_storage(cluster, {"head": replace(FACTS, systemd=False), "gpu-1": replace(FACTS, systemd=False)})
    assert list(found) == ["head"]


def test_storage_does_not_hide_the_keys_of_the_login():
    hosts = tuple(replace(host, user="ubuntu") for host in CLUSTER.ssh.hosts)
    cluster = replace(CLUSTER, storage=(HOME,), ssh=replace(CLUSTER.ssh, hosts=hosts))
    assert set(check_storage(cluster, HOSTS)) == set(HOSTS)
    assert check_storage(replace(cluster, storage=(Storage("homes", "/people", home=True),)), HOSTS) == {}


def test_hosts_know_the_ssh_keys_of_each_other():
    facts = {**HOSTS, "gpu-2": replace(HOSTS["gpu-2"], host_keys=("ssh-ed25519 AAAA",))}
    lines = host_plan(replace(ON, facts=facts), "login-1").file("/etc/ssh/ssh_known_hosts").content
    assert lines == "gpu-2,c0-rack7,10.0.0.4 ssh-ed25519 AAAA\n"


def test_host_with_the_name_of_another_is_left_out_and_the_other_is_used():
    twins = {**HOSTS, "gpu-2": replace(HOSTS["gpu-2"], hostname="gpu-1")}
    found = {host: error.what for host, error in check_hosts(CLUSTER, twins).items()}
    assert found == {"gpu-2": "gpu-2: its host name is `gpu-1`, the same as on gpu-1"}


def test_host_that_takes_the_name_of_the_head_does_not_stop_the_others():
    liar = {**HOSTS, "gpu-2": replace(HOSTS["gpu-2"], hostname="head.example.org")}
    assert set(check_hosts(CLUSTER, liar)) == {"gpu-2"}


def test_hosts_that_share_a_name_of_no_host_are_all_left_out():
    clones = {name: replace(each, hostname="template") for name, each in HOSTS.items() if name != "head"}
    found = check_hosts(CLUSTER, {"head": HOSTS["head"], **clones})
    assert set(found) == {"login-1", "gpu-1", "gpu-2"}
    assert found["gpu-1"].what == "gpu-1: its host name is `template`, the same as on login-1, gpu-2"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"os_id": "arch"}, "gpu-1: arch 12 is not supported"),
        ({"python": (3, 9, 2)}, "gpu-1: Python 3.9.2 is too old"),
        ({"clock_offset_s": -400.4}, "gpu-1: its clock differs by 400 s from the clock here"),
        ({"disks": (InspectedDisk("/", "ext4", free_mib=90),)}, "gpu-1: /var has 90 MiB left, and 400 MiB are needed"),
    ],
)
def test_unfit_host_is_left_out_with_the_reason(change, fault):
    faults = check_hosts(CLUSTER, {**HOSTS, "gpu-1": replace(HOSTS["gpu-1"], **change)})
    assert {host: error.what for host, error in faults.items()} == {"gpu-1": fault}
    assert faults["gpu-1"].hint


def test_node_that_is_smaller_than_the_file_says_is_left_out():
    large = replace(CLUSTER, nodes=(replace(CLUSTER.nodes[0], cpus=256), replace(CLUSTER.nodes[1], gpus=16)))
    found = {host: error.what for host, error in check_hosts(large, HOSTS).items()}
    assert found == {
        "gpu-1": "gpu-1: the file says 256 CPUs, the machine has 192",
        "gpu-2": "gpu-2: the file says 16 GPUs, the machine has 8",
    }


def test_host_with_another_slurm_is_refused():
    assert foreign_programs("gpu-1", replace(FACTS, daemons=("munged", "sshd")), [6818]) is None
    theirs = replace(FACTS, slurm_conf="/etc/slurm/slurm.conf", daemons=("slurmd", "sshd"))
    found = foreign_programs("gpu-1", theirs, [6818])
    assert found is not None
    assert found.what == "gpu-1: another Slurm is set up there: it has /etc/slurm/slurm.conf and runs slurmd"


def test_host_whose_port_is_taken_is_refused():
    listening = (ListeningPort(22, "sshd"), ListeningPort(6820, "nginx"))
    assert foreign_programs("gpu-1", replace(FACTS, listening=listening), [6818]) is None
    found = foreign_programs("head", replace(FACTS, listening=listening), [6817, 6820])
    assert found is not None
    assert found.what == "head: port 6820 is used by nginx"


def test_host_with_another_release_of_slurm_is_left_out():
    assert check_releases(CLUSTER, HOSTS) == {}
    mixed = {**HOSTS, "gpu-2": replace(HOSTS["gpu-2"], os_version="13")}
    found = {host: error.what for host, error in check_releases(CLUSTER, mixed).items()}
    assert found == {"gpu-2": "gpu-2: it has Slurm 24.11, and the head has 22.05"}


def change(kind: ChangeKind, name: str, action: ChangeAction) -> MachineChange:
    return MachineChange(kind, name, action)


def test_plan_says_what_happens_to_which_host():
    plan = SshPlan(
        CLUSTER,
        {},
        {
            "head": (change(ChangeKind.FILE, "/etc/slurm/slurm.conf", ChangeAction.CHANGE),),
            "gpu-1": (
                change(ChangeKind.FILE, "/etc/slurm/slurm.conf", ChangeAction.CHANGE),
                change(ChangeKind.SERVICE, "slurmd", ChangeAction.START),
            ),
        },
        HOSTS,
        "c0ffee",
        SECRETS,
        faults={"gpu-2": TargetError("gpu-2: no route to host", hint="check the cable")},
    )
    assert plan.sentences() == [
        "changes Slurm's settings in place (scontrol reconfigure)",
        "head, gpu-1: writes 1 file (/etc/slurm/slurm.conf)",
        "gpu-1: starts slurmd",
        "leaves out gpu-2: no route to host",
        "ends no job",
    ]
    assert not plan.empty


def test_plan_says_that_the_removal_of_a_host_waits_for_its_jobs():
    plan = SshPlan(CLUSTER, {}, {}, HOSTS, "c0ffee", SECRETS, remove_hosts=("gpu-3",), wait_for=("7", "9"))
    assert plan.sentences() == [
        "drains and removes 1 host (gpu-3)",
        "waits for 2 jobs (7, 9) to end first; ends no job",
    ]
    assert replace(plan, wait_for=()).sentences()[-1] == "ends no job"
    unknown = replace(plan, wait_for=None).sentences()[-1]
    assert unknown == "slurmctld does not answer, so the jobs on the removed hosts are unknown"


def test_plan_describes_each_host_with_its_driver_disks_and_what_is_there():
    disks = (
        InspectedDisk("/", "ext4", "/dev/sda2", 60_000, 50_000),
        InspectedDisk("/boot", "ext4", "/dev/sda1", 900, 700),
        InspectedDisk("/data", "xfs", "/dev/nvme0n1", 4_000_000, 3_500_000),
        InspectedDisk("/var/lib/images", "xfs", "/dev/nvme0n1", 4_000_000, 3_500_000),
        InspectedDisk("/fsx", "lustre"),
    )
    listening = (ListeningPort(22, "sshd"), ListeningPort(9100))
    facts = replace(HOSTS["gpu-1"], driver="580.95", disks=disks, packages=(("munge", "0.5.15"),), listening=listening)
    system = (
        "debian 12, 192 CPUs, 1953 GiB, 8 x NVIDIA H100 80GB HBM3 (driver 580.95), 49 GiB free on /, "
        "3418 GiB free on /data, systemd, cgroup v2"
    )
    assert describe_host(facts) == [system, "has munge 0.5.15; listens on 22 (sshd), 9100"]
    assert describe_host(replace(facts, record=True)) == [system], "the programs are those of the cluster"


def test_replaced_files_are_named_with_their_return():
    replaced = change(ChangeKind.FILE, "/etc/munge/munge.key", ChangeAction.REPLACE)
    assert summarize([replaced]) == ["replaces 1 file (/etc/munge/munge.key), which `down` restores"]


def test_plan_without_changes_is_empty():
    plan = SshPlan(CLUSTER, {}, {"head": ()}, HOSTS, "c0ffee", SECRETS)
    assert plan.empty
    assert plan.sentences() == ["nothing to do: the cluster is as the file says"]


def test_parts_that_are_not_built_are_refused():
    refuse_unbuilt(CLUSTER)
    with pytest.raises(TargetError, match=r"`slurm\.backup_controller` is not built yet for"):
        refuse_unbuilt(replace(CLUSTER, slurm=Slurm(backup_controller=True)))
    images = Containers(enabled=True, images=("ubuntu:24.04",))
    with pytest.raises(TargetError, match=r"`containers\.images` without `containers\.folder` is not built yet"):
        refuse_unbuilt(replace(CLUSTER, containers=images))
    refuse_unbuilt(replace(CLUSTER, containers=replace(images, folder="/fsx/images")))


def test_slurmrestd_runs_as_nobody_on_the_head():
    on = replace(ON, cluster=replace(CLUSTER, slurm=Slurm(rest=True)))
    plan = host_plan(on, "head")
    service = next(each for each in plan.services if each.name == "slurmrestd")
    assert service.argv[1:3] == ("-u", "nobody") and service.argv[-1].endswith("/run/rest/slurmrestd.sock")
    assert "slurmrestd" in plan.packages and "slurmrestd" not in host_plan(on, "gpu-1").packages


def test_accounting_can_be_left_out():
    plain = replace(ON, cluster=replace(CLUSTER, slurm=Slurm(accounting=False)))
    plan = host_plan(plain, "head")
    assert "slurmdbd" not in names(plan)
    assert plan.commands == ()
    assert "mariadb-server" not in plan.packages


def test_every_host_compiles_the_container_plugin_and_shows_scratch_in_containers():
    on = replace(
        ON, cluster=replace(CLUSTER, containers=Containers(enabled=True, folder="/fsx/images"), storage=(SCRATCH,))
    )
    for host in HOSTS:
        plan = host_plan(on, host)
        (command,) = [each for each in plan.commands if each.name == "compiling the container plugin"]
        conf = plan.file("/etc/slurm/plugstack.conf").content
        assert command.creates in conf and "images=/fsx/images" in conf and "show=/scratch" in conf
        assert "libslurm-dev" in plan.packages
    assert not any(file.path == "/etc/slurm/plugstack.conf" for file in host_plan(ON, "head").files), (
        "Pyxis may be there"
    )


WITH_PYXIS = {host: replace(facts, pyxis="spank_pyxis.so", enroot=True) for host, facts in HOSTS.items()}


def test_installed_pyxis_is_used_and_its_plugstack_conf_is_left_as_it_is():
    on = replace(ON, cluster=replace(CLUSTER, containers=Containers(enabled=True)), facts=WITH_PYXIS)
    assert check_containers(on.cluster, WITH_PYXIS) == {}
    for host in HOSTS:
        plan = host_plan(on, host)
        assert not any("plugstack" in each.path or "plugstack" in each.content for each in plan.files)
        assert not any("container plugin" in each.name for each in plan.commands)
        assert "squashfs-tools" not in plan.packages
    changes = {"head": (change(ChangeKind.FILE, "/etc/hosts", ChangeAction.CHANGE),)}
    plan = SshPlan(on.cluster, {}, changes, WITH_PYXIS, "c0ffee", SECRETS, fresh=True)
    assert "uses the installed Pyxis for containers" in plan.sentences()
    assert "uses the installed Pyxis for containers" in replace(plan, fresh=False).sentences()
    without = replace(plan, cluster=CLUSTER)
    assert not any("Pyxis" in line for line in without.sentences())


def test_hosts_with_another_container_plugin_than_the_head_are_left_out():
    cluster = replace(CLUSTER, containers=Containers(enabled=True))
    lacking = {**WITH_PYXIS, "login-1": HOSTS["login-1"], "gpu-2": replace(WITH_PYXIS["gpu-2"], enroot=False)}
    assert {host: each.what for host, each in check_containers(cluster, lacking).items()} == {
        "login-1": "login-1: its Slurm does not load Pyxis, and the head's does",
        "gpu-2": "gpu-2: Enroot, which Pyxis needs, is not installed",
    }
    alone = {**HOSTS, "gpu-1": WITH_PYXIS["gpu-1"]}
    (fault,) = check_containers(cluster, alone).values()
    assert fault.what == "gpu-1: its Slurm loads Pyxis, and the head's does not" and "on none" in fault.hint
    assert check_containers(CLUSTER, alone) == {}, "without `containers`, nothing is installed"


PROMETHEUS = replace(
    ON,
    cluster=replace(CLUSTER, monitoring=Monitoring(prometheus=True)),
    secrets=replace(
        SECRETS, monitor_password="of the head", monitor_web="hash 1", exporter_password="p", exporter_web="h"
    ),
)


def test_prometheus_runs_on_the_head_and_an_exporter_on_every_node():
    assert {"prometheus", "alertmanager", "node-exporter"} <= set(names(host_plan(PROMETHEUS, "head")))
    assert names(host_plan(PROMETHEUS, "gpu-1")) == ["munge", "slurmd", "node-agent", "node-exporter"]
    assert names(host_plan(PROMETHEUS, "login-1")) == ["munge"]
    assert (
        "--metrics" in next(each for each in host_plan(PROMETHEUS, "gpu-1").services if each.name == "node-agent").argv
    )


def test_passwords_of_prometheus_are_on_the_head_only_and_not_for_all_to_read():
    assert "of the head" not in str(host_plan(PROMETHEUS, "gpu-1"))
    own = [file for file in host_plan(PROMETHEUS, "head").files if "/monitor/" in file.path]
    secret = {file.path.rpartition("/")[2]: file for file in own if file.secret}
    assert {*secret} == {
        *("web.yml", "password", "exporter-password", "metrics-token", "exporter-web.yml", "alertmanager.yml")
    }
    assert {(file.mode, file.owner, file.group) for file in secret.values()} == {(0o600, "prometheus", "prometheus")}
    plain = {(file.mode, file.owner, file.group) for file in own if not file.secret}
    assert plain == {(0o640, "root", "prometheus")}, "Prometheus cannot change its own settings"


def test_host_without_packages_of_prometheus_is_left_out_of_monitoring():
    rocky = {**HOSTS, "gpu-1": replace(HOSTS["gpu-1"], os_id="rocky", os_version="9.4")}
    assert list(check_monitoring(PROMETHEUS.cluster, rocky)) == ["gpu-1"]
    assert check_monitoring(CLUSTER, rocky) == {}


def test_slurm_packages_of_the_file_replace_those_of_the_distribution():
    access = replace(CLUSTER.ssh, slurm_packages=("slurm-smd", "slurm-smd-slurmd"), slurm_version="25.05.3")
    on = replace(ON, cluster=replace(CLUSTER, ssh=access))
    assert host_plan(on, "gpu-1").packages == ("munge", "slurm-smd", "slurm-smd-slurmd", "htop")
    assert "mariadb-server" in host_plan(on, "head").packages and str(on.slurm) == "25.05.3"
    installed = replace(FACTS, packages=(("slurm-smd", "24.11.6-1"), ("slurmd", "22.05.8")))
    assert str(slurm_version(installed, access)) == "24.11.6", "what is installed is right"
