"""Logins of users on ssh hosts. If the cluster file says so, users can log in only to nodes where they have a job.
Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.setup.inspect import HostFacts
from dalsegno.setup.node_plan import HostParts, PlannedCommand, PlannedFile
from dalsegno.spec.facts import Cluster
from dalsegno.targets.ssh.releases import DEBIAN
from dalsegno.users.login_files import PAM_SESSION_FILES, PAM_SSHD, render_pam_sshd

ADOPT_PACKAGES = {True: "libpam-slurm-adopt", False: "slurm-pam_slurm"}  # whether the host is of the Debian family
_USES_PAM = "sshd -T 2>/dev/null | grep -qix 'usepam yes'"
_NO_PAM = "sshd does not use PAM: write `UsePAM yes` to /etc/ssh/sshd_config, and reload sshd"


def job_login_parts(cluster: Cluster, host: str, facts: HostFacts) -> HostParts:
    """Return the parts that make a compute node refuse users without a job there.

    The user that Dal Segno logs in as is always allowed.
    """
    access = cluster.ssh.host(host)
    admins = [access.user] if access and access.user not in ("", "root") else []
    own = {path: facts.files[path] for path in PAM_SESSION_FILES if path in facts.files}
    text = render_pam_sshd(facts.files.get(PAM_SSHD, ""), own, admins)
    # If the cluster file names its own Slurm packages, they must include this PAM module.
    packages = () if cluster.ssh.slurm_packages else (ADOPT_PACKAGES[facts.os_id in DEBIAN],)
    script = f'{_USES_PAM} || {{ echo "{_NO_PAM}"; exit 1; }}'.replace("`", "'")
    check = PlannedCommand(
        "checking that sshd uses PAM", ("/bin/sh", "-c", script), unless=("/bin/sh", "-c", _USES_PAM)
    )
    return HostParts(packages, files=(PlannedFile(PAM_SSHD, text),), commands=(check,))


def check_job_logins(cluster: Cluster, facts: Mapping[str, HostFacts], *, tracked: bool) -> dict[str, DalsegnoError]:
    """Return the compute nodes that cannot refuse users without a job, with the reason for each.

    `tracked` says whether Slurm uses cgroups. Raise an error if the cluster file sets PrologFlags without Contain.
    """
    if not cluster.ssh.logins_need_job:
        return {}
    flags = next((value for name, value in cluster.slurm.extra.items() if name.lower() == "prologflags"), "")
    if flags and "contain" not in flags.lower().split(","):
        raise TargetError(
            f"`ssh.logins_need_job` needs the prolog flag Contain, and `slurm.extra` says `PrologFlags: {flags}`",
            hint=f"write `PrologFlags: {flags},Contain`, or leave it out",
        )
    faults: dict[str, DalsegnoError] = {}
    for node in cluster.nodes:
        each = facts.get(node.name)
        if each is not None and not tracked:
            faults[node.name] = TargetError(
                f"{node.name}: `ssh.logins_need_job` needs cgroups, which Slurm cannot use on all nodes",
                hint="all nodes need systemd and cgroup v2, or cgroup v1; or leave it out of the cluster file",
            )
        elif each is not None and not each.files.get(PAM_SSHD):
            faults[node.name] = TargetError(
                f"{node.name}: it has no {PAM_SSHD}, which `ssh.logins_need_job` changes",
                hint="install the sshd of the distribution, or leave `logins_need_job` out of the cluster file",
            )
    return faults
