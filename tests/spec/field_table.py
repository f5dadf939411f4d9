"""What each remote target does with each field of the cluster file.

A row has a field, a value that differs from its default, and a letter for ssh, parallelcluster, hyperpod and oci:

    A   applied
    R   refused by `validate`
    P   refused by `plan`, or `plan` says what happens instead
    a lowercase letter: without meaning there, for the reason in REASONS

The file that has the field is small: it has no `database` on ParallelCluster, and no key.

Fields of a section whose own row is R or lowercase are not repeated. A field below a refused one needs no letter: `.`.
"""

REASONS = {
    "i": "the instance type has it in the catalog, and another value is refused; it is for types that are not there",
    "m": "the machine exists and has its size",
    "t": "for other types of storage, whose checks refuse it",
    "d": "the platform always runs slurmdbd; without accounting, nothing is added to it",
    "s": "the stack finds the racks itself, and `plan` says so",
}
TARGETS = ("ssh", "parallelcluster", "hyperpod", "oci")
TABLE = """
name                              other                         A A A A
target                            -                             A A A A
head.instance                     -                             m A A A
head.cpus                         -                             m i i A
head.memory                       -                             m i i A
head.name                         mgmt                          A R R R
login.instance                    -                             m A A A
login.cpus                        -                             m i i A
login.memory                      -                             m i i A
login.count                       1                             A A A A
login.names                       [gate]                        A R R R
partitions.instance               -                             A A A A
partitions.cpus                   -                             A i i i
partitions.memory                 -                             A i i i
partitions.gpus                   -                             A i i i
partitions.gpu_type               -                             A i i i
partitions.name                   other                         A A A A
partitions.nodes                  1                             A A A A
partitions.nodes_from             -                             A R A P
partitions.spares                 1                             A R R R
partitions.default                true                          A A A A
partitions.time_limit             60                            A A A A
partitions.default_time           60                            A A A A
partitions.max_nodes              1                             A A A A
partitions.min_nodes              1                             A A A A
partitions.priority               7                             A A A A
partitions.priority_tier          7                             A A A A
partitions.priority_job_factor    7                             A A R R
partitions.weight                 7                             A R R R
partitions.features               [fast]                        A R R R
partitions.allow_accounts         [root]                        A R R A
partitions.allow_groups           [staff]                       A A A A
partitions.allow_qos              [normal]                      A R R A
partitions.oversubscribe          exclusive                     A R A A
partitions.preempt_mode           cancel                        A A R R
partitions.hidden                 true                          A A A A
partitions.extra                  {LLN: 'YES'}                  A A A A
reservations                      [{name: r, node_count: 1, partition: train, users: [root], duration: 60}]  A R A R
reservations.name                 -                             A . A .
reservations.nodes                -                             A . A .
reservations.node_count           -                             A . A .
reservations.partition            -                             A . A .
reservations.start                -                             A . A .
reservations.duration             -                             A . A .
reservations.users                -                             A . A .
reservations.accounts             -                             A . R .
reservations.flags                -                             A . A .
slurm.accounting                  true                          A R R d
slurm.enforce                     [limits]                      A R R A
slurm.rest                        true                          A R R R
slurm.backup_controller           true                          A R R R
slurm.slurmd_timeout              120                           A R R R
slurm.qos                         [{name: night}]               A R R A
slurm.qos.name                    -                             A . . A
slurm.qos.priority                7                             A . . R
slurm.qos.preempts                [normal]                      A . . R
slurm.qos.preempt_mode            cancel                        A . . R
slurm.qos.max_time                60                            A . . A
slurm.qos.max_tres_per_user       {cpu: 1}                      A . . A
slurm.qos.max_jobs_per_user       7                             A . . A
slurm.qos.group_tres              {cpu: 1}                      A . . A
slurm.qos.usage_factor            0.5                           A . . R
slurm.priority                    {age: 7}                      A A R R
slurm.priority.age                7                             A A . .
slurm.priority.fair_share         7                             A R . .
slurm.priority.job_size           7                             A A . .
slurm.priority.partition          7                             A A . .
slurm.priority.qos                7                             A R . .
slurm.priority.tres               {cpu: 7}                      A A . .
slurm.priority.half_life          60                            A R . .
slurm.priority.usage_reset        monthly                       A R . .
slurm.priority.calc_period        7                             A A . .
slurm.priority.max_age            60                            A A . .
slurm.priority.favor_small        true                          A A . .
slurm.preemption                  {by: partition}               A A R R
slurm.preemption.by               partition                     A A . .
slurm.preemption.mode             cancel                        A A . .
slurm.preemption.exempt_time      60                            A A . .
slurm.topology                    {nodes_per_switch: 1}         A R R s
slurm.topology.nodes_per_switch   -                             A . . s
slurm.topology.switches           [{name: a, nodes: [train-1]}]  A . . R
slurm.topology.switches.name      -                             A . . .
slurm.topology.switches.nodes     -                             A . . .
slurm.topology.switches.switches  -                             A . . .
slurm.extra                       {KillWait: '7'}               A A R R
storage.name                      -                             A A A A
storage.mount                     -                             A A A A
storage.type                      -                             A A A A
storage.size                      -                             t A A A
storage.source                    -                             A A A A
storage.options                   noatime                       A R R R
storage.throughput                7                             R A A R
storage.home                      -                             A A A A
storage.required                  true                          R R R R
storage.min_mb_per_s              7                             A A A A
storage.min_files_per_s           7                             A A A A
containers.enabled                -                             A A A A
containers.folder                 -                             A A A A
containers.images                 [ubuntu]                      A A A A
accounts                          [{name: ml}]                  A R R A
accounts.name                     -                             A . . A
accounts.parent                   root                          A . . A
accounts.fair_share               7                             A . . R
accounts.qos                      [normal]                      A . . A
accounts.group_tres               {cpu: 1}                      A . . A
accounts.description              words                         A . . A
users.name                        eve                           A A A A
users.uid                         20007                         A A A A
users.full_name                   Eve                           A A A A
users.groups                      [staff]                       A A A R
users.allow_privileged            [sudo]                        A A A R
users.ssh_keys                    -                             A A A A
users.accounts                    [root]                        A R R A
users.default_account             users                         A R R A
users.fair_share                  7                             A R R R
users.qos                         [normal]                      A R R A
users.default_qos                 normal                        A R R A
users.max_gpus                    7                             A R R A
users.admin                       true                          A R R R
groups                            [{name: lab}]                 A A A R
groups.name                       -                             A A A .
groups.gid                        -                             A A A .
directory.kind                    ldap                          A R R R
directory.base                    dc=org                        A R R R
health.mode                       observe                       A A A A
health.armed                      -                             A A A A
health.max_out                    0.5                           A A A A
health.per_hour                   7                             A A A A
health.reboots.per_fault          7                             A A A A
health.reboots.per_day            7                             A A A A
health.reboots.apart              60                            A A A A
health.checks.enabled             -                             A A A A
health.checks.every               -                             A A A A
health.checks.action              -                             A A A A
health.checks.thresholds          -                             A A A A
monitoring.enabled                false                         A A A A
monitoring.compat                 sckyzo                        A A A A
monitoring.open_metrics           true                          A A A A
monitoring.interval               30                            A A A A
monitoring.prometheus             true                          A A A P
monitoring.retention              86400                         A A A R
monitoring.gpu_hour_price         7                             A A A A
monitoring.alerts                 {webhook: [{url: 'https://a.org/'}]}  A R R R
monitoring.alerts.email.to        -                             A . . .
monitoring.alerts.email.sender    -                             A . . .
monitoring.alerts.email.smarthost  -                            A . . .
monitoring.alerts.email.user      -                             A . . .
monitoring.alerts.email.password_file  -                        A . . .
monitoring.alerts.email.require_tls  -                          A . . .
monitoring.alerts.slack.url_file  -                             A . . .
monitoring.alerts.slack.channel   -                             A . . .
monitoring.alerts.webhook.url     -                             A . . .
monitoring.alerts.webhook.url_file  -                           A . . .
monitoring.remote_write           {url: 'https://a.org/', region: us-east-1}  A A A R
monitoring.remote_write.url       -                             A A A .
monitoring.remote_write.region    -                             A A A .
monitoring.remote_write.role_arn  -                             A A A .
modules                           {enabled: true}               R R R R
"""
