"""Tests of settings that a platform would refuse."""

import pytest

from dalsegno.spec.targets import Ssh, hosts_of, power_cycle_argv

SUBNET = "subnet-0123456789abcdef0"
PARALLELCLUSTER = """\
name: demo
target: parallelcluster
partitions: [{name: train, nodes: 2, instance: p5.48xlarge}]
parallelcluster: {region: us-east-1}
"""
HYPERPOD = """\
name: demo
target: hyperpod
partitions: [{name: train, nodes: 2, instance: ml.p5.48xlarge}]
hyperpod: {region: us-east-1, execution_role: "arn:aws:iam::123456789012:role/x", bucket: sagemaker-x}
head: {instance: ml.m5.2xlarge}
"""
OCI = """\
name: demo
target: oci
partitions: [{name: train, nodes: 2, instance: BM.GPU.H100.8}]
oci: {region: eu-frankfurt-1, compartment: ocid1.compartment.oc1..aaaa, ad: EU-FRANKFURT-1-AD-1}
"""
SSH = """\
name: demo
target: ssh
partitions: [{name: train, nodes: 2}]
ssh: {hosts: {head: 10.0.0.1, "train-[1-2]": "10.0.0.[2-3]"}}
"""
POWER_EXAMPLE = "write `ipmitool -I lanplus -H {bmc} -U admin -f /root/bmc-password chassis power cycle`"


@pytest.mark.parametrize("text", [PARALLELCLUSTER, HYPERPOD, OCI, SSH])
def test_minimal_files_of_all_targets_are_valid(faults, text):
    assert faults(text) == []


