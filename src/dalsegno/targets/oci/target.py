"""The operator's side of a cluster on OCI, which Resource Manager creates from Oracle's HPC stack."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from dalsegno.errors import NotThere, TargetError
from dalsegno.setup.delivery import CodeBundle, find_bundle
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster, facts_to_json
from dalsegno.spec.platform_facts import OciFacts
from dalsegno.system.files import make_folder, remove_tree, write_atomic
from dalsegno.system.processes import LocalRunner, Runner
from dalsegno.targets.base import ClusterPhase, ClusterStatus, Plan, Removal, Say, ShellEntry
from dalsegno.targets.cloud.consequences import CapacityCheck, Minutes
from dalsegno.targets.cloud.cost import read_prices
from dalsegno.targets.cloud.node_plans import PATH
from dalsegno.targets.cloud.progress import OperationReport, OperationState, follow
from dalsegno.targets.folder import ClusterFolder, read_applied, write_applied
from dalsegno.targets.machines import InstanceAction, MachineStatus
from dalsegno.targets.oci.head import (
    TIMES,
    cluster_to_grow,
    describe_command,
    read_machine,
    reboot_command,
    replace_commands,
)
from dalsegno.targets.oci.node_plans import install_script, setup_digest, setup_files
from dalsegno.targets.oci.plan import (
    PHASES,
    OciPlan,
    OciStage,
    OciState,
    cost_of,
    find_variable_changes,
    read_oci_state,
)
from dalsegno.targets.oci.resource_manager import ResourceManager, SdkResourceManager, StackJobState, StackOperation
from dalsegno.targets.oci.setup import ControllerShell, set_up_machines
from dalsegno.targets.oci.variables import (
    login_user,
    policy_statements,
    resource_manager_variables,
    settings_of,
    stack_variables,
    terraform_variables,
    user_commands,
)
from dalsegno.targets.sides import (
    CommandsOnHead,
    OperatorSide,
    applied_cluster,
    as_user,
    ask_slurm,
    at_terminal,
    node_status,
)

Connect = Callable[[OciFacts], ResourceManager]
COMMAND_S = 1800.0  # time limit of a command: resize.sh of release 2.10 waits until the new machine is configured
RELEASES_PAGE = "https://github.com/oracle-quickstart/oci-hpc/releases"


class OciTarget(OperatorSide):
    """The cluster in one state folder of the operator's machine."""

    kind = "oci"
    times = TIMES

    def __init__(
        self,
        folder: Path,
        connect: Connect = lambda own: SdkResourceManager(own.region, own.profile),
        runner: Runner | None = None,
        pause: Callable[[float], None] = time.sleep,
        bundle: Callable[[], CodeBundle] = find_bundle,
    ) -> None:
        self.folder = ClusterFolder(folder)
        self._bundle = cache(bundle)
        self._connect, self._runner, self._pause = cache_by_profile(connect), runner or LocalRunner(), pause

    def plan(self, cluster: Cluster) -> OciPlan:
        """Compare the variables of the stack with those of the last `up`. Nothing is changed."""
        own, state = settings_of(cluster), read_oci_state(self.folder)
        manager = self._connect(own)
        variables = stack_variables(cluster, _public_key(own), _domain(own), getattr(manager, "tenancy", ""))
        stack = (state.stack if state else "") or own.stack
        exists = bool(stack) and manager.has_stack(stack)
        if own.stack and not exists:
            raise TargetError(f"there is no stack {own.stack}", hint="check `oci.stack`, `oci.region` and the profile")
        if not exists and not own.template:
            raise TargetError(
                "the cluster file names neither the files of the HPC stack nor an existing stack",
                hint=f"download a release from {RELEASES_PAGE} and set `oci: {{template: oci-hpc.zip}}`",
            )
        if not exists and (others := manager.find_stacks(cluster.name, own.compartment)):
            raise TargetError(
                f"the compartment has a stack `{cluster.name}` already, which was not created from here",
                hint=f"choose another name, or use that stack: `oci: {{stack: {others[0]}}}`",
            )
        wanted = resource_manager_variables(variables)
        fresh = state is None or not exists or not state.variables
        running = bool(state and state.job and state.phase is not OciStage.UP)
        scripts = setup_files(cluster, self._bundle().key)
        return OciPlan(
            cluster,
            fresh=fresh,
            resumes=f"the {state.job_operation.value} job of Resource Manager" if state and running and exists else "",
            changes=() if fresh or state is None else tuple(find_variable_changes(state.variables, wanted)),
            cost=cost_of(cluster, read_prices(os.environ)),
            time=Minutes(30, 60),
            checks=(
                CapacityCheck("the service limit of the shape", f"{len(cluster.nodes)} x {cluster.nodes[0].instance}"),
                CapacityCheck("the IAM policies", "`dalsegno plan --write FOLDER` writes their statements"),
            ),
            variables=variables,
            state=state,
            scripts=scripts,
            installs=state is None or state.setup != setup_digest(scripts),
        )

    def apply(self, plan: Plan, say: Say) -> None:
        if not isinstance(plan, OciPlan):
            raise TypeError(f"not a plan of the oci target: {plan!r}")
        if plan.empty:
            return
        state = plan.state
        if plan.changes_stack or state is None:
            state = self._change_stack(plan, say)
        self._set_up(plan, state, say)

    def _change_stack(self, plan: OciPlan, say: Say) -> OciState:
        own, manager = settings_of(plan.cluster), self._connect(settings_of(plan.cluster))
        stage = OciStage.MAKING if plan.fresh else OciStage.CHANGING
        state = self._save(replace(plan.state or OciState(stage), phase=stage, setup=""))
        if plan.resumes:
            self._follow(manager, state, say)
        variables = resource_manager_variables(plan.variables)
        state = self._prepare_stack(manager, own, plan, state, variables, say)
        planned = self._run(manager, state, StackOperation.PLAN, say)
        state = self._run(manager, planned, StackOperation.APPLY, say, plan=planned.job)
        outputs = manager.outputs(state.job)
        if not outputs.get("controller"):
            raise TargetError(
                "the stack has no output `controller`", hint="use the HPC stack of Oracle, release v2.10 or later"
            )
        write_applied(self.folder, plan.cluster)
        say(f"the controller is {outputs['controller']}")
        return self._save(replace(state, phase=OciStage.UP, controller=outputs["controller"], variables=variables))

    def _set_up(self, plan: OciPlan, state: OciState, say: Say) -> None:
        """Install Dal Segno on the machines. If this fails, the stack stays as it is, and the next `up` continues."""
        write_applied(self.folder, plan.cluster)
        controller = ControllerShell(
            lambda command: self.ssh_argv(command, batch=True), lambda: self.slurm.nodes(), self._runner, self._pause
        )
        script = install_script(plan.cluster, plan.scripts, self._bundle().archive())
        set_up_machines(plan.cluster, script, controller, say)
        self._save(replace(state, setup=setup_digest(plan.scripts)))

    def _prepare_stack(
        self,
        manager: ResourceManager,
        own: OciFacts,
        plan: OciPlan,
        state: OciState,
        variables: Mapping[str, str],
        say: Say,
    ) -> OciState:
        stack = state.stack or own.stack
        if stack and manager.has_stack(stack):
            say("updating the variables of the stack")
            manager.update_stack(stack, variables)
            return self._save(replace(state, stack=stack))
        say("creating the stack")
        archive = _read_archive(own.template)
        stack = manager.create_stack(plan.cluster.name, own.compartment, archive, variables)
        return self._save(replace(state, stack=stack, created_stack=True))

    def _run(
        self, manager: ResourceManager, state: OciState, operation: StackOperation, say: Say, plan: str = ""
    ) -> OciState:
        job = manager.start(state.stack, operation, plan)
        state = self._save(replace(state, job=job, job_operation=operation))
        self._follow(manager, state, say)
        return state

    def _follow(self, manager: ResourceManager, state: OciState, say: Say) -> None:
        """Show the log of a job until it ends. Its whole log is kept if it fails."""
        shown = 0

        def poll() -> OperationReport:
            nonlocal shown
            found, lines = manager.job(state.job), manager.log(state.job)
            for line in lines[shown:]:
                say(line)
            shown = len(lines)
            ended = {StackJobState.SUCCEEDED: OperationState.DONE}.get(found.state, OperationState.FAILED)
            where = ended if found.state.ended else OperationState.RUNNING
            logs = ((f"{state.job_operation.value.lower()}.log", "\n".join(lines) + "\n"),)
            last = next((line for line in reversed(lines) if "error" in line.lower()), "")
            return OperationReport(where, message=found.failure or last or found.state.value, logs=logs)

        what = f"the {state.job_operation.value} job"
        follow(what, poll, say, self.folder.root / "operations", pause=self._pause)

    def _save(self, state: OciState) -> OciState:
        make_folder(self.folder.root)
        write_atomic(self.folder.state, json.dumps(facts_to_json(state), indent=1), 0o600)
        return state

    def removal(self) -> Removal:
        applied = read_applied(self.folder)
        new = tuple(each.name for each in applied.storage if not each.source) if applied else ()
        return Removal(self.unfinished_jobs(), storage=new, needs_yes=True)

    def destroy(self, say: Say) -> bool:
        """Run the DESTROY job, and delete the stack if `up` created it."""
        state, found = read_oci_state(self.folder), self.folder.root.exists()
        applied = read_applied(self.folder)
        if state is not None and state.stack:
            if applied is None and not state.job:
                raise TargetError("nothing says how to reach the stack", hint=f"delete {state.stack} in the console")
            manager = self._connect(_access(applied, state))
            if manager.has_stack(state.stack):
                state = self._save(replace(state, phase=OciStage.REMOVING))
                self._run(manager, state, StackOperation.DESTROY, say)
                if state.created_stack:
                    say("deleting the stack")
                    manager.delete_stack(state.stack)
        remove_tree(self.folder.root)
        return found

    def platform_files(self, cluster: Cluster) -> dict[str, str]:
        """Return the files for Terraform without Resource Manager, the IAM policies, and commands for users."""
        own = settings_of(cluster)
        tenancy = own.tenancy or "TENANCY_OCID"
        variables = stack_variables(cluster, _public_key(own), _domain(own), tenancy)
        files = {
            "terraform.tfvars.json": terraform_variables(variables),
            "iam-policies.txt": "".join(f"{line}\n" for line in policy_statements(own.compartment)),
        }
        if cluster.users:
            files["users.sh"] = "#!/bin/bash\n# On the controller. Each command asks for a password.\n" + "".join(
                f"{line}\n" for line in user_commands(cluster)
            )
        return files

    # Reading the cluster's state

    def status(self) -> ClusterStatus:
        state = read_oci_state(self.folder)
        if state is None:
            return ClusterStatus(self.folder.name, "oci", ClusterPhase.GONE, jobs=None)
        facts = {"controller": state.controller or "none", "stack": state.stack or "none"}
        phase, seen = PHASES[state.phase], ask_slurm(self.slurm if state.controller else None)
        if seen.problem and phase is ClusterPhase.UP:
            phase = ClusterPhase.DEGRADED
        nodes = tuple(node_status(node) for node in seen.nodes)
        return ClusterStatus(self.folder.name, "oci", phase, nodes, (), seen.jobs, seen.problems, facts)

    def recorded_phase(self, applied: Cluster | None) -> ClusterPhase:
        state = read_oci_state(self.folder)
        return PHASES[state.phase] if state else ClusterPhase.GONE

    @property
    def slurm(self) -> SlurmClient:
        """A client that runs Slurm's commands on the head node."""
        return self._slurm()

    def slurm_as(self, user: str) -> SlurmClient:
        return self._slurm(["runuser", "-u", user, "--"])

    def _slurm(self, prefix: Sequence[str] = ()) -> SlurmClient:
        runner = CommandsOnHead(self._runner, lambda command: self.ssh_argv(["sudo", *command]))
        return SlurmClient(runner, {"PATH": PATH}, prefix=prefix, timeout_s=60)

    def slurm_runs(self) -> bool:
        state = read_oci_state(self.folder)
        return bool(state and state.controller)

    def shell(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        host: str | None = None,
        user: str | None = None,
    ) -> ShellEntry:
        return ShellEntry(self.ssh_argv(as_user(command, user), host, terminal=at_terminal()), dict(env))

    def ssh_argv(
        self, command: Sequence[str], host: str | None = None, *, terminal: bool = False, batch: bool = False
    ) -> list[str]:
        """Return ssh to the controller, or through it to a node by its name in Slurm."""
        state, applied = read_oci_state(self.folder), read_applied(self.folder)
        if state is None or applied is None or not state.controller:
            raise NotThere(f"{self.folder.name} has no controller yet", hint="`dalsegno up` creates it")
        own = settings_of(applied)
        key, user = own.ssh_key.removesuffix(".pub"), login_user(own)
        argv = ["ssh", "-i", key, "-o", "StrictHostKeyChecking=accept-new"]
        argv += ["-t"] if terminal and command else []
        argv += ["-o", "BatchMode=yes"] if batch else []
        if host and host not in ("head", "controller"):
            proxy = shlex.join(["ssh", "-i", key, "-W", "[%h]:%p", f"{user}@{state.controller}"])
            argv += ["-o", f"ProxyCommand={proxy}", "--", f"{user}@{host}"]
        else:
            argv += ["--", f"{user}@{state.controller}"]
        return [*argv, shlex.join(command)] if command else argv

    def forward(self, arguments: Sequence[str], *, root: bool = False) -> ShellEntry | None:
        """Return how to run `dalsegno ARGUMENTS` on the head node. Machines are replaced and rebooted from here."""
        if tuple(arguments[:2]) in (("nodes", "replace"), ("nodes", "reboot")):
            return None
        return super().forward(arguments, root=root)

    # Machines

    def machines(self) -> list[MachineStatus]:
        """Return the nodes as Slurm knows them."""
        return [
            MachineStatus(node.name, node.name, "", ",".join(node.partitions), "", "", node.word)
            for node in self.slurm.nodes()
        ]

    def act_on_machines(self, action: InstanceAction, names: Sequence[str], *, through_api: bool) -> None:
        """Replace or reboot machines with the stack's own commands on the head node."""
        release = settings_of(applied_cluster(self.folder)).stack_version
        for name in names:
            self.slurm.node(name)  # raises for a name that Slurm does not know
            if action is InstanceAction.REBOOT:
                self._on_controller(reboot_command(release, name))
                continue
            grown = ""
            if release == "v3":
                grown = cluster_to_grow(read_machine(self._on_controller(describe_command(name)), name), name)
            self.slurm.scontrol("update", f"NodeName={name}", "State=DRAIN", "Reason=dalsegno:replace:requested")
            for command in replace_commands(release, name, grown):
                self._on_controller(command)

    def _on_controller(self, command: Sequence[str]) -> str:
        done = self._runner.run(self.ssh_argv(command, batch=True), timeout_s=COMMAND_S)
        return done.checked("run the command on the controller: `dalsegno ssh head`").stdout


