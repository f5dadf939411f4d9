"""Tests of single invalid values: message, line and hint."""

import pytest

BASE = "name: demo\ntarget: local\npartitions:\n  - name: train\n    nodes: 4\n"
TIME_HINT = "write `30m`, `2h`, `1d`, Slurm's `1-00:00:00`, or `infinite`"
SIZE_HINT = "write a number with its unit: `512M`, `64G`, `2T`"
RAW_HINT = "write one value without spaces, quotes, `#`, `\\` or line breaks"
LOWER_HINT = "use lowercase letters, digits, `-`, `_` and `.`, starting with a letter or digit, at most 48"

IN_THE_PARTITION = {
    "instnce: p5.48xlarge": ("partition `train` has no setting `instnce`", "did you mean `instance`?"),
    "MaxTime: 60": ("partition `train` has no setting `MaxTime`", "did you mean `time_limit`?"),
    "max-nodes: 2": ("partition `train` has no setting `max-nodes`", "did you mean `max_nodes`?"),
    "users: []": ("partition `train` has no setting `users`", "it belongs at the top of the file"),
    "cpus: many": ("`cpus` of partition `train` must be a whole number, not `many`", ""),
    "cpus: 1.5": ("`cpus` of partition `train` must be a whole number, not `1.5`", ""),
    "cpus: yes": ("`cpus` of partition `train` must be a whole number, not `true`", ""),
    "cpus: 0": ("`cpus` of partition `train` must be at least 1, not `0`", ""),
    "cpus: [1]": ("`cpus` of partition `train` must be a whole number, not a list", ""),
    "memory: 64": ("`memory` of partition `train` has no unit: `64`", SIZE_HINT),
    "memory: much": ("`memory` of partition `train` must be a size, not `much`", SIZE_HINT),
    "time_limit: soon": ("`time_limit` of partition `train` must be a time, not `soon`", TIME_HINT),
    "time_limit: 0": (
        "`time_limit` of partition `train` must be more than 0 and at most 100 years, not `0`",
        TIME_HINT,
    ),
    "default: maybe": ("`default` of partition `train` must be `true` or `false`, not `maybe`", ""),
    "oversubscribe: sometimes": (
        "`oversubscribe` of partition `train` cannot be `sometimes`",
        "write `no`, `exclusive`, `yes`, `yes:4` or `force:2`",
    ),
    "preempt_mode: requeu": (
        "`preempt_mode` of partition `train` must be one of OFF, CANCEL, REQUEUE, SUSPEND, not `requeu`",
        "did you mean `REQUEUE`?",
    ),
    "features: [a b]": (
        "`features` of partition `train` cannot be `a b`",
        "use letters, digits, `-`, `_` and `.`",
    ),
    "features: {a: b}": ("`features` of partition `train` must be a list, not a mapping", "start each entry with `- `"),
    "allow_accounts: ML": ("`allow_accounts` of partition `train` cannot be `ML`", LOWER_HINT),
    "priority: 70000": ("`priority` of partition `train` must be at most 65533, not `70000`", ""),
    "instance: 5": ("`instance` of partition `train` must be text, not `5`", "put it in quotes"),
    "gpu_type: H100": (
        "`gpu_type` of partition `train` cannot be `H100`",
        "write it as Slurm's gres: `h100`, `a100`, `l4`",
    ),
    'extra: {GraceTime: "1 State=DOWN"}': (
        "`extra.GraceTime` of partition `train` cannot be `1 State=DOWN`",
        RAW_HINT,
    ),
    'extra: {GraceTime: "1\\nPartitionName=x"}': (
        "`extra.GraceTime` of partition `train` cannot be `1\\nPartitionName=x`",
        RAW_HINT,
    ),
    'extra: {GraceTime: "1#2"}': ("`extra.GraceTime` of partition `train` cannot be `1#2`", RAW_HINT),
    "extra: {GraceTime: '\"1\"'}": ('`extra.GraceTime` of partition `train` cannot be `"1"`', RAW_HINT),
    'extra: {"Grace Time": 1}': (
        "a key of `extra` of partition `train` cannot be `Grace Time`",
        "write it as in slurm.conf, letters and digits only",
    ),
    "spares: -1": ("`spares` of partition `train` must be between 0 and 65,536, not `-1`", ""),
}


