"""Cluster files for the tests of ParallelCluster, and the environments with the product's own tools."""

from __future__ import annotations

from dalsegno.spec.facts import Cluster
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.targets.parallelcluster.prerequisites import Prerequisites, given, placeholders

MINIMAL = """
name: demo
target: parallelcluster
partitions: [{name: train, nodes: 2, instance: p5.48xlarge}]
parallelcluster: {region: us-east-1}
"""
# The published walkthrough: a small cluster of CPU machines, with both file systems and a bucket
WALKTHROUGH = """
name: ml-cluster
target: parallelcluster
parallelcluster:
  region: ap-northeast-1
  availability_zone: ap-northeast-1a
  key: my-keypair
  allowed_ips: 203.0.113.0/24
  data_repositories: [{storage: fsx, path: /data, s3: s3://cluster-data-bucket}]
head: {instance: m5.2xlarge}
partitions: [{name: compute-gpu, nodes: 3, instance: m5.xlarge}]
storage:
  - {name: home, mount: /home, type: openzfs, size: 512G, home: true}
  - {name: fsx, mount: /fsx, type: lustre, size: 1200G, throughput: 250}
  - {name: scratch, mount: /scratch, type: scratch}
containers: {enabled: true}
"""
FULL = """
name: big
target: parallelcluster
parallelcluster:
  region: us-west-2
  os: ubuntu2404
  head_subnet: subnet-0123456789abcdef0
  subnets: [subnet-0123456789abcdef1]
  security_groups: [sg-0123456789abcdef0]
  key: ml
  allowed_ips: 203.0.113.0/24
  capacity_reservation: cr-0123456789abcdef0
  scaledown_idletime: 20m
  root_volume: 512G
  ami: ami-0123456789abcdef0
  bucket: our-scripts
  gpu_health_checks: true
  database: {uri: "db.example.com:3306", user: slurm,
             password_secret: "arn:aws:secretsmanager:us-west-2:123456789012:secret:slurm-db"}
  directory_service:
    domain: corp.example.com
    address: ldaps://corp.example.com
    password_secret: arn:aws:secretsmanager:us-west-2:123456789012:secret:reader
    reader: cn=ReadOnly,ou=Users,dc=corp,dc=example,dc=com
  actions:
    - {script: s3://our-scripts/nccl.sh, args: [v2.27.7-1], on: compute}
    - {script: "https://example.com/start.sh", at: start}
  policies: ["arn:aws:iam::aws:policy/AmazonEC2ContainerRegistryReadOnly"]
  queues:
    cpu: {capacity_type: SPOT, instances: [c6i.8xlarge, m6i.8xlarge], max_count: 16, spot_price: 1.5}
  tags: {team: ml}
head: {instance: m5.8xlarge}
login: {count: 2, instance: m5.2xlarge}
slurm: {preemption: {by: partition}, extra: {JobRequeue: "1"}}
partitions:
  - {name: train, nodes: 8, instance: p5.48xlarge, time_limit: 7d, priority: 10, default: true}
  - {name: cpu, nodes: 1, instance: c7i.8xlarge, time_limit: 1d, max_nodes: 4}
storage:
  - {name: fsx, mount: /fsx, type: lustre, source: fs-0123456789abcdef0}
  - {name: homes, mount: /home, type: openzfs, source: fsvol-0123456789abcdef0, home: true}
  - {name: tools, mount: /tools, type: efs}
  - {name: disk, mount: /disk, type: ebs, size: 500G}
"""
BLOCK = """
name: block
target: parallelcluster
parallelcluster:
  region: us-east-2
  os: alinux2023
  capacity_type: CAPACITY_BLOCK
  capacity_reservation: cr-0123456789abcdef0
  stacks: [parallelcluster-prerequisites, cluster-data-bucket]
partitions: [{name: train, nodes: 4, instance: p5en.48xlarge}]
storage: [{name: fsx, mount: /fsx, type: lustre, size: 4800G}]
"""
FILES = {"minimal": MINIMAL, "walkthrough": WALKTHROUGH, "full": FULL, "block": BLOCK}


def cluster_of(text: str) -> Cluster:
    return resolve(parse_spec(text, "cluster.yaml"))


def known_for(cluster: Cluster) -> Prerequisites:
    return placeholders(given(cluster), cluster)
