"""Resolve the `hyperpod:` and `oci:` blocks of a cluster file into facts."""

from __future__ import annotations

import os

from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.platform_facts import HyperPodFacts, InstanceGroupFacts, OciFacts

_MIB_PER_GIB = 1024


def resolve_hyperpod(spec: ClusterSpec) -> HyperPodFacts | None:
    """Return the facts of the `hyperpod:` block; None for another target."""
    own = spec.hyperpod
    if spec.target != "hyperpod" or own is None:
        return None
    return HyperPodFacts(
        region=own.region,
        execution_role=own.execution_role,
        bucket=own.bucket,
        prefix=(own.prefix or spec.name).strip("/"),
        head_instance=spec.head.instance,
        login_instance=spec.login.instance,
        configuration=own.configuration,
        node_recovery=own.node_recovery,
        config_strategy=own.config_strategy,
        subnets=tuple(own.subnets),
        security_groups=tuple(own.security_groups),
        volume_gib=_gib(own.volume),
        controller_group=own.controller_group,
        login_group=own.login_group,
        groups={
            name: InstanceGroupFacts(each.training_plan or "", tuple(each.subnets), each.threads_per_core)
            for name, each in own.groups.items()
        },
        ssh_key=os.path.expanduser(own.ssh_key or ""),
        tags=dict(own.tags),
    )


def resolve_oci(spec: ClusterSpec) -> OciFacts | None:
    """Return the facts of the `oci:` block; None for another target."""
    own = spec.oci
    if spec.target != "oci" or own is None:
        return None
    return OciFacts(
        region=own.region,
        compartment=own.compartment,
        head_instance=spec.head.instance,
        head_cpus=spec.head.cpus,
        head_memory_gib=_gib(spec.head.memory),
        login_instance=spec.login.instance,
        login_cpus=spec.login.cpus,
        login_memory_gib=_gib(spec.login.memory),
        pool_cpus=spec.partitions[0].cpus,
        pool_memory_gib=_gib(spec.partitions[0].memory),
        tenancy=own.tenancy or "",
        ad=own.ad,
        profile=own.profile,
        ssh_key=os.path.expanduser(own.ssh_key),
        image=own.image or "",
        os=own.os,
        vcn=own.vcn or "",
        public_subnet=own.public_subnet or "",
        private_subnet=own.private_subnet or "",
        allowed_ips=own.allowed_ips or "",
        rdma=own.rdma,
        boot_volume_gib=_gib(own.boot_volume) or 0,
        hyperthreading=own.hyperthreading,
        stack=own.stack or "",
        stack_version=own.stack_version,
        template=os.path.expanduser(own.template or ""),
        tags=dict(own.tags),
    )


def _gib(mib: int | None) -> int | None:
    return None if mib is None else max(1, mib // _MIB_PER_GIB)
