"""Tests of settings that HyperPod, OCI or its HPC stack would refuse: `validate` names them with line and hint."""

import csv
import shlex
from pathlib import Path

import pytest

from dalsegno.hardware import instances
from dalsegno.spec.checks.hyperpod import MAX_GROUPS, MAX_NODES, MAX_TAG_KEY, MAX_VOLUME_GIB
from dalsegno.spec.checks.oci import lustre_size
from dalsegno.spec.platform_facts import NOT_OFFERED
from dalsegno.targets.cloud.service_model import input_shape

RECORDED = Path(__file__).parents[1] / "recorded"
NETWORK = "  subnets: [subnet-0123456789abcdef0]\n  security_groups: [sg-0123456789abcdef0]\n"
HYPERPOD = """\
name: demo
target: hyperpod
hyperpod:
  region: us-east-1
  execution_role: arn:aws:iam::123456789012:role/x
  bucket: sagemaker-x
head: {instance: ml.m5.2xlarge}
partitions: [{name: train, nodes: 2, instance: ml.p5.48xlarge}]
"""
OCI = """\
name: demo
target: oci
oci:
  region: eu-frankfurt-1
  compartment: ocid1.compartment.oc1..aaaa
  ad: xYzA:EU-FRANKFURT-1-AD-1
partitions: [{name: train, nodes: 2, instance: BM.GPU.H100.8}]
"""
PARALLELCLUSTER = """\
name: demo
target: parallelcluster
parallelcluster: {region: us-east-1}
partitions: [{name: train, nodes: 2, instance: p5.48xlarge}]
"""
PLAN = "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/p5"
NEW_LUSTRE = "storage: [{name: fsx, mount: /fsx, type: lustre, size: 1200G}]\n"
OLD_LUSTRE = "storage: [{name: fsx, mount: /fsx, type: lustre, source: fs-0123456789abcdef0}]\n"
IMAGES = "containers: {folder: /fsx/images, images: ['docker://a/b:1']}\n"
HOMES = "{name: home, mount: /home, type: fss, home: true}"
NFS = "{name: data, mount: /data, type: nfs, source: '10.0.0.5:/export'}"
NOT_LISTED = "partition `train` has the instance type `{}`, which is not in the catalog"
REGION = "`{}.region` cannot be `{}`"
P5, ML_P5 = "did you mean `p5.48xlarge`?", "did you mean `ml.p5.48xlarge`?"
NEEDS_SUBNETS = "needs `hyperpod.subnets` and `hyperpod.security_groups`"


def oci(settings: str = "", rest: str = "") -> str:
    return OCI.replace("  ad:", f"{settings}  ad:") + rest


def hyperpod(settings: str = "", rest: str = "") -> str:
    return HYPERPOD.replace("  bucket:", f"{settings}  bucket:") + rest