@pytest.mark.parametrize("line", IN_THE_PARTITION)
def test_invalid_value_in_a_partition_is_refused(faults, line):
    what, hint = IN_THE_PARTITION[line]
    assert faults(f"{BASE}    {line}\n") == [(6, what, hint)]


AT_THE_TOP = {
    "partition: []": ("the cluster file has no setting `partition`", "did you mean `partitions`?"),
    "qos: []": ("the cluster file has no setting `qos`", "it belongs under `slurm:`"),
    "slurm: 3": ("`slurm` must be a mapping, not `3`", "write `key: value` lines below it"),
    "slurm: {accounting: 1}": ("`slurm.accounting` must be `true` or `false`, not `1`", ""),
    "slurm: {prority: {}}": ("`slurm` has no setting `prority`", "did you mean `priority`?"),
    "slurm: {priority: {age: -1}}": ("`slurm.priority.age` must be at least 0, not `-1`", ""),
    "slurm: {priority: {half_life: infinite}}": (
        "`slurm.priority.half_life` cannot be infinite",
        "write `30s`, `5m`, `7d`",
    ),
    "slurm: {qos: [{name: High}]}": ("`name` of qos `High` cannot be `High`", LOWER_HINT),
    "slurm: {qos: [{priority: 1}]}": ("qos 1 needs `name`", "add `name:`"),
    "slurm: {qos: [{nme: a}]}": ("qos 1 has no setting `nme`", "did you mean `name`?"),
    "slurm: {qos: [{name: a, max_tres_per_user: {gpu: 1}}]}": (
        "a key of `max_tres_per_user` of qos `a` cannot be `gpu`",
        "did you mean `gres/gpu`?",
    ),
    "slurm: {preemption: {by: user}}": ("`slurm.preemption.by` must be one of qos, partition, not `user`", ""),
    "slurm: {enforce: [limit]}": (
        "`slurm.enforce` must be one of associations, limits, nojobs, nosteps, qos, safe, wckeys, all, not `limit`",
        "did you mean `limits`?",
    ),
    'slurm: {extra: {MaxArraySize: "1 NodeName=x"}}': ("`slurm.extra.MaxArraySize` cannot be `1 NodeName=x`", RAW_HINT),
    "users: alice": ("`users` must be a list, not `alice`", "start each entry with `- `"),
    "users: [alice]": ("user 1 must be a mapping, not `alice`", "write `key: value` lines below it"),
    "users: [{name: root}]": (
        "`name` of user `root` cannot be `root`",
        "this is a system user; choose another name",
    ),
    "users: [{name: alice, uid: 0}]": ("`uid` of user `alice` must be at least 1000, not `0`", ""),
    "users: [{name: alice, ssh_keys: [hello]}]": (
        "`ssh_keys` of user `alice` is not an SSH public key: `hello`",
        "paste the one line of `~/.ssh/id_ed25519.pub`",
    ),
    "storage: [{name: s}]": ("storage `s` needs `mount`", "add `mount:`"),
    "storage: [{name: s, mount: shared}]": (
        "`mount` of storage `s` cannot be `shared`",
        "write an absolute path of letters, digits and `_./@%+=~-`",
    ),
    "storage: [{name: s, mount: '/a b'}]": (
        "`mount` of storage `s` cannot be `/a b`",
        "write an absolute path of letters, digits and `_./@%+=~-`",
    ),
    "reservations: [{name: r, node_count: 1, users: root, start: tomorrow noon}]": (
        "`start` of reservation `r` cannot be `tomorrow noon`",
        "write `now`, `now+2hours` or `2030-01-31T08:00:00`",
    ),
    "health: {max_out: 200%}": ("`health.max_out` must be a share of the whole, not `200%`", "write `25%` or `0.25`"),
    "health: {checks: {zombies: 3}}": (
        "`health.checks.zombies` must be a mapping, not `3`",
        "write `key: value` lines below it",
    ),
    "containers: {enabled: true, images: [Ubuntu:24.04]}": (
        "`containers.images` cannot be `Ubuntu:24.04`",
        "image names are lower case: did you mean `ubuntu:24.04`?",
    ),
    "containers: {enabled: true, images: [/fsx/pytorch.sqsh]}": (
        "`containers.images` cannot be `/fsx/pytorch.sqsh`",
        "remove it: a file needs no import",
    ),
    "containers: {enabled: true, images: ['oci:images:v1']}": (
        "`containers.images` cannot be `oci:images:v1`",
        "write an absolute path: `up` may run in any folder",
    ),
    "containers: {enabled: false, images: ['ubuntu:24.04']}": (
        "`images` are listed, but containers are turned off",
        "remove `enabled: false`, or `images`",
    ),
    "local: {subnet: 10.0.0.1/16}": ("`local.subnet` is not a subnet: `10.0.0.1/16`", "write `10.77.0.0/16`"),
    "local: {hosts: real}": ("`local.hosts` must be one of auto, virtual, loopback, not `real`", ""),
}


