"""The variables of the HPC stack, by the names and types of each release."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from dalsegno.errors import SpecError
from dalsegno.hardware import find_instance, instances
from dalsegno.targets.oci.resource_manager import FakeResourceManager
from dalsegno.targets.oci.variables import (
    RELEASES,
    policy_statements,
    resource_manager_variables,
    stack_table,
    stack_variables,
)
from tests.targets.oci.conftest import FULL, GPUS, cluster_of, open_oci

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


# The published stack

RECORDED = {"v2.10": "oci-hpc-2.10.6", "v3": "oci-hpc-3.1.0"}
SHAPES = [each.name for each in instances().values() if each.provider == "oci"]
OWN_IMAGE = "  image: ocid1.image.oc1.eu-frankfurt-1.aaaa\n"
NETWORK = "  vcn: ocid1.vcn.oc1..a\n  public_subnet: ocid1.subnet.oc1..a\n  private_subnet: ocid1.subnet.oc1..b\n"
NEW_LUSTRE = "{name: fast, mount: /fast, type: lustre, size: 31200G}"
SIZED = "instance: VM.Standard.E4.Flex, cpus: 8, memory: 64G"
EVERY_SETTING: list[dict[str, str]] = [
    {"rest": FULL},
    {"rest": "health: {mode: 'off'}\nmonitoring: {enabled: false}\ncontainers: {enabled: false}\n"},
    {"rest": "slurm: {topology: {nodes_per_switch: 1}}\n"},
    {"rest": f"login: {{count: 1, {SIZED}}}\n"},
    {"settings": OWN_IMAGE},
    {"settings": f"{OWN_IMAGE}  os: ubuntu2204\n"},
    {"settings": NETWORK},
    {"settings": "  allowed_ips: 203.0.113.0/24\n  hyperthreading: false\n"},
    {"rest": "storage: [{name: data, mount: /data, type: nfs, source: '10.0.0.5:/export', options: ro}]\n"},
    {"rest": "storage: [{name: home, mount: /home, type: fss, home: true}]\n"},
    {"rest": f"storage: [{NEW_LUSTRE}]\n", "release": "v3"},
    {"rest": f"storage: [{NEW_LUSTRE.replace('31200G', '166400G, throughput: 1000')}]\n", "release": "v3"},
    {
        "rest": "storage: [{name: fast, mount: /fast, type: lustre, source: '10.0.0.9@tcp:/lustre'}]\n",
        "release": "v3",
    },
]


class PublishedVariable(NamedTuple):
    """A variable that the stack declares, and the values that its form offers."""

    name: str
    type: str
    required: str
    choices: str
    least: str
    most: str
    pattern: str

    def accepts(self, value: object) -> bool:
        """Return whether the value has the right type and is one of those that the form offers."""
        if type(value) is not TYPES[self.type]:
            return False
        if isinstance(value, int) and not isinstance(value, bool):
            return int(self.least or value) <= value <= int(self.most or value)
        offered = not self.choices or str(value) in self.choices.split("|")
        return offered and (not self.pattern or re.search(self.pattern, str(value)) is not None)


def published(release: str) -> dict[str, PublishedVariable]:
    lines = (Path(__file__).parents[2] / "recorded" / RECORDED[release] / "variables.csv").read_text().splitlines()
    return {row[0]: PublishedVariable(*row) for row in list(csv.reader(lines))[1:]}


@pytest.mark.parametrize("release", RELEASES)
def test_table_has_names_and_types_of_the_published_release(release):
    there = published(release)
    assert {each.name: each.type for each in stack_table(release).values()} == {
        each.name: there[each.name].type if each.name in there else "not in the release"
        for each in stack_table(release).values()
    }


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("parts", EVERY_SETTING, ids=lambda parts: " ".join(parts.values())[:40].strip())
def test_published_release_accepts_every_variable_that_is_sent(folder, release, parts):
    if parts.get("release", release) != release:
        pytest.skip("only release v3 has it")
    there, sent = published(release), variables(folder, **{**parts, "release": release})
    assert {name: value for name, value in sent.items() if name not in there or not there[name].accepts(value)} == {}
    assert {name for name, each in there.items() if each.required == "yes"} <= set(sent)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_the_catalog_fit_the_published_release_or_are_refused(folder, release, shape):
    there = published(release)
    unsized = find_instance(shape).flexible or not find_instance(shape).cpus
    sized = ", cpus: 8, memory: 64G" if unsized else ""
    nodes = f"{{name: train, nodes: 2, instance: {shape}{sized}}}"
    offered = there["cluster_network_shape"].choices.split("|")
    if find_instance(shape).nics and shape not in offered:
        with pytest.raises(SpecError, match=f"does not know the RDMA network of `{shape}`") as caught:
            variables(folder, release, partitions=nodes)
        assert release == "v2.10" and "stack_version: v3" in caught.value.problems[0].hint
        return
    sent = variables(folder, release, partitions=nodes)
    assert {name: value for name, value in sent.items() if not there[name].accepts(value)} == {}


def test_recorded_variables_find_a_wrong_name_type_and_value():
    there = published("v3")
    assert "cluster_network" not in there, "the name of the older release"
    assert there["create_fss"].accepts("new") and not there["create_fss"].accepts("true")
    assert not there["create_fss"].accepts(True), "a boolean in the older release"
    assert not there["marketplace_listing"].accepts("GPU_OL7_NV550")
    assert not there["cluster_name"].accepts("Demo")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.skipif(shutil.which("terraform") is None, reason="needs terraform")
def test_terraform_accepts_the_variables(folder, release, tmp_path):
    """Terraform reads declarations with the names and types of the published release."""
    there, found = published(release).values(), variables(folder, release, rest=FULL)
    declared = "".join(
        f'variable "{each.name}" {{\n  type = {each.type}\n{"" if each.required == "yes" else "  default = null"}\n}}\n'
        for each in there
    )
    work = tmp_path / "terraform"
    work.mkdir()
    (work / "variables.tf").write_text(declared)
    (work / "terraform.tfvars.json").write_text(json.dumps(found))
    argv = ["terraform", f"-chdir={work}", "plan", "-json", "-refresh=false", "-input=false"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert '"@level":"warn"' not in done.stdout, "an undeclared variable is only a warning of Terraform"


# Settings


def test_shape_with_rdma_is_in_a_cluster_network_and_others_are_in_a_pool(folder):
    fast = variables(folder)
    assert (fast["rdma_enabled"], fast["cluster_network_shape"]) == (True, "BM.GPU.H100.8")
    slow = variables(folder, partitions=GPUS.replace("BM.GPU.H100.8", "VM.GPU.A10.2"))
    assert (slow["rdma_enabled"], slow["instance_pool_shape"]) == (False, "VM.GPU.A10.2")


@pytest.mark.parametrize("release", RELEASES)
def test_cores_and_memory_of_flexible_nodes_are_sent(folder, release):
    """Without them, the stack starts machines of its default size."""
    nodes = "{name: train, nodes: 2, instance: VM.Standard.E4.Flex, cpus: 12, memory: 96G}"
    sent = variables(folder, release, partitions=nodes)
    names = ("instance_pool_ocpus", "instance_pool_custom_memory", "instance_pool_memory")
    assert [sent[name] for name in names] == [6, True, 96], "a core has two CPUs"
    assert not {*names} & {*variables(folder, release)}, "other shapes have one size"


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


def test_new_lustre_has_the_compartment_and_the_tier_that_the_file_says(folder):
    """The stack's Terraform has no default for the compartment: without it, the APPLY job fails."""
    new = variables(folder, rest=f"storage: [{NEW_LUSTRE}]\n")
    assert (new["lfs_compartment"], new["lfs_ad"]) == ("ocid1.compartment.oc1..aaaaaaaaexample", AD)
    assert (new["create_lfs"], new["lfs_capacity_in_gbs"]) == ("new", 31200) and "lfs_perf_tier" not in new
    fast = variables(folder, rest=f"storage: [{NEW_LUSTRE.replace('31200G', '41600G, throughput: 500')}]\n")
    assert (fast["lfs_capacity_in_gbs"], fast["lfs_perf_tier"]) == (41600, "MBPS_PER_TB_500")


