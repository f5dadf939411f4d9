"""Tests that all errors of a file are reported at once, and that no error causes another."""

TEN = """\
name: Demo
target: local
partitons: []
head: {cpus: lots}
partitions:
  - name: train
    nodes: 4
    instance: p5.4xlarge
    gpus: 8
    time_limit: 1h
    default_time: 2h
  - name: debug
    nodes_from: trian
    default: yes please
slurm:
  qos: [{name: high, preempts: lwo}]
  extra: {NodeName: x}
storage:
  - {name: a, mount: /etc}
users:
  - {name: ann, accounts: ml}
"""


def test_all_errors_of_a_file_are_reported_in_line_order(faults):
    assert [(line, what) for line, what, _ in faults(TEN)] == [
        (1, "`name` cannot be `Demo`"),
        (3, "the cluster file has no setting `partitons`"),
        (4, "`head.cpus` must be a whole number, not `lots`"),
        (9, "partition `train` asks for 8 gpus per node, but `p5.4xlarge` has 1"),
        (11, "`default_time` of partition `train` (120 min) exceeds its `time_limit` (60 min)"),
        (13, "partition `debug` takes its nodes from `trian`, which is not a partition"),
        (14, "`default` of partition `debug` must be `true` or `false`, not `yes please`"),
        (16, "qos `high` preempts `lwo`, which is not a QOS"),
        (17, "`slurm.extra` sets `NodeName`, which Dal Segno sets itself"),
        (19, "storage `a` would be mounted over the system's own `/etc`"),
        (21, "user `ann` is in the account `ml`, which does not exist"),
    ]


def lines_of(faults, text):
    return [line for line, _, _ in faults(text)]


def test_invalid_partition_name_causes_no_errors_where_it_is_used(faults):
    text = """\
        name: demo
        target: local
        partitions:
          - {nme: train, nodes: 4}
          - {name: debug, nodes_from: train, max_nodes: 9}
        reservations: [{name: r, nodes: train-9, users: root}]
        slurm: {topology: {switches: [{name: s, nodes: train-9}]}}
        """
    assert lines_of(faults, text) == [4]


def test_invalid_size_is_not_compared_with_the_instance(faults):
    text = """\
        name: demo
        target: local
        partitions:
          - {name: train, nodes: 4, instance: VM.Standard.E4.Flex, cpus: many, memory: 64G}
        """
    assert lines_of(faults, text) == [4]


def test_unknown_target_is_reported_once(faults):
    text = """\
        name: my_demo
        target: parallelclustr
        parallelcluster: {region: us-east-1}
        partitions: [{name: Train, nodes: 4, instance: BM.GPU.H100.8}]
        """
    assert lines_of(faults, text) == [2]


def test_incomplete_block_is_not_reported_as_missing(faults):
    text = """\
        name: demo
        target: hyperpod
        hyperpod: {region: us-east-1, bucket: sagemaker-x}
        partitions: [{name: train, nodes: 4, instance: ml.p5.48xlarge}]
        """
    assert lines_of(faults, text) == [3]


def test_invalid_account_causes_no_errors_in_its_users(faults):
    text = """\
        name: demo
        target: local
        partitions: [{name: train, nodes: 4, allow_accounts: ml}]
        accounts: [{name: ml, fair_share: much}, {name: OPS}]
        users: [{name: ann, accounts: ml}, {name: bob, accounts: ops}]
        """
    assert lines_of(faults, text) == [4, 4]


def test_invalid_accounting_value_does_not_turn_accounting_off(faults):
    text = """\
        name: demo
        target: local
        partitions: [{name: train, nodes: 4}]
        slurm: {accounting: maybe, qos: [{name: a}]}
        """
    assert lines_of(faults, text) == [4]


def test_error_in_an_alias_points_to_the_anchor(faults):
    text = """\
        name: demo
        target: local
        x-big: &big
          cpus: many
        partitions:
          - {<<: *big, name: train, nodes: 4}
        """
    (fault,) = faults(text)
    assert fault[:2] == (4, "`cpus` of partition `train` must be a whole number, not `many`")


def test_unknown_name_is_reported_beside_an_invalid_entry(faults):
    text = """\
        name: demo
        target: local
        partitions:
          - {name: "a b", nodes: 4}
          - {name: debug, nodes_from: zzz}
        slurm:
          qos:
            - {name: HIGH}
            - {name: low, preempts: nothing}
        """
    assert lines_of(faults, text) == [4, 5, 8, 9]
