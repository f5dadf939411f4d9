"""Tests of resolving a cluster file into facts."""

from dalsegno.spec.facts import Account, Local, Node, Reservation, Storage, Switch, User


def test_smallest_file_gets_defaults(cluster):
    found = cluster("name: demo\ntarget: local\npartitions: [{name: train, nodes: 4}]")
    assert (found.name, found.target, found.head, found.logins) == ("demo", "local", "head", ())
    assert found.nodes == tuple(Node(f"train-{n}", cpus=2, memory_mib=1945) for n in (1, 2, 3, 4))
    (train,) = found.partitions
    assert train.nodes == ("train-1", "train-2", "train-3", "train-4")
    assert train.default
    assert train.time_limit_min is None


def test_sizes_come_from_the_instance_type(cluster):
    found = cluster("name: demo\ntarget: local\npartitions: [{name: t, nodes: 1, instance: ml.p5.48xlarge}]")
    assert found.nodes[0] == Node(
        "t-1",
        cpus=192,
        memory_mib=1992294,  # 95 % of 2 TiB: a node must register with at least what slurm.conf says
        gpus=8,
        gpu_type="h100",
        gpu_memory_mib=81920,
        instance="p5.48xlarge",
    )


def test_plain_sizes_with_gpus_are_used(cluster):
    found = cluster(
        "name: demo\ntarget: local\npartitions: [{name: t, nodes: 1, cpus: 8, memory: 64G, gpus: 4, gpu_type: l4}]"
    )
    node = found.nodes[0]
    assert (node.cpus, node.memory_mib, node.gpus, node.gpu_type, node.gpu_memory_mib) == (8, 62259, 4, "l4", 22937)


def test_trainium_is_counted_as_neuron(cluster):
    node = cluster("name: demo\ntarget: local\npartitions: [{name: t, nodes: 1, instance: trn1.32xlarge}]").nodes[0]
    assert (node.gres, node.gpus, node.gpu_type) == ("neuron", 16, "trainium")


def test_flexible_shape_uses_sizes_of_the_file(cluster):
    node = cluster(
        "name: demo\ntarget: local\n"
        "partitions: [{name: t, nodes: 1, instance: VM.Standard.E4.Flex, cpus: 16, memory: 100G}]"
    ).nodes[0]
    assert (node.cpus, node.memory_mib) == (16, 97280)


def test_ssh_hosts_without_sizes_have_zero_sizes(cluster):
    found = cluster("name: demo\ntarget: ssh\nhead: {name: mgmt}\npartitions: [{name: t, nodes: 'gpu[01-02]'}]")
    assert found.nodes == (Node("gpu01", cpus=0, memory_mib=0), Node("gpu02", cpus=0, memory_mib=0))
    assert found.head == "mgmt"


def test_spares_are_numbered_last_in_their_partition(cluster):
    found = cluster("name: demo\ntarget: local\npartitions: [{name: t, nodes: 2, spares: 1}]")
    assert [(node.name, node.spare) for node in found.nodes] == [("t-1", False), ("t-2", False), ("t-3", True)]
    assert found.partitions[0].nodes == ("t-1", "t-2", "t-3")


def test_partition_shares_nodes_of_another(cluster):
    found = cluster("""
        name: demo
        target: local
        partitions:
          - {name: few, nodes_from: all-of-them, nodes: 3}
          - {name: a, nodes: 2, spares: 1}
          - {name: b, nodes: 1}
          - {name: all-of-them, nodes_from: [a, b], default: true}
        """)
    assert [node.name for node in found.nodes] == ["a-1", "a-2", "a-3", "b-1"]
    held = {partition.name: partition.nodes for partition in found.partitions}
    assert held["all-of-them"] == ("a-1", "a-2", "a-3", "b-1")
    assert held["few"] == ("a-1", "a-2", "b-1")  # the first three, spares last
    assert [partition.default for partition in found.partitions] == [False, False, False, True]


def test_node_names_are_host_names(cluster):
    assert cluster("name: d\ntarget: local\npartitions: [{name: Big_GPU, nodes: 1}]").nodes[0].name == "big-gpu-1"


