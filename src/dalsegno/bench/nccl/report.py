"""Turn the text of a log into verdicts: find its tables and machines, judge them, and suggest what to check. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dalsegno.bench.nccl.debug import NcclDebug, NcclFinding, find_problems, read_debug, separate_tables
from dalsegno.bench.nccl.machines import (
    BenchMachines,
    LogHints,
    count_ranks,
    find_gpu_of_product,
    find_machines,
    name_test,
    read_hints,
)
from dalsegno.bench.nccl.parse import read_tables
from dalsegno.bench.nccl.table import NcclOutputUnreadable, NcclTable, NcclTest
from dalsegno.bench.nccl.verdict import HISTORY_LEAST, BenchLevel, BenchReason, BenchVerdict, find_plateau, judge
from dalsegno.hardware import Gpu, instances

GROWS_BYTES = 8 << 30  # bandwidth grows up to this size: 2 x p5.48xlarge reach 437 GB/s at 1 GiB, 479 at 8 GiB


@dataclass(frozen=True)
class MachineAsk:
    """The user's description of the machines and the test. A value of None is taken from the log."""

    instance: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    test: NcclTest | None = None


@dataclass(frozen=True)
class NcclReport:
    """One table of a file with its verdict, and the problems that the log shows."""

    source: str
    table: NcclTable
    verdict: BenchVerdict
    findings: tuple[NcclFinding, ...] = ()
    algorithm: str = ""  # the algorithm at the size of the plateau, if NCCL logged it

    def to_dict(self) -> dict[str, object]:
        """Return the report for `--json`."""
        return {
            "file": self.source, "line": self.table.line, **self.verdict.to_dict(), "algorithm": self.algorithm or None,
            "findings": [{**asdict(each), "problem": each.problem.value} for each in self.findings],
            "hints": self.hints(), "error": self.table.error,
            "settings": asdict(self.table.settings) if self.table.settings else None,
            "devices": [asdict(each) for each in self.table.devices], "rows": [asdict(row) for row in self.table.rows],
        }  # fmt: skip

    def hints(self) -> list[str]:
        """Return what to do next."""
        hints = [f"{each.text}: {each.hint}" if each.hint else each.text for each in self.findings]
        reason, level = self.verdict.reason, self.verdict.level
        if reason is BenchReason.NO_MACHINE:
            hints.append(_ask_for_machine(self.verdict.machines, self.verdict.machines.gpu))
            if self.table.devices and self.verdict.machines.gpu is None:
                hints.append("or compare with earlier results of this cluster: `--history FILE`, at least five")
        elif reason is BenchReason.OTHER_GPU:
            machines = self.verdict.machines
            hints.append(_ask_for_machine(machines, find_gpu_of_product(machines.other_product)))
        elif reason is BenchReason.WRONG_RANKS and not self.findings:
            machines = self.verdict.machines
            hints.append(
                f"check --nodes and --gpus-per-node; if {machines.ranks} ranks were meant, start the test with "
                f"{machines.gpus_per_node} on each of {machines.nodes} nodes"
            )
        elif reason is BenchReason.NO_GPUS:
            hints.append(
                f"{HISTORY_LEAST} earlier results of the same size on this cluster give a figure to compare with"
            )
        elif reason is BenchReason.NO_TEST:
            hints.append("name the test: `--test all_gather`")
        elif reason is BenchReason.TOO_SMALL:
            hints.append("run the test with larger messages: `-b 1G -e 16G -f 2`")
        elif reason is BenchReason.NO_EXPECTATION:
            hints.append("compare with earlier results of this cluster: `--history FILE`, at least five")
        elif reason is BenchReason.WRONG_DATA:
            hints.append("a GPU, a link or memory corrupts data: run the test on each node alone to find the node")
        elif reason is BenchReason.ERROR and not self.findings:
            hints.append(
                "check the GPUs of the node that the error names: `srun -w NODE nvidia-smi`; for an error of NCCL, run "
                "the test again with NCCL_DEBUG=INFO"
            )
        elif level is BenchLevel.IMPOSSIBLE:
            hints.append("check --instance, --nodes and --gpus-per-node: the machines are not the assumed ones")
        elif level in (BenchLevel.DEGRADED, BenchLevel.FAIL) and not self.findings:
            hints.append(
                "run it again with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH,TUNING, and read that log; "
                "`dalsegno bench pairs` finds a slow node"
            )
        if reason is BenchReason.BELOW and level is BenchLevel.DEGRADED and self.verdict.size < GROWS_BYTES:
            hints.append("the bandwidth may still grow with the message: measure up to `-e 16G` too")
        return hints


def read_reports(
    source: str, text: str, ask: MachineAsk = MachineAsk(), history: Sequence[NcclTable] = ()
) -> list[NcclReport]:
    """Return a report per table. If several processes ran the same test separately, return one report for all."""
    hints = read_hints(text)
    tables = [name_test(table, hints, ask.test) for table in read_tables(text)]
    if not tables:
        raise NcclOutputUnreadable(
            f"no nccl-tests table in `{source}`",
            hint="give the output of a program such as all_reduce_perf, the file that its option -J wrote, or a report "
            "of `dalsegno bench all_reduce --json`",
        )
    debug = read_debug(text)
    separate = separate_tables(tables)
    if separate > 1:
        tables = [next((table for table in tables if table.rows), tables[0])]
    return [_report(source, hints, table, debug, ask, history, separate) for table in tables]


def _report(
    source: str, hints: LogHints, table: NcclTable, debug: NcclDebug, ask: MachineAsk, history: Sequence[NcclTable],
    separate: int,
) -> NcclReport:  # fmt: skip
    machines = find_machines(table, hints, ask.instance, ask.nodes, ask.gpus_per_node, debug.size)
    verdict = judge(table, machines, earlier_results(history, table), separate)
    findings = find_problems(debug, machines, separate) if _needs_causes(verdict) else ()
    return NcclReport(source, table, verdict, findings, debug.algorithm(verdict.size))


def _needs_causes(verdict: BenchVerdict) -> bool:
    """Return whether to look for causes. If the bandwidth is good, it does not matter which features NCCL leaves
    unused."""
    return verdict.level is not BenchLevel.PASS


def earlier_results(history: Sequence[NcclTable], table: NcclTable) -> list[float]:
    """Return the bandwidths of earlier tables of the same test and number of ranks, at the size of the plateau."""
    ranks, plateau = count_ranks(table), find_plateau(table)
    same = [each for each in map(name_test, history) if each.test is table.test and count_ranks(each) == ranks]
    found = ([row.busbw for row in each.rows if plateau and row.size == plateau.size] for each in same)
    return [max(values) for values in found if values]


def _ask_for_machine(machines: BenchMachines, gpu: Gpu | None) -> str:
    having = [
        each.name
        for each in instances().values()
        if gpu and each.gpu == gpu.name and each.gpus >= machines.gpus_per_node
    ]
    if not having:
        return "name the machines: `--instance TYPE`, such as p5.48xlarge, with --nodes and --gpus-per-node if needed"
    return f"name the machines: `--instance TYPE`. With these GPUs there are {', '.join(having)}"
