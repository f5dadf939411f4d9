"""Files that ParallelCluster or AWS would refuse late or with an unclear message, and that are refused here first."""

from __future__ import annotations

import pytest

BASE = """\
name: demo
target: parallelcluster
partitions: [{name: train, nodes: 2, instance: p5.48xlarge}]
parallelcluster: {region: us-east-1}
"""
SUBNETS = "head_subnet: subnet-0123456789abcdef0, subnets: [subnet-0123456789abcdef1, subnet-0123456789abcdef2]"
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:x"
FSX = "storage: [{name: fsx, mount: /fsx, type: lustre, size: 1200G}]\n"
RESERVED = "capacity_reservation: cr-0123456789abcdef0"


def own(settings: str) -> str:
    return BASE.replace("us-east-1}", f"us-east-1, {settings}}}")


def part(settings: str) -> str:
    return BASE.replace("instance: p5.48xlarge", f"instance: p5.48xlarge, {settings}")


def queue(settings: str, common: str = "") -> str:
    return own(f"{common}queues: {{train: {{{settings}}}}}")


SCRIPTS = ", ".join(f'{{script: "s3://b/{number}.sh"}}' for number in range(10))
CASES = {
    "zone of another region": (own("availability_zone: us-west-2a"), 4, "is not in region `us-east-1`", "us-east-1a"),
    "zone of an existing network": (
        own("availability_zone: us-east-1a, head_subnet: subnet-0123456789abcdef0"),
        4, "`availability_zone` is for a new network", "remove one of them",
    ),
    "two networks": (
        own("stacks: [a], head_subnet: subnet-0123456789abcdef0"),
        4, "both `stacks` and `head_subnet` say where the cluster is", "remove `head_subnet`",
    ),
    "no address range": (own("key: k, allowed_ips: 203.0.113.400/24"), 4, "is not a range of addresses", "/24"),
    "host bits in a range": (own("key: k, allowed_ips: 203.0.113.7/24"), 4, "is not a range of addresses", "/32"),
    "sshd open to the world": (own("key: k"), 4, "the whole internet could reach", "add `allowed_ips: 203"),
    "addresses without a key": (own("allowed_ips: 203.0.113.0/24"), 4, "has no effect without a `key`", "add `key"),
    "old version": (own("version: 3.8.0"), 4, "ParallelCluster 3.8.0 is too old", "3.16.1 is tested"),
    "no version": (own("version: latest"), 4, "`parallelcluster.version` cannot be `latest`", "`3.16.1`"),
    "seconds of idle time": (own("scaledown_idletime: 90s"), 4, "ParallelCluster counts whole minutes", "`10m`"),
    "reserved tag": (own("tags: {'aws:x': y}"), 4, "the tag `aws:x` is reserved", "without that prefix"),
    "small root volume": (own("root_volume: 20G"), 4, "`root_volume` is 20 GiB, but the image needs 40", "`40G`"),
    "small root volume of a queue": (queue("root_volume: 8G"), 4, "but the image needs 40", "leave it out"),
    "directory in clear text": (
        own(f"directory_service: {{domain: a.org, address: 'ldap://a', password_secret: '{SECRET}', reader: r}}"),
        4, "the directory is queried without encryption", "write `ldaps://`",
    ),
    "accounting without a database": (
        BASE + "slurm: {accounting: true}\n", 5, "needs a MySQL server of your own", "add `database:`",
    ),
    "accounts without a database": (BASE + "accounts: [{name: ml}]\n", 5, "`accounts` needs", "`database:`"),
    "qos without a database": (BASE + "slurm: {qos: [{name: high}]}\n", 5, "`slurm.qos` needs", "`database:`"),
    "users beside a directory": (
        own(f"directory_service: {{domain: a.org, address: 'ldaps://a', password_secret: '{SECRET}', reader: r}}")
        + "users: [{name: ada}]\n",
        5, "both `users` and `directory_service` say who has an account", "remove one of them",
    ),
    "images without a key": (
        BASE + "containers: {enabled: true, folder: /home/images, images: [ubuntu]}\n",
        5, "images are imported over ssh, which needs a `key`", "`dalsegno image import`",
    ),
    "images on a local disk": (
        own("key: k, allowed_ips: 203.0.113.0/24")
        + "containers: {enabled: true, folder: /scratch, images: [ubuntu]}\n",
        5, "`images` need a `folder` on storage that all machines see", "`folder: /home/images`",
    ),
    "prometheus without packages": (
        own("os: alinux2023") + "monitoring: {prometheus: true}\n",
        5, "`alinux2023` has no packages of Prometheus", "`os: ubuntu2204`",
    ),
    "admin": (
        BASE + "users: [{name: ada, admin: true}]\n", 5, "`admin` of user `ada` is not possible", "`groups: [sudo]`",
    ),
    "accounts without a key": (
        own(f"database: {{uri: 'db:3306', user: s, password_secret: '{SECRET}'}}") + "accounts: [{name: ml}]\n",
        4, "accounts and QOS are added over ssh", "add `key:`",
    ),
    "reservations": (
        BASE + "reservations: [{name: r, node_count: 1, partition: train, duration: 1h, users: [root]}]\n",
        5, "`reservations` is not possible", "`dalsegno shell`",
    ),
    "name of the head": (BASE + "head: {name: boss}\n", 5, "`name` is not possible on ParallelCluster", "names the"),
    "names of login nodes": (BASE + "login: {names: [l1]}\n", 5, "`names` is not possible", "write `count:`"),
    "spares": (part("spares: 1"), 3, "`spares` of partition `train` is not possible", "a drained node is replaced"),
    "features": (part("features: [a]"), 3, "`features` of partition `train` is not possible", "sets the features"),
    "weight": (part("weight: 5"), 3, "`weight` of partition `train` is not possible", "sets the weight"),
    "oversubscribe": (part("oversubscribe: exclusive"), 3, "`oversubscribe` of partition `train`", "sets it itself"),
    "spot with a reservation": (
        own(f"capacity_type: SPOT, {RESERVED}"), 4, "SPOT nodes, which no capacity reservation holds", "ONDEMAND",
    ),
    "block in a placement group": (
        own(f"capacity_type: CAPACITY_BLOCK, {RESERVED}, placement_group: true"),
        4, "a capacity block, which cannot be in a placement group", "remove `placement_group`",
    ),
    "block in a named placement group": (
        own(f"capacity_type: CAPACITY_BLOCK, {RESERVED}, placement_group_name: g"),
        4, "a capacity block, which cannot be in placement group `g`", "for other partitions only",
    ),
    "name of no placement group": (
        own("placement_group: false, placement_group_name: g"), 4, "has no effect with `placement_group: false`",
        "remove one",
    ),
    "name of no placement group of a queue": (
        queue("placement_group: false, placement_group_name: g"), 4, "names a placement group and turns", "remove one",
    ),
    "placement group in two zones": (
        own(f"{SUBNETS}, placement_group_name: g").replace("p5.48xlarge", "m5.xlarge"),
        4, "2 subnets, but a placement group works in one", "one subnet",
    ),
    "malformed placement group": (own("placement_group_name: 'a b'"), 4, "cannot be `a b`", "`my-group`"),
    "block with nodes on demand": (
        queue("max_count: 8", f"capacity_type: CAPACITY_BLOCK, {RESERVED}, "),
        4, "a capacity block, whose nodes all run from its start", "remove `max_count`",
    ),
    "EFA in two zones": (own(SUBNETS), 4, "2 subnets, but EFA works in one availability zone only", "one subnet"),
    "unlike types": (queue("instances: [p4d.24xlarge]"), 4, "mixes `p5.48xlarge` and `p4d.24xlarge`", "same kind"),
    "unknown type": (queue("instances: [p5.48xlrage]"), 4, "is not in the catalog", "did you mean `p5.48xlarge`?"),
    "EFA that is not there": (
        queue("efa: true").replace("instance: p5.48xlarge", "instance: m5.xlarge"),
        4, "asks for EFA, which `m5.xlarge` does not have", "remove `efa: true`",
    ),
    "price of nodes that are not spot": (queue("spot_price: 1.0"), 4, "its nodes are not SPOT", "capacity_type: SPOT"),
    "script after an update of a node": (
        own('actions: [{script: "s3://b/x.sh", on: compute, at: updated}]'), 4, "only the head node does", "`on: head`",
    ),
    "script over plain http": (own('actions: [{script: "http://b/x.sh"}]'), 4, "cannot be `http://b/x.sh`", "s3://"),
    "too many scripts": (own(f"actions: [{SCRIPTS}]"), 4, "10 scripts run on head nodes", "merge some of them"),
    "repository of no storage": (
        own('data_repositories: [{storage: fxs, s3: "s3://bucket"}]') + FSX,
        4, "names the storage `fxs`, which the file does not have", "did you mean `fsx`?",
    ),
    "repository of a disk": (
        own('data_repositories: [{storage: d, s3: "s3://bucket"}]')
        + "storage: [{name: d, mount: /d, type: ebs, size: 10G}]\n",
        4, "storage `d` is of type `ebs`, which cannot mirror a bucket", "type `lustre`",
    ),
    "repositories that overlap": (
        own('data_repositories: [{storage: fsx, s3: "s3://one"}, {storage: fsx, path: /data/x, s3: "s3://two"}]')
        + FSX, 4, "`s3://one` and `s3://two` overlap in `/data`", "do not contain each other",
    ),
    "repository without events": (
        own('data_repositories: [{storage: fsx, s3: "s3://one", import_events: [], export_events: []}]') + FSX,
        4, "neither imports nor exports", "leave both out",
    ),
    "setting of ParallelCluster's own": (
        BASE + "slurm: {extra: {SuspendTime: '60'}}\n", 5, "`SuspendTime` in `slurm.extra`", "remove it",
    ),
    "setting of a queue of its own": (
        part("extra: {SuspendTime: '60'}"), 3, "a setting of ParallelCluster's own", "remove it",
    ),
    "id of another service": (
        BASE + "storage: [{name: h, mount: /h, type: openzfs, source: fs-0123456789abcdef0}]\n",
        5, "is not an id of openzfs", "`fsvol-0123456789abcdef0`",
    ),
    "unknown throughput": (
        BASE + FSX.replace("1200G", "1200G, throughput: 200"), 5, "cannot have the throughput 200", "125, 250, 500",
    ),
    "small OpenZFS": (
        BASE + "storage: [{name: h, mount: /h, type: openzfs, size: 10G}]\n", 5, "OpenZFS starts at 64", "`64G`",
    ),
    "home elsewhere": (BASE + FSX.replace("1200G", "1200G, home: true"), 5, "in /home on ParallelCluster", "/home"),
    "mount options": (BASE + FSX.replace("1200G", "1200G, options: noatime"), 5, "would have no effect", "`options`"),
    "file system that nothing reaches": (
        own("head_subnet: subnet-0123456789abcdef0") + FSX, 5, "which security group lets the nodes reach it",
        "add `security_groups:`",
    ),
    "system without an image": (own("os: rocky9"), 4, "publishes no image for `rocky9`", "add `ami:`"),
    "malformed reservation": (own("capacity_reservation: cr-123"), 4, "cannot be `cr-123`", "cr-0123456789abcdef0"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_is_refused_with_its_line_and_a_fix(faults, name):
    text, line, what, hint = CASES[name]
    found = faults(text)
    assert len(found) == 1, found
    assert found[0][0] == line and what in found[0][1] and hint in found[0][2], found


def test_more_than_thirty_inputs_are_refused():
    assert len(CASES) >= 30