def test_new_lustre_needs_a_policy_of_its_own(folder):
    service = "allow service lustrefs to use virtual-network-family in tenancy"
    with_lustre = cluster_of(folder, rest=f"storage: [{NEW_LUSTRE}]\n")
    assert f"IAM policy: {service}" in open_oci(folder, FakeResourceManager()).plan(with_lustre).details()
    plan = open_oci(folder, FakeResourceManager()).plan(cluster_of(folder))
    assert not [line for line in plan.details() if "lustrefs" in line]


RACKS = "slurm: {topology: {nodes_per_switch: 1}}\n"


def test_rack_aware_topology_is_a_variable_of_the_older_release_and_always_on_in_the_newer(folder):
    assert variables(folder, "v2.10", rest=RACKS)["rack_aware"] is True
    assert variables(folder, rest=RACKS) == variables(folder)


@pytest.mark.parametrize("release", RELEASES)
def test_enforced_limits_are_a_variable_of_the_stack(folder, release):
    enforced = variables(folder, release, rest="slurm: {enforce: [associations, limits, qos, safe]}\n")
    assert enforced["sacct_limits"] is True and "sacct_limits" not in variables(folder, release)
    cluster = cluster_of(folder, settings=f"  stack_version: {release}\n", rest="slurm: {enforce: [limits]}\n")
    assert "enforces associations, limits, qos and safe" in "".join(
        open_oci(folder, FakeResourceManager()).plan(cluster).notes
    )


@pytest.mark.parametrize(
    ("release", "how"), [("v2.10", "rack, with `rack_aware`"), ("v3", "as release v3 always does")]
)
def test_plan_says_that_the_stack_finds_the_racks(folder, release, how):
    cluster = cluster_of(folder, settings=f"  stack_version: {release}\n", rest=RACKS)
    sentences = open_oci(folder, FakeResourceManager()).plan(cluster).sentences()
    assert [each for each in sentences if how in each and each.endswith("`nodes_per_switch` is ignored")]


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


@pytest.mark.parametrize("release", ["v2.10", "v3"])
def test_the_group_of_container_users_gets_no_sudo(release):
    """The stack's own default gives `privilege` sudo without a password."""
    golden = Path(__file__).parents[2] / f"golden/oci/{release}.json"
    assert json.loads(golden.read_text())["privilege_sudo"] is False