CASES = [
    (
        PARALLELCLUSTER.replace("parallelcluster: {region: us-east-1}\n", ""),
        (2, "target `parallelcluster` needs a `parallelcluster:` block with `region`"),
        "`dalsegno init --target parallelcluster` writes one",
    ),
    (
        PARALLELCLUSTER.replace("region: us-east-1", ""),
        (4, "`parallelcluster` needs `region`"),
        "add `region:`",
    ),
    (
        PARALLELCLUSTER.replace("us-east-1", "Virginia"),
        (4, "`parallelcluster.region` cannot be `Virginia`"),
        "it looks like `us-east-1`",
    ),
    (
        PARALLELCLUSTER.replace("us-east-1", "us-east-1, capacity_reservation: cr-xyz"),
        (4, "`parallelcluster.capacity_reservation` cannot be `cr-xyz`"),
        "it looks like `cr-0123456789abcdef0`",
    ),
    (
        PARALLELCLUSTER.replace("us-east-1", "us-east-1, capacity_type: CAPACITY_BLOCK"),
        (4, "`parallelcluster` has a CAPACITY_BLOCK without its reservation"),
        "add `capacity_reservation: cr-…`",
    ),
    (
        PARALLELCLUSTER.replace("us-east-1", f"us-east-1, subnets: [{SUBNET}]"),
        (4, "`parallelcluster.subnets` is given without `head_subnet`"),
        "add `head_subnet:`, or leave both out",
    ),
    (
        PARALLELCLUSTER.replace("us-east-1", "us-east-1, queues: {trian: {capacity_type: SPOT}}"),
        (4, "`parallelcluster.queues` names `trian`, which is not a partition"),
        "did you mean `train`?",
    ),
    (
        PARALLELCLUSTER.replace("us-east-1", "us-east-1, queues: {train: {max_count: 1}}"),
        (4, "queue `train` may grow to 1 nodes, but partition `train` always has 2"),
        "write at least 2, or leave it out",
    ),
    (
        PARALLELCLUSTER.replace("name: demo", "name: my_demo"),
        (1, "a cluster on parallelcluster cannot be called `my_demo`"),
        "write `my-demo`",
    ),
    (
        PARALLELCLUSTER.replace("train", "Train"),
        (3, "a partition on parallelcluster cannot be called `Train`"),
        "use lowercase letters, digits and `-`, starting with a letter, at most 25",
    ),
    (
        PARALLELCLUSTER.replace("train", "a" * 26),
        (3, f"a partition on parallelcluster cannot be called `{'a' * 26}`"),
        "use lowercase letters, digits and `-`, starting with a letter, at most 25",
    ),
    (
        PARALLELCLUSTER.replace("nodes: 2", "nodes: 'gpu[1-2]'"),
        (3, "partition `train` names its nodes, but on parallelcluster the platform names them"),
        "write the number: `nodes: 2`",
    ),
    (
        PARALLELCLUSTER.replace(", instance: p5.48xlarge", ""),
        (3, "partition `train` needs an `instance`: parallelcluster rents machines by type"),
        "add `instance: p5.48xlarge`",
    ),
    (
        PARALLELCLUSTER.replace("p5.48xlarge", "BM.GPU.H100.8"),
        (3, "partition `train` has instance `BM.GPU.H100.8` of oci, but target `parallelcluster` is aws"),
        "use `p5.48xlarge`",
    ),
    (
        PARALLELCLUSTER + "slurm: {backup_controller: true}\n",
        (5, "`backup_controller` is not possible on parallelcluster: the platform runs the controller"),
        "leave it out",
    ),
    (
        PARALLELCLUSTER + "storage: [{name: s, mount: /s}]\n",
        (5, "storage `s` is of type `folder`, which target `parallelcluster` does not support"),
        "use `lustre` or `openzfs` or `efs` or `ebs` or `scratch`",
    ),
    (
        PARALLELCLUSTER + "storage: [{name: s, mount: /s, type: lustre}]\n",
        (5, "storage `s` needs a `size`, or the `source` of an existing one"),
        "add `size: 1200G`",
    ),
    (
        PARALLELCLUSTER + "storage: [{name: s, mount: /s, type: lustre, size: 1500G}]\n",
        (5, "storage `s` is 1500 GiB, but FSx for Lustre comes in 1200 or multiples of 2400 GiB"),
        "write `1200G`, `2400G`, `4800G` …",
    ),
    (
        HYPERPOD.replace("bucket: sagemaker-x", "bucket: my-bucket"),
        (4, "`hyperpod.bucket` cannot be `my-bucket`"),
        "it looks like `sagemaker-my-bucket`",
    ),
    (
        HYPERPOD.replace("sagemaker-x", f"sagemaker-x, subnets: [{SUBNET}]"),
        (4, "`hyperpod.subnets` and `hyperpod.security_groups` must be given together"),
        "give both or neither",
    ),
    (
        HYPERPOD.replace("train", "controller"),
        (3, "partition `controller` has the name of HyperPod's own instance group `controller`"),
        "give the partition another name",
    ),
    (
        HYPERPOD + "slurm: {backup_controller: true}\n",
        (6, "`backup_controller` is not possible on hyperpod: the platform runs the controller"),
        "leave it out",
    ),
    (
        OCI.replace("ocid1.compartment.oc1..aaaa", "mine"),
        (4, "`oci.compartment` cannot be `mine`"),
        "it looks like `ocid1.compartment.oc1..aaaaaaaaexample`",
    ),
    (
        OCI.replace("region:", "public_subnet: ocid1.subnet.oc1.eu-frankfurt-1.aaaa, region:"),
        (4, "`oci.public_subnet` is given without the `vcn` it belongs to"),
        "add `vcn:`, or leave the subnets out",
    ),
    (
        OCI + "slurm: {topology: {switches: [{name: s, nodes: 'train-[1-2]'}]}}\n",
        (5, "`switches` name nodes, but on oci the nodes have names only when they run"),
        "write `topology: {nodes_per_switch: 1}`: the HPC stack finds the racks itself",
    ),
    (
        SSH.replace("nodes: 2", "nodes: 4"),
        (4, "no host is given for `train-3`, `train-4`"),
        "add `train-3: ADDRESS` and so on under `ssh: hosts:`",
    ),
    (
        SSH.replace("head: 10.0.0.1", "head: 10.0.0.1, trian-1: 10.0.0.9"),
        (4, "`ssh.hosts` names `trian-1`, which is not a machine of this cluster"),
        "did you mean `train-1`?",
    ),
    (
        SSH.replace("[2-3]", "[2-4]"),
        (4, "`ssh.hosts.train-[1-2]` does not match: 2 machines, 3 addresses"),
        "give as many addresses as names",
    ),
    (
        SSH.replace("head: 10.0.0.1", "head: 10.0.0.1, train-2: 10.0.0.9"),
        (4, "host `train-2` is given twice under `ssh.hosts`"),
        "keep one",
    ),
    (
        SSH.replace("head: 10.0.0.1", "head: -oProxyCommand=x"),
        (4, "`ssh.hosts.head.address` cannot be `-oProxyCommand=x`"),
        "write a host name or an address",
    ),
    (
        SSH.replace("ssh: {", "ssh: {power_cycle: 'ipmitool -H {bmc} chassis power cycle', ").replace(
            '"10.0.0.[2-3]"', "{address: '10.0.0.[2-3]', bmc: '10.1.0.[2-3]'}"
        ),
        (4, "`power_cycle` uses `{bmc}`, but `ssh.hosts.head` has no `bmc`"),
        "write `head: {address: …, bmc: …}`, or use `{address}`",
    ),
    (
        SSH.replace("head: 10.0.0.1", "head: {address: 10.0.0.1, bmc: '10.1.0.[1-2]'}"),
        (4, "`ssh.hosts.head.bmc` does not match: 1 machines, 2 addresses"),
        "give as many addresses as names",
    ),
    (
        SSH.replace("ssh: {", "ssh: {power_cycle: 'reset {host}', "),
        (4, "`ssh.power_cycle` has an unknown placeholder `{host}`"),
        "use `{node}`, `{address}` or `{bmc}`",
    ),
    (
        SSH.replace("ssh: {", "ssh: {power_cycle: '{node} reset', "),
        (4, "`ssh.power_cycle` must start with the name of a program"),
        POWER_EXAMPLE,
    ),
    (
        SSH.replace("ssh: {", "ssh: {power_cycle: 'reset \"{node}', "),
        (4, "`ssh.power_cycle` cannot be read: No closing quotation"),
        POWER_EXAMPLE,
    ),
    (
        SSH.replace("ssh: {", "ssh: {packages: ['htop; reboot'], "),
        (4, "`ssh.packages` cannot be `htop; reboot`"),
        "write a package's name: `htop`, or the path of a file on the hosts: `/srv/htop.deb`",
    ),
    (
        "name: a\ntarget: ssh\nhead: {name: mgmt1}\npartitions: [{name: gpu, nodes: 'gpu[1-2]'}]\n"
        "ssh: {power_cycle: 'ipmitool -H {bmc} power cycle', hosts: {'gpu[1-2]': {bmc: '10.1.0.[1-2]'}}}\n",
        (5, "`power_cycle` uses `{bmc}`, but `mgmt1` has no `bmc`"),
        "add `mgmt1: {bmc: ADDRESS}` under `ssh: hosts:`",
    ),
    (
        SSH + "storage: [{name: s, mount: /s, type: nfs}]\n",
        (5, "storage `s` needs its server"),
        "add `source: server:/export`",
    ),
]


