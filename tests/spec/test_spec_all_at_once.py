"""Every fault of a file at once, and no echo of one fault in another place."""

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


def test_a_file_with_twelve_faults_reports_all_of_them_in_the_order_of_the_lines(faults):
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
        (18, "`storage` is not built yet"),
        (19, "storage `a` would be mounted over the system's own `/etc`"),
        (21, "user `ann` is in the account `ml`, which does not exist"),
    ]


def lines_of(faults, text):
    return [line for line, _, _ in faults(text)]


def test_a_misspelt_partition_name_does_not_make_those_who_use_it_faulty(faults):
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


def test_a_faulty_size_is_not_judged_again_against_the_instance(faults):
    text = """\
        name: demo
        target: local
        partitions:
          - {name: train, nodes: 4, instance: VM.Standard.E4.Flex, cpus: many, memory: 64G}
        """
    assert lines_of(faults, text) == [4]


def test_an_unknown_target_is_the_only_fault_of_its_block(faults):
    text = """\
        name: my_demo
        target: parallelclustr
        parallelcluster: {region: us-east-1}
        partitions: [{name: Train, nodes: 4, instance: BM.GPU.H100.8}]
        """
    assert lines_of(faults, text) == [2]


def test_a_block_with_a_missing_key_is_not_called_missing(faults):
    text = """\
        name: demo
        target: hyperpod
        hyperpod: {region: us-east-1, bucket: sagemaker-x}
        partitions: [{name: train, nodes: 4, instance: p5.48xlarge}]
        """
    assert lines_of(faults, text) == [3]


def test_a_faulty_account_does_not_make_its_users_faulty(faults):
    text = """\
        name: demo
        target: local
        partitions: [{name: train, nodes: 4, allow_accounts: ml}]
        accounts: [{name: ml, fair_share: much}, {name: OPS}]
        users: [{name: ann, accounts: ml}, {name: bob, accounts: ops}]
        """
    assert lines_of(faults, text) == [4, 4]


def test_accounting_that_cannot_be_read_switches_nothing_off(faults):
    text = """\
        name: demo
        target: local
        partitions: [{name: train, nodes: 4}]
        slurm: {accounting: maybe, qos: [{name: a}]}
        """
    assert lines_of(faults, text) == [4]


def test_values_through_an_alias_point_to_where_they_are_written(faults):
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


def test_a_name_that_is_nowhere_is_found_also_beside_a_faulty_one(faults):
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
