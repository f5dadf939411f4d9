"""`dalsegno certify`: measure the whole cluster, and write an HTML and a JSON report with a verdict."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import stoppable
from dalsegno.cli.measure.certify_parts import CertifyAsk, CertifyStage, measure_part, open_stage, prefixed
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import UsageError

if TYPE_CHECKING:
    from dalsegno.bench.certificate.certificate import Certificate, CertificateChange, CertifiedPart

PARTS = ("health", "versions", "storage", "pairs", "collectives", "gemm", "container", "power-cut")
_MOST_BYTES = 64 << 20  # maximum size of an older certificate

_part_names = click.Choice(PARTS)


@click.command()
@cluster_option
@click.option("--quick", is_flag=True, help="Measure with small sizes: a minute or two instead of many.")
@click.option("--only", multiple=True, type=_part_names, help="Measure only this part; may be repeated.")
@click.option("--skip", multiple=True, type=_part_names, help="Leave this part out; may be repeated.")
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Nodes to measure. Default: all that are idle.")
@click.option("--partition", metavar="NAME", help="Partition of the nodes. Default: the cluster's.")
@click.option("--container-image", metavar="IMAGE", help="Image for the part `container`.")
@click.option("--power-cut", is_flag=True, help="Cut the power of a node during a small test run. Asks first.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask before the power cut.")
@click.option(
    "--output", type=click.Path(file_okay=False), default="certificate", show_default=True, metavar="DIR",
    help="Folder for certificate.html and certificate.json.",
)  # fmt: skip
@click.option("--against", metavar="OLD.json", help="Show what got worse since this certificate.")
@json_option
def command(
    name: str | None, quick: bool, only: tuple[str, ...], skip: tuple[str, ...], nodes: int | None,
    partition: str | None, container_image: str | None, power_cut: bool, yes: bool, output: str, against: str | None,
    json_: bool,
) -> int:  # fmt: skip
    """Measure the whole cluster, and write an HTML and a JSON report with a verdict.

    Each part runs the command that the report names, on idle nodes. A part that cannot be run is reported as not
    measured, and the verdict is then not PASS. It needs no GPUs; the report says what was simulated.

    \b
    Exit code: 0 PASS, 1 FAIL or an error, 3 DEGRADED, 5 no verdict.

    \b
    dalsegno certify --quick
    dalsegno certify --against certificate-march/certificate.json
    """
    from dalsegno.bench.certificate.certificate import CertifyPart, compare_certificates, comparison_notes, skipped

    _check_parts(
        only, skip, {"container": ("--container-image", container_image), "power-cut": ("--power-cut", power_cut)}
    )
    older = _read_older(against) if against else None
    stage = open_stage(CertifyAsk(name, quick, nodes, partition, container_image, Path(output).absolute()))
    folder = _make_folder(stage.ask.output)
    if power_cut:
        _confirm_power_cut(stage, yes)
    parts = []
    with out.progress() as say, stoppable():
        for part in CertifyPart:
            if part.value in skip or (only and part.value not in only):
                parts.append(skipped(part, "left out with --skip or --only"))
            elif part is CertifyPart.CONTAINER and not container_image:
                parts.append(skipped(part, "not requested: name an image with --container-image"))
            elif part is CertifyPart.POWER_CUT and not power_cut:
                parts.append(skipped(part, "not requested: add --power-cut"))
            else:
                say(f"measuring {part.value}")
                parts.append(measure_part(part, stage, prefixed(say, part.value)))
    certificate = _certificate(stage, parts)
    changes = compare_certificates(older, certificate) if older else None
    notes = comparison_notes(older, certificate) if older else []
    _write(folder, certificate, changes, notes)
    if json_:
        compared = {} if changes is None else {"changes": _changes_as_json(changes), "notes": notes}
        out.as_json({**certificate.to_dict(), **compared})
    else:
        _show(certificate, changes, notes)
    out.talk(f"report: {folder / 'certificate.html'}")
    return certificate.level.exit_code


# Checks of the options


def _check_parts(only: Sequence[str], skip: Sequence[str], on_request: Mapping[str, tuple[str, object]]) -> None:
    """Raise an error if `--only`, `--skip` and the options that request a part contradict each other."""
    if both := [name for name in only if name in skip]:
        raise UsageError(f"`--only {both[0]}` and `--skip {both[0]}` contradict each other", hint="remove one of them")
    for name, (option, given) in on_request.items():
        left_out = f"--skip {name}" if name in skip else f"--only {only[0]}" if only and name not in only else ""
        if given and left_out:
            raise UsageError(
                f"`{left_out}` leaves out the part that `{option}` requests",
                hint=f"remove `{option}`, or "
                + (f"add `--only {name}`" if name not in skip else f"remove `{left_out}`"),
            )
        if name in only and not given:
            raise UsageError(f"`--only {name}` needs `{option}`", hint=f"add `{option}`")


def _read_older(file: str) -> Certificate:
    from dalsegno.bench.certificate.certificate import read_certificate

    try:
        with open(file, "rb") as handle:
            content = handle.read(_MOST_BYTES)
    except OSError as error:
        raise UsageError(
            f"`{file}` cannot be read: {error.strerror}", where="--against", hint="give an earlier certificate.json"
        ) from error
    return read_certificate(content.decode("utf-8", errors="replace"), file)


def _make_folder(folder: Path) -> Path:
    """Create the folder of the report before anything is measured, so that no result is lost."""
    from dalsegno.system.execute import as_caller

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()

    try:
        as_caller(make)  # create the folder with the rights of the user who called sudo
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {folder}: {error.strerror}", where="--output",
            hint="choose another folder with `--output DIR`",
        ) from error  # fmt: skip
    return folder


def _confirm_power_cut(stage: CertifyStage, yes: bool) -> None:
    """Ask for confirmation, because one node loses power. A script must pass `--yes`."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("`--power-cut` asks for confirmation, and there is no terminal", hint="add `--yes`")
    click.confirm(f"cut the power of one node of {stage.name} during a small test run?", err=True, abort=True)


