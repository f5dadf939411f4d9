"""The operator's side of a cluster on OCI, which Resource Manager creates from Oracle's HPC stack."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from dalsegno.errors import NotThere, TargetError
from dalsegno.setup.delivery import CodeBundle, find_bundle
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster
from dalsegno.spec.platform_facts import OciFacts
from dalsegno.system.files import remove_tree
from dalsegno.system.processes import Completed, LocalRunner, Runner
from dalsegno.targets.base import ClusterPhase, ClusterStatus, Plan, Removal, Say, ShellEntry
from dalsegno.targets.cloud.consequences import CapacityCheck, SettingChange
from dalsegno.targets.cloud.cost import read_prices
from dalsegno.targets.cloud.node_plans import PATH
from dalsegno.targets.folder import ClusterFolder, read_applied, write_applied
from dalsegno.targets.machines import Confirm, InstanceAction, MachineStatus
from dalsegno.targets.oci.apply import RELEASES_PAGE, OciWork, runs
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
    duration,
    find_tag_changes,
    find_variable_changes,
    new_resources,
    notes_of,
    read_oci_state,
    write_oci_state,
)
from dalsegno.targets.oci.resource_manager import ResourceManager, SdkResourceManager
from dalsegno.targets.oci.setup import ControllerShell, set_up_machines, set_up_new_nodes
from dalsegno.targets.oci.users import users_script
from dalsegno.targets.oci.variables import (
    Setting,
    creates_lustre,
    login_user,
    policy_statements,
    resource_manager_variables,
    settings_of,
    stack_variables,
    terraform_variables,
)
from dalsegno.targets.sides import (
    IMPORT_S,
    CommandsOnHead,
    OperatorSide,
    applied_cluster,
    as_user,
    ask_slurm,
    at_terminal,
    homes_on_machines,
    import_on_head,
    named_sources,
    node_status,
)

Connect = Callable[[OciFacts], ResourceManager]
COMMAND_S = 1800.0  # time limit of a command; resize.sh of release 2.10 waits until the new machine is configured


class OciTarget(OperatorSide):
    """The target on the operator's machine. One object stands for the cluster of one state folder."""

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
        self.confirm: Confirm = lambda consequences, destroys: not destroys

    def plan(self, cluster: Cluster) -> OciPlan:
        """Return the plan, from a comparison of the stack's variables with those of the last `up`. Nothing is
        changed."""
        own, state = settings_of(cluster), read_oci_state(self.folder)
        manager = self._connect(own)
        variables = stack_variables(cluster, _public_key(own), own.ad, getattr(manager, "tenancy", ""))
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
        scripts = setup_files(cluster, self._bundle().key)
        return self._compare(cluster, manager, variables, scripts, state, exists=exists)

    def _compare(
        self,
        cluster: Cluster,
        manager: ResourceManager,
        variables: Mapping[str, Setting],
        scripts: Mapping[str, str],
        state: OciState | None,
        *,
        exists: bool,
    ) -> OciPlan:
        own, applied, prices = settings_of(cluster), read_applied(self.folder), read_prices(os.environ)
        wanted = resource_manager_variables(variables)
        fresh = state is None or not exists or not state.variables
        before = state.variables if state and not fresh else {}
        changes: tuple[SettingChange, ...] = ()
        if state and not fresh:
            found = find_variable_changes(before, wanted, own.stack_version)
            changes = (*found, *find_tag_changes(state.tags, own.tags))
        unfinished = state is not None and state.phase is not OciStage.UP
        running = bool(state and exists and unfinished and runs(manager, state.job))
        return OciPlan(
            cluster,
            fresh=fresh,
            resumes=f"the {state.job_operation.value} job of Resource Manager" if state and running else "",
            resources=tuple(new_resources(cluster, before, wanted, fresh=fresh)),
            changes=changes,
            cost=cost_of(cluster, prices),
            cost_before=cost_of(applied, prices) if applied and not fresh else None,
            time=duration(cluster, fresh=fresh, changes_stack=fresh or unfinished or bool(changes)),
            checks=(
                CapacityCheck("the service limit of the shape", f"{len(cluster.nodes)} x {cluster.nodes[0].instance}"),
                *([CapacityCheck("the IAM policies", "the owner of the tenancy adds those below")] if fresh else []),
            ),
            notes=notes_of(cluster),
            variables=variables,
            state=state,
            scripts=scripts,
            installs=state is None or state.setup != setup_digest(scripts),
            unfinished=unfinished,
        )

    def apply(self, plan: Plan, say: Say) -> None:
        if not isinstance(plan, OciPlan):
            raise TypeError(f"not a plan of the oci target: {plan!r}")
        if plan.empty:
            return
        state = plan.state
        if plan.changes_stack or state is None:
            state = self._work(self._connect(settings_of(plan.cluster)), say).change_stack(plan)
        self._set_up(plan, state, say)

    def _set_up(self, plan: OciPlan, state: OciState, say: Say) -> None:
        """Install Dal Segno on the machines. If this fails, the stack stays as it is, and the next `up` continues."""
        write_applied(self.folder, plan.cluster)
        script = install_script(plan.cluster, plan.scripts, self._bundle().archive())
        set_up_machines(plan.cluster, script, self._controller(), say)
        write_oci_state(self.folder, replace(state, setup=setup_digest(plan.scripts)))

    def import_images(self, plan: Plan, say: Say) -> None:
        """Import the images of the cluster file on the controller, into the folder that all machines see."""

        def execute(argv: Sequence[str]) -> Completed:
            return self._runner.run(self.ssh_argv(["sudo", *argv], batch=True), timeout_s=IMPORT_S)

        import_on_head(applied_cluster(self.folder), plan.import_images, execute, say)

    def _work(self, manager: ResourceManager, say: Say) -> OciWork:
        return OciWork(manager, self.folder, say, self._pause, self.confirm)

    def _controller(self) -> ControllerShell:
        enter = partial(self.ssh_argv, batch=True)
        return ControllerShell(enter, lambda: self.slurm.nodes(), self._runner, self._pause)

    def removal(self) -> Removal:
        applied = read_applied(self.folder)
        new = tuple(each.name for each in applied.storage if not each.source) if applied else ()
        homes = homes_on_machines(applied, login_user(settings_of(applied))) if applied else ()
        return Removal(self.unfinished_jobs(), homes, new, named_sources(applied), needs_yes=True)

    def destroy(self, say: Say) -> bool:
        """Run the DESTROY job, and delete the stack if `up` created it. Return whether the cluster's state folder
        existed."""
        state, found = read_oci_state(self.folder), self.folder.root.exists()
        applied = read_applied(self.folder)
        if state is not None and state.stack:
            if applied is None and not state.job:
                raise TargetError("nothing says how to reach the stack", hint=f"delete {state.stack} in the console")
            self._work(self._connect(_access(applied, state)), say).destroy(state)
        remove_tree(self.folder.root)
        return found

    def platform_files(self, cluster: Cluster) -> dict[str, str]:
        """Return the files for people who run Terraform themselves: its variables, the IAM policies, and the scripts
        that set up the controller and add users."""
        own = settings_of(cluster)
        tenancy = own.tenancy or "TENANCY_OCID"
        variables = stack_variables(cluster, _public_key(own), own.ad, tenancy)
        bundle = self._bundle()
        policies = policy_statements(own.compartment, lustre=creates_lustre(cluster))
        files = {
            "install.sh": install_script(cluster, setup_files(cluster, bundle.key), bundle.archive()),
            "terraform.tfvars.json": terraform_variables(variables),
            "iam-policies.txt": "".join(f"{line}\n" for line in policies),
        }
        if cluster.users:
            files["users.sh"] = users_script(cluster)
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
        """Return the ssh command to the controller or, through it, to the node that has the name `host` in Slurm."""
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
        """Return how to run `dalsegno ARGUMENTS` on the head node; None for `nodes replace` and `nodes reboot`, which
        run here."""
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
        applied = applied_cluster(self.folder)
        release = settings_of(applied).stack_version
        for name in names:
            self.slurm.node(name)  # raises for a name that Slurm does not know
            if action is InstanceAction.REBOOT:
                self._on_controller(reboot_command(release, name))
                continue
            grown = ""
            if release == "v3":
                grown = cluster_to_grow(read_machine(self._on_controller(describe_command(name)), name), name)
            self.slurm.scontrol("update", f"NodeName={name}", "State=DRAIN", "Reason=dalsegno:replace:requested")
            with self._new_nodes_set_up(applied, name) if release != "v3" else nullcontext():
                for command in replace_commands(release, name, grown):
                    self._on_controller(command)

    @contextmanager
    def _new_nodes_set_up(self, applied: Cluster, name: str) -> Iterator[None]:
        """Set up the nodes that appear while the `with` block runs. Release 3 does this by itself.

        If the set-up fails, the next `up` repeats it.
        """
        state, others = read_oci_state(self.folder), {node.name for node in self.slurm.nodes()} - {name}
        if state:
            write_oci_state(self.folder, replace(state, setup=""))
        yield
        set_up_new_nodes(applied, others, self._controller())
        if state:
            write_oci_state(self.folder, state)

    def _on_controller(self, command: Sequence[str]) -> str:
        done = self._runner.run(self.ssh_argv(command, batch=True), timeout_s=COMMAND_S)
        return done.checked("run the command on the controller: `dalsegno ssh head`").stdout


def cache_by_profile(connect: Connect) -> Connect:
    """Return a version of `connect` that keeps one connection per region and profile."""

    @cache
    def open_once(region: str, profile: str) -> ResourceManager:
        return connect(OciFacts(region, "", "", profile=profile))

    return lambda own: open_once(own.region, own.profile)


def _access(applied: Cluster | None, state: OciState) -> OciFacts:
    """Return the settings that are needed to reach the stack. They come from the cluster file, or from the stack's id
    if `up` never completed."""
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