def test_partition_with_all_settings(cluster):
    found = cluster("""
        name: demo
        target: local
        slurm: {qos: [{name: high}], preemption: {by: partition, mode: suspend, exempt_time: 2m}}
        accounts: [{name: ml}]
        partitions:
          - name: train
            nodes: 4
            time_limit: 1-00:00:00
            default_time: 90s
            max_nodes: 3
            min_nodes: 1
            priority: 7
            priority_job_factor: 9
            weight: 5
            features: h100,efa
            allow_accounts: [ml]
            allow_groups: research
            allow_qos: high
            oversubscribe: force:2
            preempt_mode: requeue
            hidden: true
            extra: {LLN: yes, GraceTime: 60}
        """)
    train = found.partitions[0]
    assert (train.time_limit_min, train.default_time_min) == (1440, 2)
    assert (train.max_nodes, train.min_nodes, train.priority_tier, train.priority_factor) == (3, 1, 7, 9)
    assert (train.allow_accounts, train.allow_groups, train.allow_qos) == (("ml",), ("research",), ("high",))
    assert (train.oversubscribe, train.preempt_mode, train.hidden) == ("FORCE:2", "REQUEUE", True)
    assert train.extra == {"LLN": "YES", "GraceTime": "60"}
    assert (found.nodes[0].weight, found.nodes[0].features) == (5, ("h100", "efa"))
    slurm = found.slurm
    assert (slurm.preempt_by, slurm.preempt_mode, slurm.preempt_exempt_time_s) == ("partition", "SUSPEND", 120)


BASE = "name: demo\ntarget: local\npartitions: [{name: t, nodes: 5}]\n"


def test_preempting_qos_turns_preemption_on(cluster):
    assert cluster(BASE).slurm.preempt_by == ""
    slurm = cluster(BASE + "slurm: {qos: [{name: high, preempts: low}, {name: low}]}").slurm
    assert (slurm.preempt_by, slurm.preempt_mode) == ("qos", "REQUEUE")


def test_qos_settings_are_resolved(cluster):
    (qos,) = cluster(
        BASE + "slurm: {enforce: limits, qos: [{name: a, priority: 5, max_time: 1d, usage_factor: 2,"
        " max_tres_per_user: {gres/gpu: 8, mem: 64G}, max_jobs_per_user: 3, group_tres: {node: 2}}]}"
    ).slurm.qos
    assert (qos.priority, qos.max_time_min, qos.usage_factor, qos.max_jobs_per_user) == (5, 1440, 2.0, 3)
    assert qos.max_tres_per_user == {"gres/gpu": 8, "mem": 65536}
    assert qos.group_tres == {"node": 2}


def test_priority_weights_of_the_database_are_zero_without_accounting(cluster):
    priority = cluster(BASE + "slurm: {accounting: false, priority: {age: 5}}").slurm.priority
    assert (priority.age, priority.fair_share, priority.qos) == (5, 0, 0)


def test_topology_is_generated_from_nodes_per_switch(cluster):
    assert cluster(BASE + "slurm: {topology: {nodes_per_switch: 2}}").slurm.topology == (
        Switch("leaf-1", nodes=("t-1", "t-2")),
        Switch("leaf-2", nodes=("t-3", "t-4")),
        Switch("leaf-3", nodes=("t-5",)),
        Switch("spine", switches=("leaf-1", "leaf-2", "leaf-3")),
    )
    assert len(cluster(BASE + "slurm: {topology: {nodes_per_switch: 9}}").slurm.topology) == 1


def test_topology_of_the_file_is_used(cluster):
    text = "slurm: {topology: {switches: [{name: s, nodes: 't-[1-5]'}, {name: top, switches: s}]}}"
    assert cluster(BASE + text).slurm.topology == (
        Switch("s", nodes=("t-1", "t-2", "t-3", "t-4", "t-5")),
        Switch("top", switches=("s",)),
    )


def test_accounts_and_users_are_resolved(cluster):
    found = cluster(
        BASE + "accounts: [{name: ml, fair_share: 3}]\n"
        "users: [{name: ann, accounts: ml, uid: 2000, admin: true}, {name: bob, groups: [wheel]}]"
    )
    assert found.users == (
        User("ann", ("ml",), "ml", uid=2000, admin=True),
        User("bob", ("users",), "users", groups=("wheel",)),
    )
    assert found.accounts == (
        Account("ml", fair_share=3),
        Account("users", description="users without an account of their own"),
    )


def test_users_without_accounting_have_no_accounts(cluster):
    found = cluster(BASE + "slurm: {accounting: false}\nusers: [{name: ann}]")
    assert found.users == (User("ann", (), ""),)
    assert found.accounts == ()


def test_reservations_logins_and_local_block_are_resolved(cluster):
    found = cluster(
        BASE + "reservations: [{name: r, nodes: 't-[1-2]', users: root, duration: 2h, flags: 'maint,flex'}]\n"
        "login: {count: 2}\nlocal: {hosts: loopback}\n"
    )
    assert found.reservations == (
        Reservation("r", ("t-1", "t-2"), duration_min=120, users=("root",), flags=("MAINT", "FLEX")),
    )
    assert found.logins == ("login-1", "login-2")
    assert found.local == Local(hosts="loopback")


def test_storage_of_another_target_is_resolved(cluster):
    found = cluster(
        "name: demo\ntarget: ssh\nhead: {name: mgmt}\npartitions: [{name: t, nodes: 'gpu[01-02]'}]\n"
        "storage: [{name: s, mount: /s, home: true}]\n"
    )
    assert found.storage == (Storage("s", "/s", home=True),)
