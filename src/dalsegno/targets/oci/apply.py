"""Carry out an OCI plan with Resource Manager: change the stack, run its jobs, and destroy what they created."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dalsegno.errors import TargetError
from dalsegno.targets.base import Say
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.cloud.progress import OperationReport, OperationState, follow
from dalsegno.targets.folder import ClusterFolder, write_applied
from dalsegno.targets.machines import Confirm
from dalsegno.targets.oci.jobs import read_events, read_plan_summary
from dalsegno.targets.oci.plan import OciPlan, OciStage, OciState, write_oci_state
from dalsegno.targets.oci.resource_manager import ResourceManager, StackJobState, StackOperation
from dalsegno.targets.oci.variables import resource_manager_variables, settings_of

RELEASES_PAGE = "https://github.com/oracle-quickstart/oci-hpc/releases"


@dataclass(frozen=True)
class OciWork:
    """Carries out one `up` or `down`. `confirm` shows the plan and, if it destroys something, asks the user."""

    manager: ResourceManager
    folder: ClusterFolder
    say: Say
    pause: Callable[[float], None]
    confirm: Confirm

    def change_stack(self, plan: OciPlan) -> OciState:
        """Create or update the stack, run a PLAN job, and then the APPLY job of exactly that plan.

        Return the new state, which is also written after each step.
        """
        stage = OciStage.MAKING if plan.fresh else OciStage.CHANGING
        state = self._save(replace(plan.state or OciState(stage), phase=stage, setup=""))
        if plan.resumes:
            self._follow(state)
        variables = resource_manager_variables(plan.variables)
        state = self._prepare_stack(plan, state, variables)
        planned = self._run(state, StackOperation.PLAN)
        self._agree(plan, planned)
        state = self._run(planned, StackOperation.APPLY, plan=planned.job)
        outputs = self.manager.outputs(state.job)
        if not outputs.get("controller"):
            raise TargetError(
                "the stack has no output `controller`", hint="use the HPC stack of Oracle, release v2.10 or later"
            )
        write_applied(self.folder, plan.cluster)
        self.say(f"the controller is {outputs['controller']}")
        state = replace(state, phase=OciStage.UP, controller=outputs["controller"], variables=variables)
        return self._save(replace(state, tags=dict(settings_of(plan.cluster).tags)))

    def _prepare_stack(self, plan: OciPlan, state: OciState, variables: Mapping[str, str]) -> OciState:
        own = settings_of(plan.cluster)
        stack = state.stack or own.stack
        if stack and self.manager.has_stack(stack):
            self.say("updating the variables of the stack")
            self.manager.update_stack(stack, variables, own.tags, {*state.tags} - {*own.tags})
            return self._save(replace(state, stack=stack))
        self.say("creating the stack")
        archive = _read_archive(own.template)
        stack = self.manager.create_stack(plan.cluster.name, own.compartment, archive, variables, own.tags)
        return self._save(replace(state, stack=stack, created_stack=True))

    def _run(self, state: OciState, operation: StackOperation, plan: str = "") -> OciState:
        job = self.manager.start(state.stack, operation, plan)
        state = self._save(replace(state, job=job, job_operation=operation))
        self._follow(state)
        return state

    def _agree(self, plan: OciPlan, planned: OciState) -> None:
        """Show the result of the PLAN job. If something would be destroyed, or may be, ask the user.

        If the user declines, restore the variables of the stack and raise TargetError.
        """
        found = read_plan_summary(self.manager.log(planned.job))
        said = found.sentence() if found else "the log of the PLAN job does not say what Terraform would destroy"
        new = plan.fresh and not settings_of(plan.cluster).stack
        agreed = False
        try:
            agreed = self.confirm([said], bool(found.destroy) if found else not new)
        finally:
            if not agreed and plan.state is not None and plan.state.variables:
                before, added = plan.state, {*settings_of(plan.cluster).tags} - {*plan.state.tags}
                self.manager.update_stack(planned.stack, before.variables, before.tags, added)
                self._save(plan.state)
        if not agreed:
            raise TargetError("the stack was not changed", hint="`dalsegno up` asks again; a script must add `--yes`")

    def _follow(self, state: OciState) -> None:
        """Show the log of a job until it ends. If the job fails, keep its whole log."""
        shown = 0

        def poll() -> OperationReport:
            nonlocal shown
            found, lines = self.manager.job(state.job), self.manager.log(state.job)
            for line in lines[shown:]:
                self.say(line)
            shown = len(lines)
            ended = {StackJobState.SUCCEEDED: OperationState.DONE}.get(found.state, OperationState.FAILED)
            where = ended if found.state.ended else OperationState.RUNNING
            logs = ((f"{state.job_operation.value.lower()}.log", "\n".join(lines) + "\n"),)
            last = next((line for line in reversed(lines) if "error" in line.lower()), "")
            return OperationReport(where, read_events(lines), found.failure or last or found.state.value, logs)

        what = f"the {state.job_operation.value} job"
        follow(what, poll, self.say, self.folder.root / "operations", pause=self.pause)

    def _save(self, state: OciState) -> OciState:
        write_oci_state(self.folder, state)
        return state

    def destroy(self, state: OciState) -> None:
        """Destroy the resources of the stack, and delete the stack if `up` created it.

        A missing stack is not an error.
        """
        if not self.manager.has_stack(state.stack):
            return
        self._destroy_resources(state)
        if state.created_stack:
            self.say("deleting the stack")
            self.manager.delete_stack(state.stack)

    def _destroy_resources(self, state: OciState) -> None:
        """Run the DESTROY job, or follow the one that an earlier `down` started."""
        running = runs(self.manager, state.job)
        state = self._save(replace(state, phase=OciStage.REMOVING))
        if running and state.job_operation is StackOperation.DESTROY:
            self._follow(state)
            return
        if running:
            self.say(f"waiting for the {state.job_operation.value} job to end")
            with suppress(CloudError):  # even after a failure, the DESTROY job removes what the other job created
                self._follow(state)
        self._run(state, StackOperation.DESTROY)


def runs(manager: ResourceManager, job: str) -> bool:
    """Return whether a job of Resource Manager exists and has not ended."""
    try:
        return bool(job) and not manager.job(job).state.ended
    except CloudError as error:
        if error.refusal is CloudRefusal.NOT_THERE or error.code == "NotAuthorizedOrNotFound":
            return False
        raise


def _read_archive(path: str) -> bytes:
    try:
        found = Path(path).read_bytes()
    except OSError as error:
        raise TargetError(f"the stack's files {path} cannot be read: {error}", hint="check `oci.template`") from None
    if not found.startswith(b"PK"):
        raise TargetError(f"{path} is not a zip file", hint=f"download a release from {RELEASES_PAGE}")
    return found
