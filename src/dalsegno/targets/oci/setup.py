"""Install Dal Segno on the machines of the HPC stack, over ssh and through the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.slurm.facts import NodeInfo
from dalsegno.spec.facts import Cluster
from dalsegno.system.processes import Completed, Runner
from dalsegno.targets.base import Say
from dalsegno.targets.oci.node_plans import MachineRole, login_name, node_command
from dalsegno.targets.registration import is_registered

SETUP_S = 1800.0
POLL_S = 15.0
REACH_TURNS = 40  # polls until sshd of the controller answers: ten minutes
REGISTER_TURNS = 120  # polls until all nodes are in Slurm: half an hour
AT_ONCE = 8  # connections at a time; sshd refuses some if more than ten log in at once


@dataclass(frozen=True)
class ControllerShell:
    """How to run commands on the head node as its login user, and to list the nodes in Slurm."""

    enter: Callable[[Sequence[str]], Sequence[str]]  # returns the ssh command line of a command
    nodes: Callable[[], Sequence[NodeInfo]]
    runner: Runner
    pause: Callable[[float], None]

    def run(self, command: Sequence[str], stdin: str | None = None, timeout_s: float = SETUP_S) -> Completed:
        return self.runner.run(self.enter(command), stdin=stdin, timeout_s=timeout_s)


def set_up_machines(cluster: Cluster, script: str, controller: ControllerShell, say: Say) -> None:
    """Set up the controller, then all other machines. Raise TargetError if one of them failed or is missing."""
    _reach(controller, say)
    say("installing Dal Segno on the controller")
    done = controller.run(["sudo", "bash", "-s"], stdin=script)
    if done.exit_code != 0:
        raise TargetError(
            f"the controller could not be set up: {_last(done)}",
            hint="read /var/log/dalsegno/bootstrap.log there, then run `dalsegno up` again",
        )
    names = _registered(cluster, controller, say)
    say(f"installing Dal Segno on {len(names)} nodes")
    failed = _set_up_nodes(cluster, names, controller)
    if failed:
        raise TargetError(
            f"{len(failed)} of {len(names) + len(cluster.logins)} nodes could not be set up; the first: {failed[0]}",
            hint="`dalsegno ssh NODE` shows /var/log/dalsegno/bootstrap.log there; `dalsegno up` tries again",
        )
    if len(names) < len(cluster.nodes):
        raise TargetError(
            f"only {len(names)} of {len(cluster.nodes)} nodes are in Slurm",
            hint="read the log of the stack on the controller, /config/logs; `dalsegno up` sets up the others later",
        )


def _reach(controller: ControllerShell, say: Say) -> None:
    for _ in range(REACH_TURNS):
        done = controller.run(["true"], timeout_s=60.0)
        if done.exit_code == 0:
            return
        say("waiting for ssh to the controller")
        controller.pause(POLL_S)
    raise TargetError(
        f"the controller cannot be reached: {_last(done)}",
        hint="check `oci.allowed_ips` and `oci.ssh_key`, then run `dalsegno up` again",
    )


def _registered(cluster: Cluster, controller: ControllerShell, say: Say) -> list[str]:
    """Return the nodes in Slurm. Wait until there are as many as the cluster file says, but not for ever."""
    found: list[str] = []
    for _ in range(REGISTER_TURNS):
        try:
            found = [node.name for node in controller.nodes() if is_registered(node)]
        except DalsegnoError as error:  # slurmctld may be restarting
            say(f"Slurm does not answer: {error.what.splitlines()[-1]}")
        if len(found) >= len(cluster.nodes):
            break
        say(f"waiting for nodes: {len(found)} of {len(cluster.nodes)} are in Slurm")
        controller.pause(POLL_S)
    return found


def _set_up_nodes(cluster: Cluster, names: Sequence[str], controller: ControllerShell) -> list[str]:
    from concurrent.futures import ThreadPoolExecutor

    machines = [(name, MachineRole.COMPUTE) for name in names]
    machines += [(login_name(cluster), MachineRole.LOGIN) for _ in cluster.logins]

    def run(machine: tuple[str, MachineRole]) -> str:
        done = controller.run(node_command(cluster, *machine))
        return "" if done.exit_code == 0 else f"{machine[0]}: {_last(done)}"

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return [text for text in threads.map(run, machines) if text]


def _last(done: Completed) -> str:
    return (done.stderr or done.stdout).strip()[-300:] or f"exit code {done.exit_code}"
