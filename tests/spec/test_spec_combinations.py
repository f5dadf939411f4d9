"""Tests of values that are valid alone but not together: message, line and hint."""

import pytest

from dalsegno.spec.facts import CheckSetting

LOCAL = "name: demo\ntarget: local\n"
SSH = "name: demo\ntarget: ssh\nhead: {name: mgmt}\n"
NAMED = "partitions: [{name: train, nodes: 'n[1-4]'}]\n"
TRAIN = "partitions:\n  - {name: train, nodes: 4}\n"


def one(faults, text):
    (fault,) = faults(text)
    return fault


# Machines

MACHINES = {
    "instance: p5.4xlarge, gpus: 8": (
        "partition `train` asks for 8 gpus per node, but `p5.4xlarge` has 1",
        "use `p5.48xlarge` (8 x H100), or set `gpus: 1`",
    ),
    "instance: p5.48xlarge, gpus: 3": (
        "partition `train` asks for 3 gpus per node, but `p5.48xlarge` has 8",
        "set `gpus: 8`",
    ),
    "instance: m5.large, gpus: 8": (
        "partition `train` asks for 8 gpus per node, but `m5.large` has none",
        "leave `gpus` out, or use a type that has some, such as `p5.48xlarge` (8 x H100)",
    ),
    "instance: p5.48xlarge, gpu_type: a100": (
        "partition `train` asks for gpu type `a100`, but `p5.48xlarge` has h100",
        "leave `gpu_type` out; it is in the catalog",
    ),
    "instance: m5.large, cpus: 4": (
        "partition `train` asks for 4 cpus, but `m5.large` has 2",
        "leave `cpus` out; it is in the catalog",
    ),
    "instance: m5.large, memory: 64G": (
        "partition `train` asks for 64 GiB, but `m5.large` has 8 GiB",
        "leave `memory` out; it is in the catalog",
    ),
    "instance: p5.48xlarg": (
        "partition `train` has the instance type `p5.48xlarg`, which is not in the catalog",
        "did you mean `p5.48xlarge`?",
    ),
    "instance: quux": (
        "partition `train` has the instance type `quux`, which is not in the catalog",
        "for a type that is not in the catalog, also give `cpus` and `memory`",
    ),
    "instance: VM.Standard.E4.Flex": (
        "partition `train` needs `cpus` and `memory`: `VM.Standard.E4.Flex` comes in any size",
        "add for example `cpus: 16` and `memory: 128G`",
    ),
    "instance: VM.Standard.E4.Flex, cpus: 999, memory: 64G": (
        "partition `train` asks for 999 cpus, but `VM.Standard.E4.Flex` has at most 228",
        "write at most 228",
    ),
    "instance: BM.GPU.B200.8, memory: 2T": (
        "partition `train` needs `cpus`: `BM.GPU.B200.8` has no sizes in the catalog yet",
        "add for example `cpus: 16` and `memory: 128G`",
    ),
    "gpu_type: h100": (
        "partition `train` has a `gpu_type` but no `gpus`",
        "add the number of GPUs per node: `gpus: 8`",
    ),
    "gpus: 8, gpu_type: nvidia_h100": (
        "partition `train` asks for the gpu type `nvidia_h100`, which does not exist",
        "did you mean `h100`?",
    ),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_invalid_machine_is_refused(faults, machine):
    text = f"{LOCAL}partitions:\n  - {{name: train, nodes: 4, {machine}}}\n"
    assert one(faults, text) == (4, *MACHINES[machine])


@pytest.mark.parametrize(
    "machine",
    [
        "instance: p5.48xlarge, gpus: 8, gpu_type: h100, cpus: 192, memory: 2048 GiB",
        "instance: x9.mega, cpus: 4, memory: 4G",
        "gpus: 4, gpu_type: h800",
        "instance: trn1.32xlarge, gpus: 16",
        "instance: VM.Standard.E5.Flex, cpus: 8, memory: 64G",
        "instance: ml.p5.48xlarge",
    ],
)
def test_valid_machine_is_accepted(faults, machine):
    assert faults(f"{LOCAL}partitions:\n  - {{name: train, nodes: 4, {machine}}}\n") == []


def test_head_node_is_checked_as_a_machine(faults):
    assert one(faults, f"{SSH}{NAMED}".replace("mgmt", "mgmt, instance: m5.larg")) == (
        3,
        "the head node has the instance type `m5.larg`, which is not in the catalog",
        "did you mean `m5.large`?",
    )


# Partitions

PARTITIONS = {
    "- {name: a}": (4, "partition `a` has no nodes", "add `nodes: 4`, or `nodes_from:` with another partition's name"),
    "- {name: a, nodes: 2}\n  - {name: a, nodes: 2}": [
        (5, "partition `a` is defined twice, first on line 4", "give one of them another name"),
    ],
    "- {name: a, nodes: 2}\n  - {name: b, nodes_from: aa}": (
        5,
        "partition `b` takes its nodes from `aa`, which is not a partition",
        "did you mean `a`?",
    ),
    "- {name: a, nodes_from: a}": (4, "partition `a` takes its nodes from itself", "give one of them `nodes`"),
    "- {name: a, nodes_from: b}\n  - {name: b, nodes_from: [a]}": (
        4,
        "partitions `a`, `b` take their nodes from each other in a cycle",
        "give one of them `nodes`",
    ),
    "- {name: a, nodes: 2}\n  - {name: b, nodes_from: a, spares: 1}": (
        5,
        "partition `b` cannot have spares: its machines are those of `a`",
        "give `a` the spares",
    ),
    "- {name: a, nodes: 2}\n  - {name: b, nodes_from: a, cpus: 4}": (
        5,
        "partition `b` cannot set `cpus`: its machines are those of `a`",
        "set it in `a`",
    ),
    "- {name: a, nodes: 2}\n  - {name: b, nodes_from: a, nodes: 3}": (
        5,
        "partition `b` takes 3 nodes from `a`, which has 2",
        "write at most `nodes: 2`, or leave it out for all",
    ),
    "- {name: a, nodes: 2}\n  - {name: b, nodes: 2}\n  - {name: c, nodes_from: [a, b], nodes: 5}": (
        6,
        "partition `c` takes 5 nodes from `a`, `b`, which have 4",
        "write at most `nodes: 4`, or leave it out for all",
    ),
    "- {name: a, nodes: 2}\n  - {name: b, nodes_from: a, nodes: a-1}": (
        5,
        "partition `b` names nodes and also takes them from `a`",
        "with `nodes_from`, `nodes` must be a number",
    ),
    "- {name: a, nodes: 2, default: true}\n  - {name: b, nodes: 1, default: true}": (
        5,
        "partitions `a` and `b` are both default",
        "keep `default: true` in one",
    ),
    "- {name: a, nodes: 2, max_nodes: 3}": (
        4,
        "`max_nodes` of partition `a` is 3, but it has 2 nodes",
        "write at most 2, or leave it out",
    ),
    "- {name: a, nodes: 2, spares: 4, min_nodes: 3}": (
        4,
        "`min_nodes` of partition `a` is 3, but it has 2 nodes",
        "write at most 2, or leave it out",
    ),
    "- {name: a, nodes: 4, min_nodes: 3, max_nodes: 2}": (
        4,
        "`min_nodes` of partition `a` (3) exceeds its `max_nodes` (2)",
        "no job would fit",
    ),
    "- {name: a, nodes: 2, time_limit: 1h, default_time: 2h}": (
        4,
        "`default_time` of partition `a` (120 min) exceeds its `time_limit` (60 min)",
        "make it shorter, or leave it out",
    ),
    "- {name: a, nodes: 'g[1-2]', spares: 1}": (
        4,
        "partition `a` names its nodes, but not its spares",
        "name them too: `spares: gpu[65-66]`",
    ),
    "- {name: a, nodes: 2, spares: g3}": (
        4,
        "partition `a` names its spares, but not its nodes",
        "write the number: `spares: 1`",
    ),
    "- {name: a, nodes: 'g[1-3]'}\n  - {name: b, nodes: 'g[3-4]'}": (
        5,
        "node `g3` of partition `b` is also in partition `a`",
        "to share machines write `nodes_from: a` instead of `nodes`",
    ),
    "- {name: GPU, nodes: 1}\n  - {name: gpu, nodes: 1}": (
        5,
        "node `gpu-1` of partition `gpu` is also in partition `GPU`",
        "to share machines write `nodes_from: GPU` instead of `nodes`",
    ),
    "- {name: a, nodes: [g1, g1]}": (4, "partition `a` names the node `g1` twice", "keep one"),
    "- {name: a, nodes: head}": (
        4,
        "node `head` of partition `a` has the name of the head node",
        "give the partition or the machine another name",
    ),
    "- {name: a, nodes: 2, preempt_mode: cancel}": (
        4,
        "partition `a` has a `preempt_mode`, but nothing preempts on this cluster",
        "add `slurm: {preemption: {by: partition}}`",
    ),
    "- {name: a, nodes: 2, allow_accounts: ml}": (
        4,
        "partition `a` allows the account `ml`, which does not exist",
        "add it: `accounts: [{name: ml}]`",
    ),
    "- {name: a, nodes: 2, allow_qos: [normal, hihg]}": (
        4,
        "partition `a` allows the qos `hihg`, which does not exist",
        "add it: `slurm: {qos: [{name: hihg}]}`",
    ),
    "- {name: a, nodes: 2, extra: {maxtime: 5}}": (
        4,
        "`extra` of partition `a` sets `maxtime`, which Dal Segno sets itself",
        "use `time_limit`",
    ),
    "- {name: a, nodes: 2, extra: {Priority: 5}}": (
        4,
        "`extra` of partition `a` sets `Priority`, which Dal Segno sets itself",
        "use `priority`",
    ),
}


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_invalid_partitions_are_refused(faults, partitions):
    wanted = PARTITIONS[partitions]
    assert faults(f"{LOCAL}partitions:\n  {partitions}\n") == (wanted if isinstance(wanted, list) else [wanted])


def test_file_without_partitions_is_refused(faults):
    hint = "add `partitions: [{name: train, nodes: 4}]`"
    assert one(faults, LOCAL + "partitions: []\n") == (3, "there is no partition", hint)


def test_login_node_and_partition_named_login_conflict(faults):
    assert one(faults, LOCAL + "partitions: [{name: login, nodes: 1}]\nlogin: {count: 1}\n") == (
        3,
        "node `login-1` of partition `login` has the name of a login node",
        "give the partition or the machine another name",
    )


def test_more_nodes_than_slurm_supports_are_refused(faults):
    text = LOCAL + "partitions: [{name: a, nodes: 65536}, {name: b, nodes: 2}]\n"
    assert one(faults, text) == (3, "the cluster has 65,538 nodes", "Slurm takes at most 65,536")


# Policy, users, topology, reservations: one more block below a valid file

BLOCKS = {
    "slurm: {qos: [{name: high, preempts: lwo}, {name: low}]}": (
        "qos `high` preempts `lwo`, which is not a QOS",
        "did you mean `low`?",
    ),
    "slurm: {qos: [{name: high, preempts: high}]}": ("qos `high` preempts itself", "name another QOS"),
    "slurm: {qos: [{name: a, preempts: b}, {name: b}], preemption: {by: partition}}": (
        "qos `a` preempts others, but preemption is by partition",
        "set `slurm: {preemption: {by: qos}}`, or leave `preempts` out",
    ),
    "slurm: {qos: [{name: a}, {name: a}]}": (
        "qos `a` is defined twice, first on line 5",
        "give one of them another name",
    ),
    "slurm: {extra: {ClusterName: x}}": ("`slurm.extra` sets `ClusterName`, which Dal Segno sets itself", "use `name`"),
    "slurm: {extra: {slurmctldhost: x}}": (
        "`slurm.extra` sets `slurmctldhost`, which Dal Segno sets itself",
        "use `slurm.backup_controller`",
    ),
    "slurm: {extra: {NodeName: x}}": ("`slurm.extra` sets `NodeName`, which Dal Segno sets itself", "use `partitions`"),
    "slurm: {extra: {SlurmUser: x}}": ("`slurm.extra` sets `SlurmUser`, which Dal Segno sets itself", "leave it out"),
    "slurm: {extra: {PriorityWeightAge: 5}}": (
        "`slurm.extra` sets `PriorityWeightAge`, which Dal Segno sets itself",
        "use `slurm.priority.age`",
    ),
    "slurm: {extra: {MaxArraySize: 5, maxarraysize: 6}}": (
        "`slurm.extra` sets `MaxArraySize` and `maxarraysize`, which Slurm reads as the same",
        "keep one",
    ),
    "slurm: {accounting: false, enforce: limits}": (
        "`slurm.enforce` needs accounting, which is off",
        "set `slurm: {accounting: true}`, or leave it out",
    ),
    "slurm: {accounting: false, qos: [{name: a}]}": (
        "`slurm.qos` needs accounting, which is off",
        "set `slurm: {accounting: true}`, or leave it out",
    ),
    "slurm: {accounting: false, priority: {fair_share: 5}}": (
        "`slurm.priority.fair_share` needs accounting, which is off",
        "set `slurm: {accounting: true}`, or leave it out",
    ),
    "slurm: {accounting: false, preemption: {by: qos}}": (
        "preemption by QOS needs accounting, which is off",
        "set `slurm: {accounting: true}`, or leave it out",
    ),
    "slurm: {accounting: false}\naccounts: [{name: ml}]": (
        "`accounts` needs accounting, which is off",
        "set `slurm: {accounting: true}`, or leave it out",
    ),
    "slurm: {accounting: false}\nusers: [{name: ann, fair_share: 3}]": (
        "`fair_share` of user `ann` needs accounting, which is off",
        "set `slurm: {accounting: true}`, or leave it out",
    ),
    "slurm: {topology: {}}": (
        "`slurm.topology` needs either `nodes_per_switch` or `switches`",
        "keep one of the two",
    ),
    "slurm: {topology: {switches: [{name: s, nodes: 'train-[1-3]'}]}}": (
        "no switch has `train-4`",
        "put every node on a leaf switch",
    ),
    "slurm: {topology: {switches: [{name: s, nodes: 'train-[1-5]'}]}}": (
        "switch `s` has the node `train-5`, which does not exist",
        "did you mean `train-4`?",
    ),
    "slurm: {topology: {switches: [{name: s, nodes: 'train-[1-4]'}, {name: t, nodes: train-4}]}}": (
        "node `train-4` is on switch `s` and on `t`",
        "keep it on one",
    ),
    "slurm: {topology: {switches: [{name: s, nodes: 'train-[1-4]'}, {name: top, switches: [s, r]}]}}": (
        "switch `top` is above `r`, which is not a switch",
        "add it",
    ),
    "slurm: {topology: {switches: [{name: s, nodes: 'train-[1-4]'}, {name: top}]}}": (
        "switch `top` must name either nodes or switches",
        "a leaf has `nodes`, any other has `switches`",
    ),
    "slurm: {topology: {switches: [{name: s, nodes: 'train-[1-4]'}, {name: t, switches: u}, {name: u, switches: t}"
    "]}}": (
        "switches `t`, `u` are above each other in a cycle",
        "make it a tree",
    ),
    "accounts: [{name: a, parent: b}]": (
        "account `a` is below the account `b`, which does not exist",
        "add it: `accounts: [{name: b}]`",
    ),
    "accounts: [{name: a, parent: b}, {name: b, parent: a}]": (
        "accounts `a`, `b` are each other's parents",
        "put one of them below `root`",
    ),
    "accounts: [{name: ml, qos: hi}]": (
        "account `ml` uses the qos `hi`, which does not exist",
        "add it: `slurm: {qos: [{name: hi}]}`",
    ),
    "accounts: [{name: ml}, {name: ml}]": (
        "account `ml` is defined twice, first on line 5",
        "give one of them another name",
    ),
    "users: [{name: ann, accounts: ml}]": (
        "user `ann` is in the account `ml`, which does not exist",
        "add it: `accounts: [{name: ml}]`",
    ),
    "accounts: [{name: ml}]\nusers: [{name: ann, accounts: ml, default_account: root}]": (
        "`default_account` of user `ann` is `root`, which is not among their accounts",
        "add it to `accounts` of `ann`",
    ),
    "users: [{name: ann, qos: [normal], default_qos: high}]": (
        "`default_qos` of user `ann` is `high`, which is not among their QOS",
        "add it to `qos` of `ann`",
    ),
    "users: [{name: ann, uid: 2000}, {name: bob, uid: 2000}]": (
        "users `ann` and `bob` have the same uid 2000",
        "give one of them another uid, or leave it out",
    ),
    "users: [{name: ann, max_gpus: 4}]": (
        "`max_gpus` of user `ann` is a limit, but `slurm.enforce` does not include limits",
        "Slurm applies limits only with `slurm: {enforce: [associations, limits, qos]}`",
    ),
    "users: [{name: ann, groups: [lab], allow_privileged: [sudo]}]": (
        "`allow_privileged` of user `ann` names `sudo`, which is not among their groups",
        "add it to `groups` of `ann`",
    ),
    "users: [{name: ann, full_name: 'a:b'}]": (
        "`full_name` of user `ann` cannot be `a:b`",
        "write it on one line without `:`, at most 200 letters",
    ),
    "groups: [{name: lab, gid: 5000}, {name: team, gid: 5000}]": (
        "groups `lab` and `team` have the same gid 5000",
        "give one of them another gid, or leave it out",
    ),
    "groups: [{name: lab}, {name: lab}]": (
        "group `lab` is defined twice, first on line 5",
        "give one of them another name",
    ),
    "users: [{name: ann}, {name: ann}]": (
        "user `ann` is defined twice, first on line 5",
        "give one of them another name",
    ),
    "reservations: [{name: r, nodes: train-5, users: root}]": (
        "reservation `r` has the node `train-5`, which does not exist",
        "did you mean `train-4`?",
    ),
    "reservations: [{name: r, partition: trai, node_count: 1, users: root}]": (
        "reservation `r` is in `trai`, which is not a partition",
        "did you mean `train`?",
    ),
    "reservations: [{name: r, partition: train, node_count: 9, users: root}]": (
        "reservation `r` has 9 nodes, but there are only 4",
        "write at most 4",
    ),
    "reservations: [{name: r, users: root}]": (
        "reservation `r` must have either `nodes` or `node_count`",
        "name the nodes, or give their number",
    ),
    "reservations: [{name: r, nodes: train-1}]": (
        "reservation `r` has no users and no accounts",
        "add `users: [root]` or `accounts:`",
    ),
    "reservations: [{name: r, nodes: train-1, accounts: ml}]": (
        "reservation `r` is for the account `ml`, which does not exist",
        "add it: `accounts: [{name: ml}]`",
    ),
    "ssh: {user: ubuntu}": (
        "there is a `ssh:` block, but the target is `local`",
        "remove it, or set `target: ssh`",
    ),
    "login: {count: 3, names: [l1, l2]}": ("`login.count` is 3, but 2 login nodes are named", "leave `count` out"),
    "local: {subnet: 10.0.0.0/29}": (
        "`local.subnet` 10.0.0.0/29 has 6 addresses, but 7 are needed",
        "choose a larger one, or leave it out",
    ),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_invalid_blocks_are_refused(faults, block):
    last_line = 5 + block.count("\n")
    assert one(faults, f"{LOCAL}{TRAIN}{block}\n") == (last_line, *BLOCKS[block])


STORAGE = {
    "storage: [{name: a, mount: /a}, {name: a, mount: /b}]": (
        "storage `a` is defined twice, first on line 5",
        "give one of them another name",
    ),
    "storage: [{name: a, mount: /fsx}, {name: b, mount: /fsx/b}]": (
        "the mounts `/fsx` of `a` and `/fsx/b` of `b` overlap",
        "use mount points that do not contain each other",
    ),
    "storage: [{name: a, mount: /usr}]": (
        "storage `a` would be mounted over the system's own `/usr`",
        "choose another mount point, such as `/fsx` or `/shared`",
    ),
    "storage: [{name: a, mount: /etc/slurm}]": (
        "storage `a` would be mounted over the system's own `/etc/slurm`",
        "choose another mount point, such as `/fsx` or `/shared`",
    ),
    "storage: [{name: a, mount: /fsx/../etc}]": (
        "storage `a` has the unusual mount point `/fsx/../etc`",
        "write `/etc`",
    ),
    "storage: [{name: a, mount: /fsx, type: efs}]": (
        "storage `a` is of type `efs`, which target `ssh` does not support",
        "use `folder` or `existing` or `scratch` or `nfs` or `lustre`",
    ),
    "storage: [{name: a, mount: /a, source: 'b:/c'}]": (
        "the source of storage `a` is not the path of a folder: `b:/c`",
        "write a path without `..`, such as `/data/shared`, or leave it out",
    ),
    "storage: [{name: a, mount: /a, size: 10G}]": (
        "`size` of storage `a` would have no effect: a folder has no size of its own",
        "remove `size`",
    ),
    "storage: [{name: a, mount: /a, type: existing, source: /b}]": (
        "`source` of storage `a` would have no effect: it is mounted already",
        "remove `source`",
    ),
    "storage: [{name: a, mount: /a, type: scratch, home: true}]": (
        "`home` of storage `a` would have no effect: every node has its own",
        "remove `home`",
    ),
    "storage: [{name: a, mount: /a, required: true}]": (
        "`required` of storage `a` would have no effect: it is for `type: scratch`",
        "remove `required`",
    ),
    "storage: [{name: a, mount: /a, type: scratch}, {name: b, mount: /b, type: scratch}]": (
        "storage `a` and `b` are both scratch, but a job has one scratch folder",
        "keep one of them",
    ),
    "storage: [{name: a, mount: /a, home: true}, {name: b, mount: /b, home: true}]": (
        "storage `a` and `b` both hold the users' home folders",
        "keep `home: true` in one",
    ),
}


@pytest.mark.parametrize("block", STORAGE)
def test_invalid_storage_is_refused(faults, block):
    assert one(faults, f"{SSH}{NAMED}{block}\n") == (5, *STORAGE[block])


# Monitoring

MONITORING = {
    "monitoring: {enabled: false, prometheus: true}": (
        "`prometheus` is on, but the metrics that it reads are turned off"
    ),
    "monitoring: {alerts: {webhook: [{}]}}": "a webhook receiver of alerts needs either `url` or `url_file`",
    "monitoring: {alerts: {webhook: [{url: http://a/b, url_file: /a}]}}": (
        "a webhook receiver of alerts needs either `url` or `url_file`"
    ),
    "monitoring: {alerts: {email: [{to: [a@b], sender: c@d, smarthost: 'e:25', user: f}]}}": (
        "an e-mail receiver of alerts needs `password_file`"
    ),
    "monitoring: {alerts: {email: [{to: [a@b], sender: c@d, smarthost: 'e:25', password_file: /f}]}}": (
        "an e-mail receiver of alerts needs `user`"
    ),
}


@pytest.mark.parametrize("block", MONITORING)
def test_incomplete_monitoring_is_refused(faults, block):
    assert one(faults, f"{LOCAL}{TRAIN}{block}\n")[:2] == (5, MONITORING[block])


# Unimplemented fields

UNBUILT = {
    "modules: {enabled: true}": "`modules` is not built yet",
    "head: {instance: m5.large}": "`head.instance` is not built yet",
    "login: {count: 1, cpus: 4}": "`login.cpus` is not built yet",
}


@pytest.mark.parametrize("block", UNBUILT)
def test_unimplemented_field_is_refused_with_its_line(faults, block):
    line, what, hint = one(faults, f"{LOCAL}{TRAIN}{block}\n")
    assert (line, what) == (5, UNBUILT[block]) and hint.startswith("remove it: ")


@pytest.mark.parametrize("block", ["storage: []", "users: [{name: ann, ssh_keys: []}]", "head: {cpus: }", "modules:"])
def test_empty_value_of_an_unimplemented_field_is_accepted(faults, block):
    assert faults(f"{LOCAL}{TRAIN}{block}\n") == []


def test_settings_of_an_unimplemented_target_are_checked(faults):
    assert faults(f"{SSH}{NAMED}storage: [{{name: a, mount: /a}}]\nlogin: {{names: [l1], cpus: 4, memory: 8G}}\n") == []


def test_limit_that_slurm_does_not_enforce_is_refused(faults):
    text = """name: a
target: local
partitions: [{name: p, nodes: 1}]
slurm:
  qos: [{name: a, max_jobs_per_user: 2}]
accounts: [{name: b, group_tres: {gres/gpu: 4}}]
"""
    hint = "Slurm applies limits only with `slurm: {enforce: [associations, limits, qos]}`"
    assert faults(text) == [
        (5, "`max_jobs_per_user` of QOS `a` is a limit, but `slurm.enforce` does not include limits", hint),
        (6, "`group_tres` of account `b` is a limit, but `slurm.enforce` does not include limits", hint),
    ]


# Health

HEALTH = {
    "zombie: off": ("there is no health check `zombie`", "did you mean `zombies`?"),
    "moonphase: off": ("there is no health check `moonphase`", "`dalsegno health --list` lists the checks"),
    "disk: {thresholds: {warm_percent: 80}}": (
        "health check `disk` has no threshold `warm_percent`",
        "did you mean `warn_percent`?",
    ),
    "zombies: {thresholds: {size: 80}}": ("health check `zombies` has no threshold `size`", "it has older_than_s"),
    "pair-colective: off": ("there is no health check `pair-colective`", "did you mean `pair-collective`?"),
    "load-memory: {every: 1m}": (
        "the check `load-memory` can only be switched on or off",
        "write `load-memory: off`, or leave it out",
    ),
    "dcgm: {thresholds: {size: 80}}": ("health check `dcgm` has no threshold `size`", "it has none"),
}


@pytest.mark.parametrize(("check", "fault"), HEALTH.items(), ids=HEALTH)
def test_misspelt_checks_and_thresholds_are_refused(faults, check, fault):
    assert one(faults, f"{LOCAL}{TRAIN}health:\n  checks:\n    {check}\n") == (7, *fault)


def test_check_settings_are_in_the_facts(cluster):
    text = f"{LOCAL}{TRAIN}health:\n  mode: observe\n  max_out: 10%\n  checks:\n    zombies: off\n"
    text += "    load-memory: off\n    disk: {every: 1m, action: drain, thresholds: {fail_percent: 99}}\n"
    health = cluster(text).health
    assert (health.mode, health.max_out, health.reboots_apart_s) == ("observe", 0.1, 7200)
    assert health.checks["zombies"] == health.checks["load-memory"] == CheckSetting(enabled=False)
    assert health.checks["disk"] == CheckSetting(every_s=60, action="drain", thresholds={"fail_percent": 99})
