"""What `up` installs on the machines of the HPC stack, and the stack's commands that replace and reboot them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dalsegno.errors import CommandFailed, NotThere, TargetError
from dalsegno.setup.machine_record import BEGIN, END
from dalsegno.system.processes import Completed, FakeRunner
from dalsegno.targets.base import CanReboot, CanReplace
from dalsegno.targets.folder import write_applied
from dalsegno.targets.machines import CanManageMachines, InstanceAction
from dalsegno.targets.oci.head import OciHead
from dalsegno.targets.oci.node_plans import (
    CUSTOM_ROLE,
    PROFILE,
    PROLOG,
    MachineRole,
    install_script,
    profile_text,
    role_plan,
    setup_files,
)
from dalsegno.targets.oci.resource_manager import FakeResourceManager, StackOperation
from tests.targets.oci.conftest import FULL, GPUS, cluster_of, controller, open_oci

V2 = "  stack_version: v2.10\n"


def up(target, cluster) -> list[str]:
    said: list[str] = []
    target.apply(target.plan(cluster), said.append)
    return said


def sourced(text: str, tmp_path: Path, **env: str) -> dict[str, str]:
    """Return the environment of a shell that has read the file."""
    file = tmp_path / "profile.sh"
    file.write_text(text)
    argv = ["sh", "-c", f". {file}; env -0"]
    done = subprocess.run(argv, env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True, check=True)
    return dict(line.partition("=")[::2] for line in done.stdout.split("\0") if line)


def file_of(plan, path: str) -> str:
    return next(file.content for file in plan.files if file.path == path)


def test_login_shells_set_the_rdma_variables_of_the_shape(folder, tmp_path):
    found = sourced(profile_text(cluster_of(folder)), tmp_path, NCCL_IB_TC="7", NCCL_CUMEM_ENABLE="")
    assert (found["NCCL_IB_GID_INDEX"], found["NCCL_IB_TIMEOUT"]) == ("3", "22")
    assert found["NCCL_IB_HCA"].startswith("=mlx5_0,mlx5_1,mlx5_3,")
    assert (found["NCCL_IB_TC"], found["NCCL_CUMEM_ENABLE"]) == ("7", ""), "what the user set is kept, also if empty"


@pytest.mark.parametrize("role", MachineRole)
def test_every_machine_has_the_variables_because_jobs_inherit_those_of_the_submitting_shell(folder, role):
    assert "NCCL_IB_HCA" in file_of(role_plan(cluster_of(folder), role, "0.1-abc"), PROFILE)


def test_shape_outside_a_cluster_network_gets_no_rdma_variables(folder):
    slow = cluster_of(folder, GPUS.replace("BM.GPU.H100.8", "VM.GPU.A10.2"))
    off = cluster_of(folder, settings="  rdma: false\n")
    for cluster in (slow, off):
        assert not [file for file in role_plan(cluster, MachineRole.COMPUTE, "0.1-abc").files if file.path == PROFILE]


def test_compute_node_gets_agent_health_settings_and_prolog_but_not_slurms_own_files(folder):
    plan = role_plan(cluster_of(folder), MachineRole.COMPUTE, "0.1-abc")
    assert [service.name for service in plan.services] == ["node-agent"]
    assert "dalsegno health --context prolog" in file_of(plan, PROLOG)
    assert not any(file.path.endswith(("slurm.conf", "munge.key")) for file in plan.files)
    links = {link.path: link.to for link in plan.links}
    assert links["/var/lib/dalsegno/clusters/demo/etc/slurm.conf"] == "/run/slurm/conf/slurm.conf"
    assert len({*links, *(folder.path for folder in plan.folders)}) == len(links) + len(plan.folders)


def test_controller_runs_our_daemons_and_new_nodes_of_release_3_set_themselves_up(folder):
    plan = role_plan(cluster_of(folder), MachineRole.HEAD, "0.1-abc")
    assert {service.name for service in plan.services} >= {"controller", "agent-secrets", "slurm-policy"}
    role = (
        f'---\n- name: Test role\n  ansible.builtin.debug:\n    msg: "x"\n{BEGIN}\n{file_of(plan, CUSTOM_ROLE)}{END}\n'
    )
    tasks = yaml.safe_load(role)
    assert tasks[1]["ansible.builtin.command"].endswith("bash /config/dalsegno/setup.sh node")
    older = role_plan(cluster_of(folder, settings=V2), MachineRole.HEAD, "0.1-abc")
    assert not [file for file in older.files if file.path == CUSTOM_ROLE], "release 2.10 has no hook"


@pytest.mark.parametrize("role", MachineRole)
def test_users_are_left_to_the_directory_of_the_stack(folder, role):
    plan = role_plan(cluster_of(folder, rest="users: [{name: ann, uid: 20001}]\n"), role, "0.1-abc")
    assert (plan.users, plan.groups) == ((), ())


def test_scripts_are_clean_for_shellcheck_and_hold_no_secret(folder, tmp_path):
    files = setup_files(cluster_of(folder), "0.1-abc")
    files["install"] = install_script(cluster_of(folder), files, b"an archive")
    program = Path(sys.executable).with_name("shellcheck")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run([program, *(tmp_path / name for name in files)], capture_output=True, text=True)
    assert done.stdout == ""
    assert not [file for role in MachineRole for file in role_plan(cluster_of(folder), role, "k").files if file.secret]


def test_install_script_replaces_the_folder_and_sets_up_the_controller(folder, tmp_path):
    files = {"setup.sh": 'echo "$1 $(cat "$(dirname "$0")/dalsegno.tar.gz")"\n'}
    script = install_script(cluster_of(folder), files, b"our code").replace("/config/dalsegno", f"{tmp_path}/scripts")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "old.sh").touch()
    done = subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("head our code\n", "")
    assert sorted(path.name for path in (tmp_path / "scripts").iterdir()) == ["dalsegno.tar.gz", "setup.sh"]


def test_node_script_carries_its_files_over_ssh_and_reports_the_exit_code(folder, tmp_path):
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/bash\nshift 5\necho "$1"\nshift\nexec bash -c "$*"\n')
    (ssh.parent / "sudo").write_text('#!/bin/bash\nexec "$@"\n')
    for program in ssh.parent.iterdir():
        program.chmod(0o755)
    files = setup_files(cluster_of(folder), "0.1-abc")
    (tmp_path / "node.sh").write_text(files["node.sh"])
    (tmp_path / "setup.sh").write_text('ls "$(dirname "$0")"; echo "$1"; exit 3\n')
    for name in ("compute.sh", "controller", "dalsegno.tar.gz"):
        (tmp_path / name).touch()
    env = {"PATH": f"{ssh.parent}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    argv = ["bash", tmp_path / "node.sh", "compute-1", "compute"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    expected = ["compute-1", "compute.sh", "controller", "dalsegno.tar.gz", "setup.sh", "compute"]
    assert (done.returncode, done.stdout.split()) == (3, expected), done.stderr
    assert not list(tmp_path.glob("tmp.*"))


def test_up_sets_up_the_controller_first_and_then_the_nodes_in_slurm_and_the_login_node(folder):
    runner = controller()
    logins = "login: {count: 1, instance: VM.Standard.E4.Flex, cpus: 4, memory: 32G}\n"
    up(open_oci(folder, FakeResourceManager(), runner), cluster_of(folder, rest=logins))
    commands = [argv[-1] for argv in runner.calls if "BatchMode=yes" in argv]
    assert commands[:3] == ["true", "sudo bash -s", "bash /config/dalsegno/users.sh"]
    names = ("compute-1 compute", "compute-2 compute", "demo-login login")
    assert sorted(commands[3:]) == [f"bash /config/dalsegno/node.sh {name}" for name in names]


PEOPLE = "accounts: [{name: ml}]\nusers: [{name: ann, accounts: [ml]}]\n"
IMAGES = "containers: {enabled: true, folder: /home/images, images: [ubuntu]}\n"


def test_up_adds_accounts_after_the_users_and_repeats_it_after_a_failure(folder):
    failing = controller({"accounts.sh": Completed((), 1, stderr="slurmdbd does not answer")})
    manager, cluster = FakeResourceManager(), cluster_of(folder, rest=PEOPLE)
    with pytest.raises(TargetError, match="accounting could not be changed: slurmdbd does not answer"):
        up(open_oci(folder, manager, failing), cluster)
    runner = controller()
    target = open_oci(folder, manager, runner)
    assert "adds and changes accounts, users and QOS in Slurm's accounting" in target.plan(cluster).sentences()
    up(target, cluster)
    scripts = [argv[-1] for argv in runner.calls if "bash /config" in argv[-1]]
    assert scripts[:2] == ["bash /config/dalsegno/users.sh", "bash /config/dalsegno/accounts.sh"]
    more = cluster_of(folder, rest=PEOPLE.replace("{name: ml}]", "{name: ml, description: Machine learning}]"))
    assert target.plan(more).installs and not target.plan(more).changes_stack


def test_accounts_script_runs_our_program_with_the_python_that_dal_segno_was_installed_for(folder, tmp_path):
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/bash\necho "$SLURM_CONF $*"\n')
    (tmp_path / "sudo").write_text('#!/bin/bash\nexec "$@"\n')
    (tmp_path / "dalsegno").write_text(f"#!{stand_in} -I\n# a program\n")
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    script = setup_files(cluster_of(folder, rest=PEOPLE), "k")["accounts.sh"].replace(
        "/usr/local/bin/dalsegno", f"{tmp_path}/dalsegno"
    )
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True, env=env)
    state = "/var/lib/dalsegno/clusters/demo"
    argv = f"-I /opt/dalsegno/current/dalsegno/programs.py slurm-policy {state} --accounts"
    assert (done.stdout, done.stderr) == (f"{state}/etc/slurm.conf {argv}\n", "")


def test_images_of_the_file_are_imported_on_the_controller_where_all_machines_see_them(folder):
    runner = controller()
    target = open_oci(folder, FakeResourceManager(), runner)
    plan = target.plan(cluster_of(folder, rest=IMAGES))
    assert "imports 1 image (ubuntu) on the controller" in plan.sentences()
    target.apply(plan, lambda text: None)
    target.import_images(plan, lambda text: None)
    command = "sudo env DALSEGNO_IMAGES=/home/images /usr/local/bin/dalsegno image import --or-kept --quiet"
    assert runner.calls[-1][-1].startswith(f"{command} ")
    assert target.plan(cluster_of(folder, rest=IMAGES)).import_images == (), "nothing is left to do"


@pytest.mark.parametrize(
    ("runner", "problem"),
    [
        (
            controller({"sudo bash": Completed((), 1, stderr="no disk space")}),
            "controller could not be set up: no disk",
        ),
        (
            controller({"node.sh compute-2": Completed((), 1, "no route")}),
            "1 of 2 nodes could not be set up; the first",
        ),
        (controller(nodes=1), "only 1 of 2 nodes are in Slurm"),
        (
            controller({"true": Completed((), 255, stderr="Connection refused")}),
            "cannot be reached: Connection refused",
        ),
    ],
    ids=("controller", "node", "missing", "unreachable"),
)
def test_failed_setup_is_continued_by_the_next_up_without_a_job_of_resource_manager(folder, runner, problem):
    manager = FakeResourceManager()
    with pytest.raises(TargetError, match=problem) as caught:
        up(open_oci(folder, manager, runner), cluster_of(folder))
    assert caught.value.hint
    target = open_oci(folder, manager)
    plan = target.plan(cluster_of(folder))
    assert [text.partition(",")[0] for text in plan.sentences()] == [
        "installs Dal Segno",
        "takes about 1 to 3 minutes",
    ]
    target.apply(plan, lambda text: None)
    assert [operation for operation, _ in manager.started] == [StackOperation.PLAN, StackOperation.APPLY]
    assert target.plan(cluster_of(folder)).empty


def test_change_of_health_settings_changes_the_scripts_and_not_the_stack(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    up(target, cluster_of(folder, settings=V2, rest="health: {mode: observe}\n"))
    plan = target.plan(cluster_of(folder, settings=V2, rest="health: {mode: auto}\n"))
    assert plan.installs and not plan.changes_stack


# Replacement and reboot

MACHINE = json.dumps([{"hostname": "compute-1", "cluster_name": "demo", "status": "running", "shape": "BM.GPU.H100.8"}])


def commands_of(runner: FakeRunner, *starts: str) -> list[str]:
    return [argv[-1] for argv in runner.calls if argv[-1].startswith(starts)]


def test_machine_of_release_3_is_tagged_terminated_and_started_again_in_its_cluster(folder):
    runner = controller({"nodes get": f"INFO connected\n{MACHINE}"})
    target = open_oci(folder, FakeResourceManager(), runner)
    up(target, cluster_of(folder))
    assert isinstance(target, CanManageMachines)
    assert [each.name for each in target.machines()] == ["compute-1", "compute-2"]
    target.act_on_machines(InstanceAction.REPLACE, ["compute-1"], through_api=False)
    assert commands_of(runner, "mgmt")[1:] == [
        "mgmt nodes tag-and-terminate --nodes compute-1",
        "mgmt clusters add node --count 1 --cluster demo",
    ]
    drained = next(argv[-1] for argv in runner.calls if "State=DRAIN" in argv[-1])
    assert "NodeName=compute-1" in drained, "no job starts on a machine that ends"
    target.act_on_machines(InstanceAction.REBOOT, ["compute-2"], through_api=False)
    assert commands_of(runner, "mgmt")[-1] == "mgmt nodes reboot --nodes compute-2"


def test_machine_of_release_2_is_removed_and_added_with_its_script(folder):
    runner = controller()
    target = open_oci(folder, FakeResourceManager(), runner)
    up(target, cluster_of(folder, settings=V2))
    target.act_on_machines(InstanceAction.REPLACE, ["compute-1"], through_api=False)
    assert commands_of(runner, "/opt/oci-hpc") == [
        "/opt/oci-hpc/bin/resize.sh remove --nodes compute-1 --quiet",
        "/opt/oci-hpc/bin/resize.sh add 1 --quiet",
    ]


def test_new_machine_of_release_2_is_set_up_or_the_next_up_does_it(folder):
    """The stand-in for the controller gives the new machine the name of the old one, or fails to set it up."""
    answers: dict[str, Completed | str] = {}
    runner = controller(answers)
    target = open_oci(folder, FakeResourceManager(), runner)
    cluster = cluster_of(folder, settings=V2)
    up(target, cluster)
    runner.calls.clear()
    target.act_on_machines(InstanceAction.REPLACE, ["compute-1"], through_api=False)
    set_up = [argv[-1] for argv in runner.calls if "node.sh" in argv[-1]]
    assert set_up == ["bash /opt/dalsegno-scripts/node.sh compute-1 compute"], "the other node is left alone"
    assert target.plan(cluster).empty
    answers["node.sh compute-1"] = Completed((), 1, stderr="no route to host")
    with pytest.raises(TargetError, match="the new machine was not set up: compute-1: no route to host"):
        target.act_on_machines(InstanceAction.REPLACE, ["compute-1"], through_api=False)
    assert not target.plan(cluster).empty, "`up` sets it up later"


@pytest.mark.parametrize(("settings", "packages"), [(V2, ("nvidia-container-toolkit",)), ("", ())])
def test_container_toolkit_is_installed_where_the_stack_leaves_it_out(folder, settings, packages):
    cluster = cluster_of(folder, settings=settings, rest=FULL)
    assert role_plan(cluster, MachineRole.COMPUTE, "0.1-abc").packages == packages


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (MACHINE.replace("running", "terminating"), "is being replaced already"),
        ("Node not found.", "has no node `compute-1`"),
        ("[broken", "has no node `compute-1`"),
        (MACHINE.replace('"demo"', "null"), "does not know the cluster"),
    ],
)
def test_machine_that_cannot_be_replaced_is_left_alone(folder, answer, error):
    runner = controller({"nodes get": answer})
    target = open_oci(folder, FakeResourceManager(), runner)
    up(target, cluster_of(folder))
    with pytest.raises((TargetError, NotThere), match=error):
        target.act_on_machines(InstanceAction.REPLACE, ["compute-1"], through_api=False)
    assert len(commands_of(runner, "mgmt")) == 1 and not [argv for argv in runner.calls if "DRAIN" in argv[-1]]


def test_failed_termination_starts_no_second_machine(folder):
    failed = {"nodes get": MACHINE, "tag-and-terminate": Completed((), 1, stderr="NotAuthorized")}
    runner = controller(failed)
    target = open_oci(folder, FakeResourceManager(), runner)
    up(target, cluster_of(folder))
    with pytest.raises(CommandFailed, match="NotAuthorized"):
        target.act_on_machines(InstanceAction.REPLACE, ["compute-1"], through_api=False)
    assert not commands_of(runner, "mgmt clusters add")


def test_recovery_on_the_controller_reboots_but_never_replaces_because_names_may_change(folder):
    runner = FakeRunner(lambda argv, stdin: "")
    head = OciHead(folder / "head", runner)
    head.folder.root.mkdir()
    write_applied(head.folder, cluster_of(folder))
    head.reboot("compute-1")
    assert runner.calls == [("mgmt", "nodes", "reboot", "--nodes", "compute-1")]
    assert isinstance(head, CanReboot) and not isinstance(head, CanReplace)


def test_commands_about_training_run_on_the_controller_and_replacement_runs_here(folder):
    target = open_oci(folder, FakeResourceManager())
    up(target, cluster_of(folder, rest=FULL))
    entry = target.forward(["run", "train.py"])
    assert entry is not None and entry.argv[-1] == "/usr/local/bin/dalsegno run train.py"
    assert target.forward(["nodes", "replace", "compute-1"]) is None


# For people who run Terraform themselves


@pytest.fixture
def nodes_script(folder, tmp_path):
    """Return a function that runs nodes.sh with a stand-in for Slurm and for node.sh, which fails on `broken`."""
    logins = "login: {count: 1, instance: VM.Standard.E4.Flex, cpus: 4, memory: 32G}\n"
    text = setup_files(cluster_of(folder, rest=logins), "0.1-abc")["nodes.sh"]
    (tmp_path / "nodes.sh").write_text(text)
    (tmp_path / "node.sh").write_text('echo "$1 $2" >> "$(dirname "$0")/done"; [ "$1" != broken ]\n')
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(nodes: str) -> tuple[int, str, list[str]]:
        (programs / "sinfo").write_text(f"#!/bin/sh\nprintf '%s\\n' {nodes}\n")
        (programs / "sinfo").chmod(0o755)
        argv, env = ["bash", tmp_path / "nodes.sh"], {"PATH": f"{programs}:/usr/bin:/bin"}
        done = subprocess.run(argv, capture_output=True, text=True, env=env)
        return done.returncode, done.stderr, sorted((tmp_path / "done").read_text().splitlines())

    return run


def test_nodes_script_sets_up_every_node_once_and_the_login_node(nodes_script):
    names = [f"compute-{number:02}" for number in range(20)]
    expected = [*(f"{name} compute" for name in names), "demo-login login"]
    assert nodes_script(" ".join([*names, *names])) == (0, "", expected), "a node is in several partitions"


def test_nodes_script_names_the_machines_that_failed_and_sets_up_the_others(nodes_script):
    code, stderr, done = nodes_script("broken compute-1")
    assert (code, done) == (1, ["broken compute", "compute-1 compute", "demo-login login"])
    assert stderr.startswith("not set up: broken/compute. Read /var/log/dalsegno/bootstrap.log there")


def test_nodes_script_does_nothing_to_nodes_of_a_slurm_without_any(nodes_script):
    assert nodes_script("")[2] == ["demo-login login"]