# Output of the certificate


def _certificate(stage: CertifyStage, parts: Sequence[CertifiedPart]) -> Certificate:
    from dalsegno import __version__
    from dalsegno.bench.certificate.certificate import Certificate, CertifyPart, PartOutcome

    simulated = list(stage.simulated)
    talked = (CertifyPart.PAIRS, CertifyPart.COLLECTIVES)
    if not stage.gpus and any(each.part in talked and each.outcome is PartOutcome.MEASURED for each in parts):
        simulated.append("pairs and collectives were measured without GPUs: gloo over TCP stands for NCCL")
    nodes = tuple(each.name for each in stage.known)
    return Certificate(
        stage.name, time.time(), nodes, tuple(parts), tuple(simulated), stage.ask.quick, __version__, stage.count
    )  # fmt: skip


def _write(
    folder: Path, certificate: Certificate, changes: Sequence[CertificateChange] | None, notes: Sequence[str]
) -> None:
    from dalsegno.bench.certificate.page import render_certificate
    from dalsegno.system.execute import as_caller
    from dalsegno.system.files import write_atomic

    files = {
        "certificate.json": certificate.to_json() + "\n",
        "certificate.html": render_certificate(certificate, changes, notes),
    }

    def write() -> None:
        for name, text in files.items():
            write_atomic(folder / name, text, mode=0o644)

    as_caller(write)


def _changes_as_json(changes: Sequence[CertificateChange]) -> list[dict[str, object]]:
    return [
        {"part": each.part.value, "what": each.name, "before": each.before, "now": each.now, "trend": each.trend.value,
         "share": each.share}
        for each in changes
    ]  # fmt: skip


def _show(certificate: Certificate, changes: Sequence[CertificateChange] | None, notes: Sequence[str]) -> None:
    from dalsegno.bench.certificate.certificate import CHANGE_HEAD, CertificateTrend, PartOutcome, change_rows

    rows = [[each.part.value, each.word, each.summary] for each in certificate.parts]
    out.table(["PART", "VERDICT", "SUMMARY"], rows)
    for each in certificate.parts:
        for finding in each.findings if each.outcome is PartOutcome.MEASURED else ():
            out.talk(f"{each.part.value}: {finding}")
    for line in certificate.simulated:
        out.talk(f"simulated: {line}")
    if changes is not None:
        out.data("")
        worse = [each for each in changes if each.trend is not CertificateTrend.BETTER]
        if worse:
            out.table(CHANGE_HEAD, change_rows(worse))
        else:
            out.data("nothing got worse")
        out.talk(f"better: {len(changes) - len(worse)} verdicts and figures, listed in the report")
        for note in notes:
            out.talk(note)
    out.data("")
    out.data(certificate.heading)
