"""Run ParallelCluster's own program `pcluster` as a subprocess: find it, call it, parse its answers.

`pcluster` is never imported, because it pins old versions of many packages. Each cluster always uses the same version
of it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.printable import one_line
from dalsegno.system.processes import Completed, Runner
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal, explain, refusal_in_text, repeat_throttled
from dalsegno.targets.cloud.progress import OperationReport, OperationState, ResourceEvent
from dalsegno.targets.cloud.stacks import last_operation, parse_event

PACKAGE = "aws-parallelcluster"
TIMEOUT_S = 300.0
LOGS_S = 900.0


class PclusterStatus(Enum):
    """The status of a cluster, which `pcluster` calls clusterStatus."""

    CREATE_IN_PROGRESS = "CREATE_IN_PROGRESS"
    CREATE_FAILED = "CREATE_FAILED"
    CREATE_COMPLETE = "CREATE_COMPLETE"
    UPDATE_IN_PROGRESS = "UPDATE_IN_PROGRESS"
    UPDATE_FAILED = "UPDATE_FAILED"
    UPDATE_COMPLETE = "UPDATE_COMPLETE"
    DELETE_IN_PROGRESS = "DELETE_IN_PROGRESS"
    DELETE_FAILED = "DELETE_FAILED"
    DELETE_COMPLETE = "DELETE_COMPLETE"
    UNKNOWN = "UNKNOWN"

    @property
    def operation(self) -> OperationState:
        if self.value.endswith("IN_PROGRESS"):
            return OperationState.RUNNING
        if self.value.endswith("FAILED") or self is PclusterStatus.UNKNOWN:  # an unknown status is not a success
            return OperationState.FAILED
        return OperationState.GONE if self is PclusterStatus.DELETE_COMPLETE else OperationState.DONE


class FleetStatus(Enum):
    """The status of the compute fleet, that is, of all compute nodes together."""

    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    PROTECTED = "PROTECTED"  # ten nodes in a row failed to boot
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class PclusterView:
    """One cluster, as `pcluster describe-cluster` reports it."""

    name: str
    status: PclusterStatus
    version: str = ""
    fleet: FleetStatus = FleetStatus.UNKNOWN
    head_instance: str = ""
    head_address: str = ""  # the public address, or the private one if there is no public one
    failures: tuple[str, ...] = ()
    login_addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class PclusterInstance:
    """One machine of a cluster."""

    instance: str
    instance_type: str
    queue: str  # name of the queue; "" for head and login nodes
    running: bool
    address: str = ""


def find_pcluster(version: str, runner: Runner, env: Mapping[str, str]) -> list[str]:
    """Return the command that starts `pcluster` in this version: the program in PATH if it has this version, or else
    uvx or pipx."""
    path = env.get("PATH")
    found = ""
    if shutil.which("pcluster", path=path):
        found = _version(runner.run(["pcluster", "version"], env=env, timeout_s=TIMEOUT_S))
        if found == version:
            return ["pcluster"]
    wanted = f"{PACKAGE}=={version}"
    if shutil.which("uvx", path=path):
        return ["uvx", "--from", wanted, "pcluster"]
    if shutil.which("pipx", path=path):
        return ["pipx", "run", "--spec", wanted, "pcluster"]
    seen = f"; the one on PATH is {found}" if found else ""
    raise TargetError(
        f"ParallelCluster {version} is not installed{seen}",
        hint=f'install it in an environment of its own, `pipx install "{wanted}"`, or install uv; it needs Node.js too',
    )


def _version(done: Completed) -> str:
    answer = _parse(done.stdout)
    return str(answer.get("version", "")) if done.exit_code == 0 else ""


class Pcluster:
    """Runs `pcluster` for one cluster in one region."""

    def __init__(
        self,
        argv: Sequence[str],
        runner: Runner,
        env: Mapping[str, str],
        name: str,
        region: str,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.argv, self.name, self.region = tuple(argv), name, region
        self._runner, self._env, self._pause = runner, env, pause

    def describe(self) -> PclusterView | None:
        """Return the description of the cluster; None if ParallelCluster has no cluster with this name."""
        try:
            return parse_cluster(self._ask("describe-cluster"))
        except CloudError as error:
            if error.refusal is CloudRefusal.NOT_THERE:
                return None
            raise

    def instances(self) -> list[PclusterInstance]:
        """Return all machines, from all pages of the answer."""
        found: list[PclusterInstance] = []
        token = ""
        while True:
            answer = self._ask("describe-cluster-instances", *(["--next-token", token] if token else []))
            found += [parse_instance(each) for each in _list(answer, "instances")]
            token = str(answer.get("nextToken") or "")
            if not token:
                return found

    def events(self) -> tuple[ResourceEvent, ...]:
        """Return the events of the cluster's stack, oldest first; none if the stack does not exist.

        An error of unknown cause ends the list early.
        """
        found: list[ResourceEvent] = []
        token = ""
        while True:
            try:
                answer = self._ask("get-cluster-stack-events", *(["--next-token", token] if token else []))
            except CloudError as error:
                if error.refusal in (CloudRefusal.NOT_THERE, CloudRefusal.UNKNOWN):
                    return tuple(reversed(found))
                raise
            found += [parse_event(each) for each in _list(answer, "events")]
            token = str(answer.get("nextToken") or "")
            if not token:
                return tuple(reversed(found))

    def report(self) -> OperationReport:
        """Return the progress of the last operation on the cluster."""
        view = self.describe()
        if view is None:
            return OperationReport(OperationState.GONE)
        events = last_operation(self.events(), self.name)
        return OperationReport(view.status.operation, events, "; ".join(view.failures))

    def create(self, config: Path) -> None:
        """Start the creation. If it fails, its resources are kept, so that the logs can be read."""
        self._ask("create-cluster", "--cluster-configuration", str(config), "--rollback-on-failure", "false")

    def update(self, config: Path) -> None:
        self._ask("update-cluster", "--cluster-configuration", str(config))

    def delete(self) -> bool:
        """Start the deletion; return False if there is no cluster."""
        try:
            self._ask("delete-cluster")
        except CloudError as error:
            if error.refusal is CloudRefusal.NOT_THERE:
                return False
            raise
        return True

    def start_fleet(self) -> None:
        self._ask("update-compute-fleet", "--status", "START_REQUESTED")

    def export_logs(self, bucket: str, file: Path) -> bool:
        """Write the logs of all machines to a file. Return False, without an error, if they cannot be exported."""
        try:
            self._ask("export-cluster-logs", "--bucket", bucket, "--output-file", str(file), timeout_s=LOGS_S)
        except TargetError:
            return False
        return file.exists()

    def command(self, name: str, *words: str) -> list[str]:
        return [*self.argv, name, "--cluster-name", self.name, "--region", self.region, *words]

    def _ask(self, name: str, *words: str, timeout_s: float = TIMEOUT_S) -> Mapping[str, Any]:
        """Run one command and return its answer. If AWS throttles the request, repeat it."""

        def send() -> Mapping[str, Any]:
            done = self._runner.run(self.command(name, *words), env=self._env, timeout_s=timeout_s)
            answer = _parse(done.stdout)
            if done.exit_code == 0:
                return answer
            raise refusal(f"pcluster {name}", answer, done.stderr or done.stdout)

        return repeat_throttled(send, self._pause)


def _parse(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _inner(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = answer.get(name)
    return found if isinstance(found, dict) else {}


def _list(answer: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = answer.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


# Messages of ParallelCluster and boto3 for causes that have no error code.
_SENTENCES = {
    "does not exist": CloudRefusal.NOT_THERE,
    "Unable to locate credentials": CloudRefusal.NO_CREDENTIALS,
    "Partial credentials": CloudRefusal.NO_CREDENTIALS,
    "could not be found": CloudRefusal.NO_CREDENTIALS,  # the message is "The config profile (x) could not be found"
    "Token has expired": CloudRefusal.EXPIRED,
    "security token included in the request is expired": CloudRefusal.EXPIRED,
    "security token included in the request is invalid": CloudRefusal.WRONG_CREDENTIALS,
    "Rate exceeded": CloudRefusal.THROTTLED,
    "limit exceeded": CloudRefusal.THROTTLED,
    "Could not connect to the endpoint": CloudRefusal.UNREACHABLE,
    "not authorized to perform": CloudRefusal.DENIED,
}


def refusal(doing: str, answer: Mapping[str, Any], output: str) -> CloudError:
    """Return the error for a failed command, with up to ten of the faults that the validators found."""
    message = str(answer.get("message") or output.strip()[-2000:])
    faults = _list(answer, "configurationValidationErrors") + _list(answer, "updateValidationErrors")
    if faults:
        lines = [f"\n  {one_line(str(each.get('message', '')))}" for each in faults[:10]]
        return CloudError(CloudRefusal.INVALID, f"{doing}: ParallelCluster refused the configuration:{''.join(lines)}")
    by_sentence = next((cause for sentence, cause in _SENTENCES.items() if sentence in message), None)
    return explain(by_sentence or refusal_in_text(message), doing, message)


def parse_cluster(answer: Mapping[str, Any]) -> PclusterView:
    """Parse the answer of describe-cluster, of create-cluster, or of delete-cluster."""
    cluster = _inner(answer, "cluster") or answer
    head = _inner(cluster, "headNode")
    failures = [
        one_line(f"{each.get('failureCode', '')}: {each.get('failureReason', '')}")
        for each in _list(cluster, "failures")
    ]
    return PclusterView(
        str(cluster.get("clusterName", "")),
        _status(PclusterStatus, cluster.get("clusterStatus"), PclusterStatus.UNKNOWN),
        str(cluster.get("version", "")),
        _status(FleetStatus, cluster.get("computeFleetStatus"), FleetStatus.UNKNOWN),
        str(head.get("instanceId", "")),
        str(head.get("publicIpAddress") or head.get("privateIpAddress") or ""),
        tuple(failures),
        tuple(str(each["address"]) for each in _list(cluster, "loginNodes") if each.get("address")),
    )


def _status(kind: Any, value: object, unknown: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        return unknown


def parse_instance(each: Mapping[str, Any]) -> PclusterInstance:
    return PclusterInstance(
        str(each.get("instanceId", "")),
        str(each.get("instanceType", "")),
        str(each.get("queueName", "") or ""),
        each.get("state") == "running",
        str(each.get("privateIpAddress", "") or ""),
    )
