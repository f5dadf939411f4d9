"""`dalsegno health`: check this machine or a node of a cluster."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import DalsegnoError, NotThere, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dalsegno.health.check import Check
    from dalsegno.health.messages import Finding
    from dalsegno.health.settings import Settings

CONTEXTS = ("continuous", "idle", "prolog", "validation")
SLURM_S = 30.0
PROLOG_S = 8.0  # time limit for all checks; the prolog ends the whole program after 12 s


@click.command()
@cluster_option
@click.option(
    "--node", "-w", metavar="NODE", help="Check this node of the cluster instead of this machine (root only)."
)
@click.option(
    "--context",
    "-x",
    type=click.Choice(CONTEXTS),
    default="idle",
    show_default=True,
    help="Checks to run. continuous: on a busy node; idle: on an idle node; prolog: before a job; validation: before a "
    "node returns to service.",
)
@click.option("--line", is_flag=True, help="Print one line for other tools: HEALTH_CHECK_RESULT:…")
@click.option("--reason", is_flag=True, help="Print the reason to drain the node; print nothing if there is none.")
@click.option("--drain", is_flag=True, help="If a check failed, drain the node in Slurm, unless it is drained already.")
@click.option(
    "--repaired",
    "after_reset",
    is_flag=True,
    help="Record that the GPUs were reset: ignore earlier errors in the kernel log.",
)
@click.option("--mended", "formerly", is_flag=True, hidden=True, help="The former name of `--repaired`.")
@click.option("--list", "list_", is_flag=True, help="List the checks with their thresholds.")
@json_option
def command(
    name: str | None,
    node: str | None,
    context: str,
    line: bool,
    reason: bool,
    drain: bool,
    after_reset: bool,
    formerly: bool,
    list_: bool,
    json_: bool,
) -> None:
    """Check this machine, or a node of a cluster: GPUs, fabric, host, services.

    Exits 0 if no check failed, 1 if one did. Warnings and unknown results are not failures.

    \b
    dalsegno health
    dalsegno health --node gpu-2 --context validation
    """
    forms = {"--line": line, "--reason": reason, "--drain": drain, "--json": json_}
    if sum(forms.values()) > 1:
        raise UsageError("`--line`, `--reason`, `--drain` and `--json` exclude each other", hint="choose one of them")
    if node is not None or name is not None:
        given = {**forms, "--repaired": after_reset or formerly, "--list": list_}
        _on_node(name, node, context, [option for option, on in given.items() if on])
    elif after_reset or formerly:
        _note_reset()
    elif list_:
        _list(json_)
    else:
        _check_here(context, next((option for option, on in forms.items() if on), ""))


def _on_node(name: str | None, node: str | None, context: str, options: list[str]) -> None:
    """Replace this process with `dalsegno health` on the node, with the same options."""
    from dalsegno.cluster import find_place, open_cluster
    from dalsegno.system.execute import become

    if node is None:
        raise UsageError("no node given", hint="add `--node NODE`; `dalsegno status` lists the nodes")
    target = open_cluster(find_place(name))
    try:
        words = ["dalsegno", "health", "-x", context, *options]
        entry = target.on_node(node, words, dict(os.environ), os.getcwd())
    except NotThere as error:
        raise UsageError(error.what, hint=error.hint) from error
    become(entry.argv, entry.env)


def _note_reset() -> None:
    from dalsegno.health.xids import record_repair

    record_repair(time.time(), os.geteuid())
    out.talk("errors in the kernel log until now are ignored")


def _check_here(context: str, form: str) -> None:
    from dalsegno.health.checks import CHECKS
    from dalsegno.health.local_machine import env_here
    from dalsegno.health.result import Verdict
    from dalsegno.health.runner import confirm, drain_reason, result_line

    env = env_here()
    node, findings = _run_checks(context, env)
    if form == "--drain" and context == "continuous":
        findings = confirm(CHECKS, findings, lambda checks: _run_checks(context, env, checks)[1], time.sleep)
    if form in ("--line", "--drain"):
        out.data(result_line(node, findings))
    elif form == "--reason":
        if why := drain_reason(findings):
            out.data(why)
    elif form == "--json":
        out.as_json({"node": node, "context": context, "line": result_line(node, findings), **_as_json(findings)})
    else:
        _show(node, findings)
    if form == "--drain":
        _drain(node, drain_reason(findings), env)
    if any(each.result.verdict is Verdict.FAILED for each in findings):
        raise click.exceptions.Exit(1)


def _drain(node: str, why: str, env: Mapping[str, str]) -> None:
    """Drain the node with the reason `why`, unless `why` is empty. A node that is already drained keeps its reason."""
    from dalsegno.slurm.client import SlurmClient
    from dalsegno.system.processes import LocalRunner

    slurm = SlurmClient(LocalRunner(), env, timeout_s=SLURM_S)
    if why and not slurm.node(node).draining:
        slurm.drain(node, why)


def _run_checks(
    context: str, env: Mapping[str, str], checks: Sequence[Check] | None = None
) -> tuple[str, list[Finding]]:
    """Run the checks of this context, or those of `checks`, and return the node's name and the findings. In a prolog,
    ignore `checks`, and reuse recent passes of checks that permit it."""
    from dalsegno.health.cache import cache_file, keep, read_kept
    from dalsegno.health.check import Context
    from dalsegno.health.checks import CHECKS
    from dalsegno.health.local_machine import machine_here, settings_here
    from dalsegno.health.readers.nvml_process import read_nvml_in_process
    from dalsegno.health.runner import examine

    machine, settings = machine_here(env, gpus=read_nvml_in_process), _settings(lambda: settings_here(env))
    node = machine.expected.node
    if context != Context.PROLOG.value:
        return node, examine(CHECKS if checks is None else checks, Context(context), machine, settings)
    kept = cache_file(node, env)
    lasting = {check.name for check in CHECKS if check.lasts}
    known = {check: each for check, each in read_kept(kept, machine.now()).items() if check in lasting}
    machine.until = time.monotonic() + PROLOG_S
    findings = examine(CHECKS, Context.PROLOG, machine, settings, within_s=PROLOG_S, known=known)
    keep(kept, node, findings)
    return node, findings


def _settings(read: Any) -> Settings:
    """Return the settings. If the file is damaged, warn and use the defaults: nodes must not fail because of it."""
    try:
        settings: Settings = read()
    except DalsegnoError as error:
        out.warn(f"{error.what}; the checks use their default thresholds")
        return {}
    return settings


def _show(node: str, findings: list[Finding]) -> None:
    from dalsegno.health.runner import label, result_line

    rows = [[label(each), each.result.verdict.value, _remedy(each), each.result.text] for each in findings]
    out.table(["CHECK", "VERDICT", "REMEDY", "FOUND"], rows)
    out.data("")
    out.data(result_line(node, findings))


def _remedy(finding: Finding) -> str:
    from dalsegno.health.result import Remedy

    return "-" if finding.result.remedy is Remedy.NONE else finding.result.remedy.value


def _as_json(findings: list[Finding]) -> dict[str, object]:
    from dalsegno.health.messages import NodeReport, report_message

    return {"findings": report_message(NodeReport("", "", tuple(findings)))["findings"]}


def _list(json_: bool) -> None:
    from dalsegno.health.checks import CHECKS
    from dalsegno.health.local_machine import settings_here

    settings = _settings(settings_here)
    rows = [_describe_check(check, settings) for check in CHECKS]
    if json_:
        out.as_json(rows)
        return
    table = [
        [row["name"], (row["on"] and f"{row['every_s']:g} s") or "off", _thresholds(row["thresholds"]), row["about"]]
        for row in rows
    ]
    out.table(["CHECK", "EVERY", "THRESHOLDS", "WHAT"], table)


def _describe_check(check: Check, settings: Settings) -> dict[str, Any]:
    from dalsegno.health.settings import every_s, is_enabled, thresholds

    return {
        "name": check.name,
        "about": check.about,
        "on": is_enabled(check, settings),
        "every_s": every_s(check, settings),
        "contexts": sorted(context.value for context in check.contexts),
        "thresholds": thresholds(check, settings),
    }


def _thresholds(values: dict[str, float]) -> str:
    return " ".join(f"{name}={value:g}" for name, value in values.items()) or "-"