def cache_by_profile(connect: Connect) -> Connect:
    """Return `connect` with one connection per region and profile."""

    @cache
    def open_once(region: str, profile: str) -> ResourceManager:
        return connect(OciFacts(region, "", "", profile=profile))

    return lambda own: open_once(own.region, own.profile)


def _access(applied: Cluster | None, state: OciState) -> OciFacts:
    """Return the settings to reach the stack: from the file, or from the stack's id if it was never applied."""
    if applied is not None:
        return settings_of(applied)
    return OciFacts(state.stack.split(".")[3], "", "")


def _public_key(own: OciFacts) -> str:
    hint = "create one with `ssh-keygen -t ed25519`, or set `oci: {ssh_key: FILE}`"
    try:
        text = Path(own.ssh_key).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"the public key {own.ssh_key} cannot be read: {error}", hint=hint) from None
    if not text.startswith(("ssh-", "ecdsa-", "sk-")):
        raise TargetError(f"{own.ssh_key} is not a public key", hint=hint)
    return text


def _domain(own: OciFacts) -> str:
    if not own.ad:
        raise TargetError(
            "the cluster file names no availability domain",
            hint="add `oci: {ad: …}`; `oci iam availability-domain list` shows their names",
        )
    return own.ad


def _read_archive(path: str) -> bytes:
    try:
        found = Path(path).read_bytes()
    except OSError as error:
        raise TargetError(f"the stack's files {path} cannot be read: {error}", hint="check `oci.template`") from None
    if not found.startswith(b"PK"):
        raise TargetError(f"{path} is not a zip file", hint=f"download a release from {RELEASES_PAGE}")
    return found