@pytest.mark.parametrize("line", AT_THE_TOP)
def test_invalid_value_in_other_sections_is_refused(faults, line):
    what, hint = AT_THE_TOP[line]
    assert faults(f"{BASE}{line}\n") == [(6, what, hint)]


@pytest.mark.parametrize("name", ["Demo", "1demo", "de mo", "demo'", "a" * 41, "dé", "demo#1", '"demo\\nx"'])
def test_cluster_name_must_be_a_valid_table_prefix(faults, name):
    (fault,) = faults(BASE.replace("demo", name))
    assert fault[0] == 1
    assert fault[2] == "use lowercase letters, digits, `-` and `_`, starting with a letter, at most 40"


@pytest.mark.parametrize("name", ["DEFAULT", "default", "ALL", "localhost"])
def test_reserved_names_are_refused(faults, name):
    hint = "the name is reserved; choose another name"
    assert faults(BASE.replace("train", name)) == [(4, f"`name` of partition `{name}` cannot be `{name}`", hint)]


def test_name_that_yaml_reads_as_another_type_is_refused(faults):
    assert faults(BASE.replace("train", "on")) == [
        (4, "`name` of partition 1 must be text, not `true`", "put it in quotes")
    ]


def test_missing_required_keys_are_reported(faults):
    assert faults("head: {}\n") == [
        (1, "the cluster file needs `name`", "add `name: demo`"),
        (1, "the cluster file needs `target`", "add `target: local`"),
        (1, "the cluster file needs `partitions`", "add `partitions: [{name: train, nodes: 4}]`"),
    ]


def test_key_without_value_counts_as_not_given(faults):
    assert faults(BASE + "slurm:\nusers:\nhead:\n  cpus:\n") == []
    assert faults(BASE.replace("name: demo", "name:")) == [(1, "the cluster file needs `name`", "add `name: demo`")]


def test_slurm_keywords_that_yaml_reads_as_false_are_accepted(cluster):
    found = cluster(
        BASE + "    oversubscribe: no\n    preempt_mode: off\nhealth: {mode: off, checks: {zombies: off}}\n"
    )
    assert (found.partitions[0].oversubscribe, found.partitions[0].preempt_mode) == ("NO", "OFF")


def test_misspelt_target_gets_a_suggestion(faults):
    assert faults(BASE.replace("local", "parallel-cluster")) == [
        (
            2,
            "`target` must be one of local, ssh, parallelcluster, hyperpod, oci, existing, not `parallel-cluster`",
            "did you mean `parallelcluster`?",
        )
    ]
