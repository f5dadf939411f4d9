"""The variables of the HPC stack, by the names and types of each release."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from dalsegno.errors import TargetError
from dalsegno.targets.oci.variables import (
    RELEASES,
    policy_statements,
    resource_manager_variables,
    stack_table,
    stack_variables,
    user_commands,
)
from tests.targets.oci.conftest import FULL, GPUS, cluster_of

AD, TENANCY = "xYzA:EU-FRANKFURT-1-AD-1", "ocid1.tenancy.oc1..aaaaaaaaexample"
TYPES = {"string": str, "bool": bool, "number": int}


def variables(folder, release: str = "v3", **parts: str):
    settings = f"  stack_version: {release}\n{parts.pop('settings', '')}"
    return stack_variables(cluster_of(folder, settings=settings, **parts), "ssh-ed25519 AAAA me", AD, TENANCY)


@pytest.mark.parametrize("release", RELEASES)
def test_variables_have_the_names_and_types_of_the_release(folder, release, golden):
    found = variables(folder, release, rest=FULL)
    types = {each.name: each.type for each in stack_table(release).values()}
    assert [name for name, value in found.items() if type(value) is not TYPES[types[name]]] == []
    golden(f"oci/{release}.json", json.dumps(found, indent=1) + "\n")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.skipif(shutil.which("terraform") is None, reason="needs terraform")
def test_terraform_accepts_the_variables(folder, release, tmp_path):
    declared = "".join(
        f'variable "{each.name}" {{\n  type = {each.type}\n}}\n' for each in stack_table(release).values()
    )
    found = variables(folder, release, rest=FULL)
    unset = {each.name for each in stack_table(release).values()} - set(found)
    work = tmp_path / "terraform"
    work.mkdir()
    for name in unset:
        declared = declared.replace(f'"{name}" {{\n', f'"{name}" {{\n  default = null\n')
    (work / "variables.tf").write_text(declared)
    (work / "terraform.tfvars.json").write_text(json.dumps(found))
    argv = ["terraform", f"-chdir={work}", "plan", "-json", "-refresh=false", "-input=false"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert '"@level":"warn"' not in done.stdout, "an undeclared variable is only a warning of Terraform"


def test_shape_with_rdma_is_in_a_cluster_network_and_others_are_in_a_pool(folder):
    fast = variables(folder)
    assert (fast["rdma_enabled"], fast["cluster_network_shape"]) == (True, "BM.GPU.H100.8")
    slow = variables(folder, partitions=GPUS.replace("BM.GPU.H100.8", "VM.GPU.A10.2"))
    assert (slow["rdma_enabled"], slow["instance_pool_shape"]) == (False, "VM.GPU.A10.2")


def test_home_and_file_storage(folder):
    new = variables(folder, rest=FULL)
    assert (new["add_nfs"], new["create_fss"], new["nfs_target_path"]) == (True, "new", "/mnt/home")
    given = variables(folder, rest="storage: [{name: data, mount: /data, type: nfs, source: '10.0.0.5:/export'}]\n")
    assert (given["create_fss"], given["nfs_source_IP"], given["nfs_source_path"]) == (
        "existing",
        "10.0.0.5",
        "/export",
    )
    home = variables(folder, rest="storage: [{name: home, mount: /home, type: fss, home: true}]\n")
    assert (home["shared_home"], home["add_nfs"], home["nfs_target_path"]) == ("fss", True, "/fss")


HOMES = "{name: home, mount: /home, type: fss, home: true}"


@pytest.mark.parametrize("release", RELEASES)
def test_homes_and_another_file_system_and_lustre_can_be_combined(folder, release):
    lustre = ", {name: fast, mount: /fast, type: lustre, size: 31200G}" if release == "v3" else ""
    found = variables(folder, release, rest=f"storage: [{HOMES}, {{name: data, mount: /data, type: fss}}{lustre}]\n")
    assert (found["add_nfs"], found["nfs_target_path"]) == (True, "/data")
    assert found["shared_home" if release == "v3" else "home_fss"] in ("fss", True)
    assert found.get("lfs_target_path") == ("/fast" if lustre else None)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (
            {"partitions": f"{GPUS}, {GPUS.replace('train', 'more')}"},
            "more than one partition: its Terraform creates one",
        ),
        ({"partitions": GPUS.replace("nodes: 2", "nodes: 2, spares: 1")}, "spares"),
        ({"settings": "  os: ubuntu2204\n"}, "no image with ubuntu2204"),
        ({"rest": "slurm: {topology: {nodes_per_switch: 1}}\n"}, "topology"),
        ({"rest": "reservations: [{name: care, nodes: [train-1], users: [root]}]\n"}, "names nodes only when they run"),
        (
            {"rest": f"storage: [{HOMES}, {{name: a, mount: /a, type: fss}}, {{name: b, mount: /b, type: fss}}]\n"},
            "one",
        ),
        (
            {"rest": f"storage: [{HOMES}, {{name: a, mount: /a, type: nfs, source: '10.0.0.5:/export'}}]\n"},
            "creates both file systems or none",
        ),
        ({"release": "v2.10", "rest": "storage: [{name: f, mount: /f, type: lustre, size: 31200G}]\n"}, "only release"),
    ],
)
def test_what_the_stack_cannot_do_is_refused(folder, parts, problem):
    with pytest.raises(TargetError, match=problem) as caught:
        variables(folder, **parts)
    assert caught.value.hint


def test_rack_aware_topology_is_a_variable_of_the_older_release(folder):
    assert variables(folder, "v2.10", rest="slurm: {topology: {nodes_per_switch: 1}}\n")["rack_aware"] is True


def test_resource_manager_gets_text_only():
    assert resource_manager_variables({"a": True, "b": 2, "c": "x"}) == {"a": "true", "b": "2", "c": "x"}


def test_policies_name_the_compartment():
    statements = policy_statements("ocid1.compartment.oc1..aaaa", "hpc-admins")
    assert statements[0] == (
        "allow service compute_management to use tag-namespace in compartment id ocid1.compartment.oc1..aaaa"
    )
    assert (
        statements[-1] == "allow group hpc-admins to manage all-resources in compartment id ocid1.compartment.oc1..aaaa"
    )


def test_users_may_run_containers_and_get_their_keys(folder):
    add, folder_of_keys, key = user_commands(cluster_of(folder, rest=FULL))
    assert add == "cluster user add ann --gid 9876"
    assert folder_of_keys == "sudo -u ann mkdir -p -m 700 ~ann/.ssh"
    assert key.endswith("| sudo -u ann tee -a ~ann/.ssh/authorized_keys")  # root would follow ann's links


@pytest.mark.parametrize("release", ["v2.10", "v3"])
def test_the_group_of_container_users_gets_no_sudo(release):
    """The stack's own default gives `privilege` sudo without a password."""
    golden = Path(__file__).parents[2] / f"golden/oci/{release}.json"
    assert json.loads(golden.read_text())["privilege_sudo"] is False