@pytest.mark.parametrize(("text", "fault", "hint"), CASES, ids=[case[1][1][:60] for case in CASES])
def test_settings_that_a_platform_refuses_are_reported(faults, text, fault, hint):
    assert (*fault, hint) in faults(text)
    assert len(faults(text)) == 1 or "does not match" in fault[1]


def test_hosts_with_real_names_need_no_addresses(faults):
    assert faults("name: a\ntarget: ssh\nhead: {name: mgmt1}\npartitions: [{name: gpu, nodes: 'gpu[001-064]'}]\n") == []


def test_power_command_of_each_host_has_its_own_values_as_separate_arguments():
    ssh = Ssh.model_validate({
        "power_cycle": "ipmitool -H {bmc} -f '/root/bmc {node}' chassis power cycle",
        "hosts": {
            "gpu-[1-2]": {"address": "10.0.0.[1-2]", "bmc": "10.1.0.[1-2]"},
            "gpu-3": {"address": "10.0.0.3", "power_cycle": "reset --host={address}"},
        },
    })  # fmt: skip
    hosts = hosts_of(ssh, ["gpu-2", "gpu-3"])
    cycle = ["chassis", "power", "cycle"]
    assert power_cycle_argv("gpu-2", hosts["gpu-2"]) == ["ipmitool", "-H", "10.1.0.2", "-f", "/root/bmc gpu-2", *cycle]
    assert power_cycle_argv("gpu-3", hosts["gpu-3"]) == ["reset", "--host=10.0.0.3"]
    assert power_cycle_argv("gpu-1", hosts_of(Ssh(), ["gpu-1"])["gpu-1"]) == []
