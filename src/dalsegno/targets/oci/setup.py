"""Install Dal Segno on the machines of the HPC stack, over ssh and through the controller."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.slurm.facts import NodeInfo
from dalsegno.spec.facts import Cluster
from dalsegno.system.processes import Completed, Runner
from dalsegno.targets.base import Say
from dalsegno.targets.cloud.slurm_policy import has_people
from dalsegno.targets.oci.node_plans import MachineRole, accounts_command, login_name, node_command, users_command
from dalsegno.targets.oci.plan import AT_ONCE
from dalsegno.targets.registration import is_registered

SETUP_S = 1800.0
POLL_S = 15.0
REACH_TURNS = 40  # maximum number of polls of sshd on the controller: ten minutes
REGISTER_TURNS = 120  # maximum number of polls of the nodes in Slurm: half an hour


@dataclass(frozen=True)
class ControllerShell:
    """Runs commands on the head node as its login user, and lists the nodes in Slurm."""

    enter: Callable[[Sequence[str]], Sequence[str]]  # returns the ssh command line of a command
    nodes: Callable[[], Sequence[NodeInfo]]
    runner: Runner
    pause: Callable[[float], None]

    def run(self, command: Sequence[str], stdin: str | None = None, timeout_s: float = SETUP_S) -> Completed:
        return self.runner.run(self.enter(command), stdin=stdin, timeout_s=timeout_s)


def set_up_machines(cluster: Cluster, script: str, controller: ControllerShell, say: Say) -> None:
    """Set up the controller, then all other machines. Raise TargetError if one of them fails or is missing."""
    _reach(controller, say)
    say("installing Dal Segno on the controller")
    done = controller.run(["sudo", "bash", "-s"], stdin=script)
    if done.exit_code != 0:
        raise TargetError(
            f"the controller could not be set up: {_last(done)}",
            hint="read /var/log/dalsegno/bootstrap.log there, then run `dalsegno up` again",
        )
    _add_users(cluster, controller, say)
    _add_accounts(cluster, controller, say)
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


def set_up_new_nodes(cluster: Cluster, before: Collection[str], controller: ControllerShell) -> None:
    """Set up the nodes in Slurm that are not in `before`. Raise TargetError if none appears, or one fails."""
    names = [name for name in _registered(cluster, controller, lambda text: None) if name not in before]
    failed = _run_on_nodes([(name, MachineRole.COMPUTE) for name in names], cluster, controller)
    if failed or not names:
        raise TargetError(
            f"the new machine was not set up: {failed[0] if failed else 'it is not in Slurm yet'}",
            hint="run `dalsegno up` as soon as `dalsegno nodes` shows it",
        )


def _add_users(cluster: Cluster, controller: ControllerShell, say: Say) -> None:
    """Add the users of the cluster file to the stack's directory.

    Remove users that an earlier `up` added and that are no longer in the file.
    """
    say(f"users in the directory: {len(cluster.users)}")
    done = controller.run(users_command(cluster))
    if done.exit_code != 0:
        raise TargetError(
            f"the users could not be added: {_last(done)}",
            hint="fix what the message names, then run `dalsegno up` again",
        )


def _add_accounts(cluster: Cluster, controller: ControllerShell, say: Say) -> None:
    if not has_people(cluster):
        return
    say("adding accounts, users and QOS to Slurm's accounting")
    done = controller.run(accounts_command(cluster))
    if done.exit_code != 0:
        raise TargetError(
            f"Slurm's accounting could not be changed: {_last(done)}",
            hint="fix what the message names, then run `dalsegno up` again",
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
    """Return the nodes in Slurm. Wait until there are as many as in the cluster file, but at most REGISTER_TURNS
    polls."""
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
    machines = [(name, MachineRole.COMPUTE) for name in names]
    machines += [(login_name(cluster), MachineRole.LOGIN) for _ in cluster.logins]
    return _run_on_nodes(machines, cluster, controller)


def _run_on_nodes(
    machines: Sequence[tuple[str, MachineRole]], cluster: Cluster, controller: ControllerShell
) -> list[str]:
    """Run the set-up on machines, AT_ONCE at a time. Return the names and messages of those that failed."""
    from concurrent.futures import ThreadPoolExecutor

    def run(machine: tuple[str, MachineRole]) -> str:
        done = controller.run(node_command(cluster, *machine))
        return "" if done.exit_code == 0 else f"{machine[0]}: {_last(done)}"

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return [text for text in threads.map(run, machines) if text]


def _last(done: Completed) -> str:
    return (done.stderr or done.stdout).strip()[-300:] or f"exit code {done.exit_code}"
