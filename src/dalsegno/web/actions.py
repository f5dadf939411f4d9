"""Carry out the actions of visitors, and record each in the journal with the visitor's name."""

from __future__ import annotations

import logging
import os
import pwd
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.programs import own_argv
from dalsegno.recovery.client import ask
from dalsegno.recovery.journal.event import EventStage
from dalsegno.slurm.client import SlurmClient
from dalsegno.system.children import Child, Identity, start
from dalsegno.targets.base import CanInject, Target
from dalsegno.targets.folder import ClusterFolder
from dalsegno.web.requests import ActionKind, ActionRefused, WebAction
from dalsegno.web.sessions import Visitor
from dalsegno.web.snapshot import ClusterPicture, RunPicture

log = logging.getLogger("web.actions")

PASSED_ON = ("PATH", "SLURM_CONF", "LC_ALL", "DALSEGNO_MARK", "DALSEGNO_CONTROLLER")
CONTROLLER_S = 5.0


class ActionRunner:
    """The object that carries out actions. The caller must first check with `check_allowed` that the visitor may do
    them."""

    def __init__(
        self, folder: ClusterFolder, slurm: SlurmClient, target: Callable[[], Target], env: Mapping[str, str]
    ) -> None:
        self._folder, self._slurm, self._target, self._env = folder, slurm, target, env

    def do(self, action: WebAction, visitor: Visitor, snapshot: ClusterPicture) -> str:
        """Carry out an action and return a sentence about it. If the action fails, record the failure, then raise the
        error."""
        who = f"{visitor.user} in the web page"
        try:
            text = self._carry_out(action, visitor, snapshot, who)
        except DalsegnoError as error:
            self._record(action, f"{_phrase(action)} by {who} failed: {error.what}", EventStage.FAILED)
            raise
        if action.kind not in (ActionKind.PAUSE, ActionKind.RESUME):  # the controller records these itself
            self._record(action, f"{_phrase(action)} by {who}{f': {action.reason}' if action.reason else ''}")
        log.info("%s: %s", who, text)
        return text

    def _carry_out(self, action: WebAction, visitor: Visitor, snapshot: ClusterPicture, who: str) -> str:
        if action.kind is ActionKind.DRAIN:
            self._slurm.drain(action.node, f"{action.reason or 'drained'} (by {who})")
            return f"{action.node} is drained"
        if action.kind is ActionKind.UNDRAIN:
            self._slurm.resume(action.node)
            return f"{action.node} is back in service"
        if action.kind is ActionKind.CANCEL:
            return self._cancel(action, visitor, snapshot)
        if action.kind is ActionKind.INJECT:
            return self._inject(action)
        answer = ask(self._folder.controller_socket, {"automation": action.kind.value, "by": who}, CONTROLLER_S)
        if "error" in answer:
            raise DalsegnoError(str(answer["error"]), hint=str(answer.get("hint", "")))
        return f"automatic recovery is {answer['automation']}"

    def _cancel(self, action: WebAction, visitor: Visitor, snapshot: ClusterPicture) -> str:
        view = snapshot.run(action.run)
        if view is not None:
            cancel_run(view, self._env)
            return f"run {view.run} is being cancelled"
        job = self._slurm.job(action.job)  # queried again, because the snapshot may be old, and Slurm reuses job ids
        if not visitor.may_cancel(job.uid):
            raise ActionRefused("you may cancel only your own runs and jobs")
        self._slurm.cancel(job.id)
        return f"job {job.label} is cancelled"

    def _inject(self, action: WebAction) -> str:
        from dalsegno.inject.faults import FaultOptions, check_options, find_fault

        target = self._target()
        if not isinstance(target, CanInject):
            raise ActionRefused("faults cannot be injected into the nodes of this cluster")
        fault = find_fault(action.fault)
        # The form sends a code even if the chosen fault has none, because the form only hides the field.
        options = FaultOptions(code=action.code if "code" in fault.options else None)
        check_options(fault, options)
        target.inject(fault, action.node, options)
        return f"{fault.name} was injected into {action.node}"

    def _record(self, action: WebAction, text: str, stage: EventStage = EventStage.DONE) -> None:
        from dalsegno.recovery.journal.store import Journal

        journal = Journal(self._folder.journal)
        try:
            journal.record_request(action.node, text, time.time(), stage, (action.job,) if action.job else ())
        finally:
            journal.close()


def _phrase(action: WebAction) -> str:
    """Return the action as the start of a sentence in the journal."""
    return {
        ActionKind.DRAIN: "drained",
        ActionKind.UNDRAIN: "returned to service",
        ActionKind.CANCEL: f"run {action.run} cancelled" if action.run else f"job {action.job} cancelled",
        ActionKind.PAUSE: "automatic recovery paused",
        ActionKind.RESUME: "automatic recovery resumed",
        ActionKind.INJECT: f"fault {action.fault} injected",
    }[action.kind]


def cancel_run(view: RunPicture, env: Mapping[str, str]) -> None:
    """Start `dalsegno cancel` as the owner of the run, so that root writes nothing into a user's folder."""
    try:
        person = pwd.getpwuid(view.uid)
    except KeyError:
        hint = "cancel its job with `scancel`"
        raise DalsegnoError(f"no user with uid {view.uid} on the head node", hint=hint) from None
    identity = None
    if view.uid != os.geteuid():
        groups = tuple(os.getgrouplist(person.pw_name, person.pw_gid))
        identity = Identity(view.uid, person.pw_gid, groups)
    own = {name: env[name] for name in PASSED_ON if name in env}
    own |= {"HOME": person.pw_dir, "USER": person.pw_name, "LOGNAME": person.pw_name}
    own["DALSEGNO_RUNS"] = str(Path(view.folder).parent)
    child = start([*own_argv(), "cancel", view.run], own, identity=identity, output=Path(os.devnull))
    threading.Thread(target=_reap, args=(child,), name="cancel", daemon=True).start()


def _reap(child: Child) -> None:
    if child.popen:
        child.popen.wait()
    child.close()
