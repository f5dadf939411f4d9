"""slurm.conf: the whole cluster as Slurm's daemons and commands read it."""

from __future__ import annotations

from dalsegno.slurm import versions
from dalsegno.slurm.layout import Layout
from dalsegno.slurm.render.lines import Settings, header, line, lines, merged, setting
from dalsegno.slurm.render.node_lines import node_lines
from dalsegno.slurm.render.partition_lines import partition_lines
from dalsegno.slurm.render.policy import policy
from dalsegno.slurm.version import Version
from dalsegno.spec.facts import Cluster


def render_slurm_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    """slurm.conf, the same for every daemon and command. Raw settings are written last and win over ours."""
    versions.check_settings(cluster.slurm.extra, slurm)
    settings = merged(_daemons(cluster, layout) | policy(cluster, layout, slurm), cluster.slurm.extra)
    return "".join(
        [
            header("slurm.conf", cluster.name, layout.spec),
            _controllers(layout),
            lines(settings),
            "\n",
            node_lines(cluster, layout),
            _submit_hosts(layout, slurm),
            partition_lines(cluster),
        ]
    )


def _controllers(layout: Layout) -> str:
    return "".join(
        setting("SlurmctldHost", f"{host.name}({host.address})" if host.address else host.name) + "\n"
        for host in layout.controllers
    )


def _submit_hosts(layout: Layout, slurm: Version) -> str:
    """Lines from which slurmctld learns where an srun outside of the nodes is.

    These releases look its host up among the nodes and nowhere else, and otherwise call 0.0.0.0: a step that waits for
    another then starts two minutes late. A FUTURE node is shown nowhere and takes no jobs.
    """
    if not versions.CALLS_ONLY_NODES.holds(slurm):
        return ""
    return "".join(
        line({"NodeName": name, "NodeAddr": address, "CPUs": "1", "State": "FUTURE"}) + "\n"
        for name, address in layout.submit_hosts.items()
    )


def _daemons(cluster: Cluster, layout: Layout) -> Settings:
    """Who runs as whom, listens where, and writes where."""
    return {
        "ClusterName": cluster.name,
        "SlurmUser": layout.slurm_user,
        "SlurmdUser": layout.slurmd_user,
        "SlurmctldPort": str(layout.slurmctld_port),
        "SlurmdPort": str(layout.slurmd_port),
        "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny" if layout.own_address_only else "",
        "AuthType": "auth/munge",
        "AuthInfo": _auth_info(layout),
        **_files(layout),
        **_programs(layout),
        **_timeouts(cluster, layout),
    }


def _auth_info(layout: Layout) -> str:
    socket, lifetime = layout.paths.munge_socket, layout.timeouts.credential_s
    return ",".join([f"socket={socket}"] * bool(socket) + [f"cred_expire={lifetime}"] * (lifetime is not None))


def _files(layout: Layout) -> Settings:
    paths = layout.paths
    return {
        "StateSaveLocation": paths.state_save_dir,
        "SlurmctldLogFile": paths.slurmctld_log,
        "SlurmctldPidFile": paths.slurmctld_pid,
        "SlurmdSpoolDir": paths.slurmd_spool_dir,
        "TmpFS": paths.tmp_dir,
        "SlurmdLogFile": paths.slurmd_log,
        "SlurmdPidFile": paths.slurmd_pid,
    }


def _programs(layout: Layout) -> Settings:
    programs = layout.programs
    every = str(programs.health_check_interval_s) if programs.health_check else ""
    return {
        "Prolog": programs.prolog,
        "Epilog": programs.epilog,
        "HealthCheckProgram": programs.health_check,
        "HealthCheckInterval": every,
        "HealthCheckNodeState": "ANY" if programs.health_check else "",
        "MailProg": programs.mail,
        "PlugStackConfig": layout.spank.conf if layout.spank else "",
    }


def _timeouts(cluster: Cluster, layout: Layout) -> Settings:
    times = layout.timeouts
    takeover_s = times.slurmctld_s or (5 if len(layout.controllers) > 1 else None)
    named = {
        "SlurmctldTimeout": takeover_s,
        "SlurmdTimeout": cluster.slurm.slurmd_timeout_s,
        "MessageTimeout": times.message_s,
        "KillWait": times.kill_wait_s,
        "MinJobAge": times.min_job_age_s,
        "TreeWidth": layout.tree_width,
    }
    return {key: str(value) for key, value in named.items() if value is not None}