SPELLINGS = [
    (
        PARALLELCLUSTER.replace("p5.48xlarge", "ml.p5.48xlarge"),
        (4, "partition `train` has the instance type `ml.p5.48xlarge`, which is a name of HyperPod"),
        "write `p5.48xlarge`, or set `target: hyperpod`",
    ),
    (
        PARALLELCLUSTER + "head: {instance: ml.new9.large, cpus: 8, memory: 32G}\n",
        (5, "the head node has the instance type `ml.new9.large`, which is a name of HyperPod"),
        "write `new9.large`, or set `target: hyperpod`",
    ),
    (
        HYPERPOD.replace("ml.p5.48xlarge", "p5.48xlarge"),
        (8, "partition `train` has the instance type `p5.48xlarge`, but the names of HyperPod start with `ml.`"),
        "write `ml.p5.48xlarge`",
    ),
    (
        HYPERPOD.replace("ml.m5.2xlarge", "m5.2xlarge"),
        (7, "the head node has the instance type `m5.2xlarge`, but the names of HyperPod start with `ml.`"),
        "write `ml.m5.2xlarge`",
    ),
    (
        HYPERPOD.replace("ml.p5.48xlarge", "BM.GPU.H100.8"),
        (8, "partition `train` has instance `BM.GPU.H100.8` of oci, but target `hyperpod` is aws"),
        "use `ml.p5.48xlarge`",
    ),
    (
        OCI.replace("BM.GPU.H100.8", "ml.p5.48xlarge"),
        (7, "partition `train` has instance `ml.p5.48xlarge` of aws, but target `oci` is oci"),
        "use `BM.GPU.H100.8`",
    ),
]
AWS_EXAMPLE, OCI_EXAMPLE = "it looks like `us-east-1`", "it looks like `eu-frankfurt-1`"
REGIONS = [
    (PARALLELCLUSTER.replace("us-east-1", "us-est-1"), (3, REGION.format("parallelcluster", "us-est-1")), AWS_EXAMPLE),
    (
        PARALLELCLUSTER.replace("us-east-1", "eu-frankfurt-1"),
        (3, REGION.format("parallelcluster", "eu-frankfurt-1")),
        AWS_EXAMPLE,
    ),
    (HYPERPOD.replace("us-east-1", "us-est-1"), (4, REGION.format("hyperpod", "us-est-1")), AWS_EXAMPLE),
    (HYPERPOD.replace("us-east-1", "eu-frankfurt-1"), (4, REGION.format("hyperpod", "eu-frankfurt-1")), AWS_EXAMPLE),
    (HYPERPOD.replace("us-east-1", "xx-east-1"), (4, REGION.format("hyperpod", "xx-east-1")), AWS_EXAMPLE),
    (OCI.replace("region: eu-frankfurt-1", "region: FRA"), (4, REGION.format("oci", "FRA")), OCI_EXAMPLE),
]
NO_TARGET = "the cluster file needs `target`"
ELSEWHERE = [
    (PARALLELCLUSTER.replace("target: parallelcluster\n", ""), (1, NO_TARGET), "add `target: parallelcluster`"),
    (HYPERPOD.replace("target: hyperpod\n", ""), (1, NO_TARGET), "add `target: hyperpod`"),
    (OCI.replace("target: oci\n", ""), (1, NO_TARGET), "add `target: oci`"),
    (
        hyperpod("  capacity_type: SPOT\n"),
        (6, "`hyperpod` has no setting `capacity_type`"),
        "HyperPod with Slurm has no spot instances",
    ),
    (
        hyperpod("  groups: {train: {spot_price: 1.0}}\n"),
        (6, "`hyperpod.groups.train` has no setting `spot_price`"),
        "HyperPod with Slurm has no spot instances",
    ),
    (
        oci("  capacity_type: SPOT\n"),
        (6, "`oci` has no setting `capacity_type`"),
        "target `oci` has no spot instances",
    ),
]
MISSPELLED = [
    (
        HYPERPOD.replace("ml.p5.48xlarge", "ml.p5.48xlrge"),
        (8, NOT_LISTED.format("ml.p5.48xlrge")),
        ML_P5,
    ),
    (HYPERPOD.replace("ml.p5.48xlarge", "p5.48xlrge"), (8, NOT_LISTED.format("p5.48xlrge")), ML_P5),
    (
        HYPERPOD.replace("ml.p5.48xlarge", "ml.zzz"),
        (8, NOT_LISTED.format("ml.zzz")),
        "also give `cpus` and `memory`",
    ),
    (PARALLELCLUSTER.replace("p5.48", "ml.p5.48x"), (4, NOT_LISTED.format("ml.p5.48xxlarge")), P5),
    (PARALLELCLUSTER.replace("p5.48xlarge", "p5.48xlrge"), (4, NOT_LISTED.format("p5.48xlrge")), P5),
    (
        HYPERPOD.replace("instance: ml.p5", "gpus: 1, instance: ml.p5"),
        (8, "partition `train` asks for 1 gpus per node, but `p5.48xlarge` has 8"),
        "use `ml.p5.4xlarge` (1 x H100), or set `gpus: 8`",
    ),
    (
        HYPERPOD.replace("instance: ml.p5.48xlarge", "gpus: 1, instance: ml.m5.large"),
        (8, "partition `train` asks for 1 gpus per node, but `m5.large` has none"),
        "such as `ml.p5.48xlarge` (8 x H100)",
    ),
    (
        HYPERPOD.replace(", instance: ml.p5.48xlarge", ""),
        (8, "partition `train` needs an `instance`: hyperpod rents machines by type"),
        "add `instance: ml.p5.48xlarge`",
    ),
]
ON_HYPERPOD = [
    (
        HYPERPOD.replace("head: {instance: ml.m5.2xlarge}\n", ""),
        (1, "the head node needs an `instance`: hyperpod rents machines by type"),
        "add `instance: ml.m5.2xlarge`",
    ),
    (
        hyperpod(rest="login: {count: 1}\n"),
        (9, "a login node needs an `instance`: hyperpod rents machines by type"),
        "add `instance: ml.m5.2xlarge`",
    ),
    (
        HYPERPOD.replace("ml.p5.48xlarge", "ml.trn1.2xlarge"),
        (8, "partition `train` has the instance type `ml.trn1.2xlarge`, which HyperPod does not offer"),
        "use for example `ml.p5.48xlarge`",
    ),
    (
        HYPERPOD.replace("ml.m5.2xlarge", "ml.r5.2xlarge"),
        (7, "the head node has the instance type `ml.r5.2xlarge`, which HyperPod does not offer"),
        "use for example `ml.m5.2xlarge`",
    ),
    (hyperpod(rest=NEW_LUSTRE), (9, f"storage `fsx` is new, and {NEEDS_SUBNETS}"), "source: fs-…"),
    (
        hyperpod(NETWORK, NEW_LUSTRE.replace("1200G", "1200G, throughput: 300")),
        (11, "storage `fsx` cannot have the throughput 300"),
        "choose one of 125, 250, 500, 1000",
    ),
    (
        hyperpod(rest=OLD_LUSTRE.replace("lustre,", "lustre, throughput: 250,")),
        (9, "`throughput` of storage `fsx` would have no effect"),
        "remove it: only a new Lustre has it",
    ),
    (
        hyperpod(rest=NEW_LUSTRE.replace("size: 1200G", "source: fast")),
        (9, "the source of storage `fsx` is not an id of FSx: `fast`"),
        "it looks like `fs-0123456789abcdef0`",
    ),
    (
        hyperpod(f'  groups: {{train: {{training_plan: "{PLAN}"}}}}\n'),
        (6, "the training plan of `train` is in region `eu-west-1`, but `hyperpod.region` is `us-east-1`"),
        "name a training plan in us-east-1, or write `region: eu-west-1`",
    ),
    (
        hyperpod("  ssh_key: key.pub\n", IMAGES),
        (10, "`images` need a `folder` on shared storage, where all instances find them"),
        "add storage with the mount point /fsx, and `folder: /fsx/images`",
    ),
    (
        hyperpod(rest=OLD_LUSTRE + IMAGES),
        (10, "`images` need `hyperpod.ssh_key`, because `up` imports them on the controller over ssh"),
        "add the key, or run `dalsegno image import` on the controller yourself",
    ),
    (
        hyperpod("  ssh_key: key.pub\n", OLD_LUSTRE + IMAGES.replace("/fsx/images", "/fsx2/images")),
        (11, "`images` need a `folder` on shared storage, where all instances find them"),
        "`folder: /fsx/images`",
    ),
    (
        HYPERPOD.replace("name: demo", "name: demo-"),
        (1, "a cluster on hyperpod cannot be called `demo-`"),
        "end the name with a letter or a digit",
    ),
    (
        HYPERPOD.replace("name: train", "name: train-"),
        (8, "a partition on hyperpod cannot be called `train-`"),
        "end the name with a letter or a digit",
    ),
    (
        HYPERPOD.replace("nodes: 2", "nodes: 6759"),
        (8, "partition `train` has 6,759 nodes, but an instance group has at most 6,758"),
        "divide it into two partitions",
    ),
    (
        hyperpod("  volume: 17000G\n"),
        (6, "`volume` is 17,000 GiB, but HyperPod adds at most 16,384"),
        "write at most `16384G`",
    ),
    (
        hyperpod("  tags: {a<b: x}\n"),
        (6, "SageMaker does not accept the tag `a<b: x`"),
        "use letters, digits, spaces and `_.:/=+-@`, at most 128 in its name",
    ),
    (hyperpod("  tags: {aws:team: x}\n"), (6, "the tag `aws:team` is reserved"), "choose a name without that prefix"),
    (
        hyperpod("  controller_group: login\n"),
        (3, "`controller_group` and `login_group` are both `login`"),
        "give one of them another name",
    ),
]
ON_OCI = [
    (
        OCI.replace("  ad: xYzA:EU-FRANKFURT-1-AD-1\n", ""),
        (3, "`oci` needs `ad`"),
        "add `ad:`; `oci iam availability-domain list` shows the names",
    ),
    (
        OCI.replace("xYzA:EU-FRANKFURT-1", "xYzA:US-ASHBURN"),
        (6, "`oci.ad` is in region `us-ashburn-1`, but `oci.region` is `eu-frankfurt-1`"),
        "name one in eu-frankfurt-1, or write `region: us-ashburn-1`",
    ),
    (
        OCI.replace("xYzA:EU-FRANKFURT-1", "UK-LONDON-1"),
        (6, "`oci.ad` is in region `uk-london-1`, but `oci.region` is `eu-frankfurt-1`"),
        "name one in eu-frankfurt-1, or write `region: uk-london-1`",
    ),
    (
        oci("  image: ocid1.image.oc1.phx.aaaa\n"),
        (6, "`oci.image` is in region `us-phoenix-1`, but `oci.region` is `eu-frankfurt-1`"),
        "name one in eu-frankfurt-1, or write `region: us-phoenix-1`",
    ),
    (
        oci("  os: ubuntu2204\n"),
        (6, "the marketplace has no image with ubuntu2204 for the HPC stack"),
        "write `os: ol8`, or name your own image: `image: ocid1.image…`",
    ),
    (
        oci(rest="login: {count: 2}\n"),
        (8, "`login.count` is 2, but the HPC stack's Terraform creates one login node at most"),
        "write `count: 1`; more people can share it",
    ),
    (
        OCI.replace("}]", "}, {name: debug, nodes_from: train}]"),
        (7, "the HPC stack's Terraform creates one partition, and `debug` is another one"),
        "remove it: the stack writes slurm.conf, and would drop a second partition of the same nodes",
    ),
    (
        OCI.replace("instance: BM.GPU.H100.8", "instance: BM.GPU.NEW.8, cpus: 64, memory: 512G"),
        (3, "the catalog does not have `BM.GPU.NEW.8`, so nothing says whether its nodes have an RDMA network"),
        "add `rdma: true` or `rdma: false` below `oci:`",
    ),
    (
        oci(rest=f"storage: [{HOMES}, {{name: a, mount: /a, type: fss}}, {{name: b, mount: /b, type: fss}}]\n"),
        (8, "the HPC stack mounts one file system of type fss or nfs, and `b` is another one"),
        "remove it; homes of type fss at /home and, with v3, Lustre are possible beside it",
    ),
    (
        oci(rest=f"storage: [{HOMES}, {NFS}]\n"),
        (8, "storage `data` exists, but beside new homes the HPC stack creates both file systems"),
        "remove `source`, or mount the homes elsewhere than /home, or remove `data`",
    ),
    (
        oci("  stack_version: v2.10\n", NEW_LUSTRE.replace("1200G", "31200G")),
        (9, "storage `fsx` is of type lustre, which the HPC stack of release v2.10 cannot mount"),
        "use a release v3: `oci: {stack_version: v3}`, with its `template`",
    ),
    (
        oci(rest=NEW_LUSTRE),
        (8, "storage `fsx` is 1200G, but OCI has Lustre of 31200G, in steps of 10400G up to 124800G"),
        "write `31200G`; from 124800G on, sizes are multiples of 41600G",
    ),
    (
        oci(rest=NEW_LUSTRE.replace(", size: 1200G", "")),
        (8, "storage `fsx` needs a `size`, or the `source` of an existing one"),
        "add `size: 31200G`",
    ),
    (
        oci(rest=NEW_LUSTRE.replace("1200G", "31200G, throughput: 200")),
        (8, "storage `fsx` cannot have the throughput 200"),
        "choose one of 125, 250, 500, 1000",
    ),
    (
        oci(rest=f"storage: [{HOMES.replace('true', 'true, throughput: 250')}]\n"),
        (8, "`throughput` of storage `home` would have no effect"),
        "remove it: only a new Lustre has it",
    ),
    (
        oci(rest=OLD_LUSTRE),
        (8, "the source of storage `fsx` names no server and path: `fs-0123456789abcdef0`"),
        "it looks like `10.0.0.9@tcp:/lustre`",
    ),
    (
        oci(rest="storage: [{name: a, mount: /a, type: lustre, source: 'h@tcp:/a'}, "
            "{name: b, mount: /b, type: lustre, source: 'h@tcp:/b'}]\n"),
        (8, "the HPC stack mounts one file system of type lustre, and `b` is another one"),
        "remove it",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem", "hint"), SPELLINGS + REGIONS + ELSEWHERE + MISSPELLED + ON_HYPERPOD + ON_OCI
)
def test_refusal_has_line_and_hint(faults, text, problem, hint):
    (found,) = faults(text)
    assert found[:2] == problem
    assert hint in found[2]


GOOD = [
    hyperpod(NETWORK, NEW_LUSTRE),
    hyperpod(NETWORK, NEW_LUSTRE.replace("1200G", "1200G, throughput: 500")),
    hyperpod("  ssh_key: key.pub\n", OLD_LUSTRE + IMAGES),
    hyperpod("  ssh_key: key.pub\n", OLD_LUSTRE + IMAGES.replace("/fsx/images", "/fsx")),
    hyperpod(f'  groups: {{train: {{training_plan: "{PLAN.replace("eu-west-1", "us-east-1")}"}}}}\n'),
    OCI.replace("xYzA:EU-FRANKFURT-1", "Uocm:PHX").replace("eu-frankfurt-1", "us-phoenix-1"),
    OCI.replace("EU-FRANKFURT-1", "US-ASHBURN").replace("eu-frankfurt-1", "us-ashburn-1"),
    OCI.replace("xYzA:EU-FRANKFURT-1", "NEW"),
    oci("  vcn: ocid1.vcn.oc1.eu-frankfurt-1.aaaa\n"),
    oci("  rdma: true\n").replace("instance: BM.GPU.H100.8", "instance: BM.GPU.NEW.8, cpus: 64, memory: 512G"),
    oci(rest=NEW_LUSTRE.replace("1200G", "41600G, throughput: 500")),
    oci(rest=f"storage: [{HOMES}, {{name: data, mount: /data, type: fss}}]\n"),
]


@pytest.mark.parametrize("text", GOOD)
def test_settings_that_the_platform_accepts_are_valid(faults, text):
    assert faults(text) == []


@pytest.mark.parametrize(
    "region",
    [
        "ap-northeast-3", "ap-southeast-7", "ca-west-1", "eu-central-2", "sa-east-1", "me-south-1", "af-south-1",
        "il-central-1", "mx-central-1", "us-gov-west-1", "us-iso-east-1", "us-isob-east-1", "eu-isoe-west-1",
        "us-isof-south-1", "cn-north-1", "cn-northwest-1",
    ],
)  # fmt: skip
def test_every_kind_of_aws_region_is_accepted(faults, region):
    assert faults(PARALLELCLUSTER.replace("us-east-1", region)) == []


@pytest.mark.parametrize(
    ("wanted", "size"),
    [(1, 31200), (31200, 31200), (31201, 41600), (124800, 124800), (124801, 166400), (208000, 208000)],
)
def test_lustre_of_oci_has_the_next_larger_size(wanted, size):
    assert lustre_size(wanted) == size


def test_limits_of_hyperpod_are_those_of_its_request():
    request = input_shape("sagemaker", "CreateCluster").members
    group = request["InstanceGroups"].member.members
    volume = group["InstanceStorageConfigs"].member.members["EbsVolumeConfig"].members["VolumeSizeInGB"]
    shapes = (group["InstanceCount"], request["InstanceGroups"], volume, request["Tags"].member.members["Key"])
    found = [shape.metadata["max"] for shape in shapes]
    assert found == [MAX_NODES, MAX_GROUPS, MAX_VOLUME_GIB, MAX_TAG_KEY]
    offered = set(group["InstanceType"].enum)
    aws = {each.name for each in instances().values() if each.provider == "aws"}
    assert {name for name in aws if f"ml.{name}" not in offered} == NOT_OFFERED


# More partitions on OCI


MORE = "{name: debug, nodes: 3, instance: VM.Standard.E4.Flex, cpus: 8, memory: 64G}"


def advice(faults, settings: str = "") -> str:
    ((line, what, hint),) = faults(oci(settings).replace("}]", f"}},\n  {MORE}]"))
    assert line == 8 + settings.count("\n")
    assert what == "the HPC stack's Terraform creates one partition, and `debug` is another one"
    return hint


def test_refused_partition_has_the_commands_of_the_stack_in_the_hint(faults):
    fields = "partition=debug,default_partition=false,shape=VM.Standard.E4.Flex,rdma_enabled=false,"
    fields += "marketplace_listing=HPC_OL8,instance_pool_ocpus=4,"
    fields += "instance_pool_custom_memory=true,instance_pool_memory=64"
    commands = [
        "mgmt configurations create from-existing --configuration default --name debug",
        f"mgmt configurations update --name debug --fields {fields}",
        "sudo mgmt configurations update-slurm",
        "mgmt clusters create --cluster debug --count 3 --instancetype debug",
    ]
    assert advice(faults) == (
        "remove it from the file; after `up`, on the controller (`dalsegno ssh head`), run "
        f"`{' && '.join(commands)}`; before `down`, end its machines, which Terraform does not know: "
        "`mgmt clusters delete --cluster debug`"
    )


def test_refused_partition_of_the_older_release_has_its_scripts_in_the_hint(faults):
    image = "ocid1.image.oc1.eu-frankfurt-1.aaaa"
    assert advice(faults, f"  stack_version: v2.10\n  image: {image}\n") == (
        "remove it from the file; after `up`, on the controller (`dalsegno ssh head`), add a queue `debug` with an "
        f"instance type `debug` to /opt/oci-hpc/conf/queues.conf (shape VM.Standard.E4.Flex, image {image}, "
        "cluster_network false, instance_pool_ocpus 4, instance_pool_custom_memory true, instance_pool_memory 64), "
        "and then run `/opt/oci-hpc/bin/slurm_config.sh && "
        "/opt/oci-hpc/bin/create_cluster.sh 3 debug-1-debug debug debug && bash /opt/dalsegno-scripts/nodes.sh`; "
        "before `down`, end its machines, which Terraform does not know: "
        "`/opt/oci-hpc/bin/delete_cluster.sh debug-1-debug`"
    )


def test_advice_about_more_partitions_uses_commands_and_options_of_the_release(faults):
    rows = list(csv.reader((RECORDED / "oci-hpc-3.1.0/commands.csv").read_text().splitlines()))[1:]
    options = {command: set(found.split()) for command, found in rows}
    quoted = [part for part in advice(faults).split("`") if "mgmt " in part]
    lines = [shlex.split(line.removeprefix("sudo ")) for part in quoted for line in part.split(" && ")]
    assert len(lines) == 5
    for argv in lines:
        command = next(each for each in options if f"{shlex.join(argv)} ".startswith(f"{each} "))
        assert [word for word in argv if word.startswith("--") and word not in options[command]] == []
