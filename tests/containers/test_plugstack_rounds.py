"""Who is mended when: on hosts that share one plugstack.conf, and have their plugins on disks of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import pytest

from dalsegno.containers.plugstack.compiling import Parcel
from dalsegno.containers.plugstack.facts import HostFacts, Kind, StackLine
from dalsegno.containers.plugstack.mending import steps
from dalsegno.containers.plugstack.repairs import Repair, decide_repairs
from dalsegno.containers.plugstack.rounds import mend_in_rounds

STACK = "/shared/plugstack.conf"
BROKEN = "required /nope/x.so"


@dataclass
class Cluster:
    """Hosts whose srun gives up at the first required plugin that is not there, as Slurm's does."""

    lines: list[str]
    closed: Collection[str] = ()  # hosts where nobody may write
    loads: bool = True  # our plugin, where it is
    configless: Collection[str] = ()
    plugins: dict[str, set[str]] = field(default_factory=lambda: {"head": set(), "n1": set()})
    did: list[str] = field(default_factory=list)

    def ask(self) -> list[HostFacts]:
        return [self._answer(name) for name in self.plugins]

    def _answer(self, name: str) -> HostFacts:
        lines = tuple(StackLine(STACK, text) for text in self.lines)
        facts = HostFacts(
            name, name == "head", slurm="23.11.4", conf="/shared/slurm.conf", stack=STACK, files=(STACK,), lines=lines,
            plugins=tuple(self.plugins[name]),
        )  # fmt: skip
        if name in self.configless:
            return replace(facts, conf="/run/slurm/conf/slurm.conf", lines=())
        if away := [line.plugin for line in lines if not facts.is_there(line.plugin)]:
            return replace(facts, errors=(f"srun: error: spank: dlopen({away[0]}): cannot open shared object file",))
        return replace(facts, knows=frozenset({"srun", "sbatch"} if facts.registered and self.loads else ()))

    def decide(self, hosts: Sequence[HostFacts]) -> tuple[list[Repair], bool]:
        return decide_repairs(hosts, False, "b1")

    def mend(self, hosts: Sequence[HostFacts], repairs: Sequence[Repair]) -> list[Repair]:
        done = [each for each in repairs if each.host not in self.closed]
        for each in done:
            self._do(each)
        return done

    def _do(self, repair: Repair) -> None:
        self.did.append(f"{repair.host}: {'installs' if repair.install else 'drops'}")
        if repair.install:
            self.plugins[repair.host].add(f"{repair.install}/{Kind.OURS.value}")
        dropped = [line.text for line in repair.drop]
        self.lines = [*(line for line in self.lines if line not in dropped), *([repair.add] if repair.add else [])]

    def hand_out(self) -> None:
        self.did.append("hands out")

    def leave_nodes(self, unmended: Sequence[HostFacts], vain: bool) -> None:
        self.did.append(f"{','.join(host.host for host in unmended)} is {'in vain' if vain else 'as it was'}")


def test_what_shows_only_when_a_line_is_gone_is_done_where_jobs_are_handed_in_before_any_node():
    cluster = Cluster([BROKEN])
    mended = mend_in_rounds(cluster, cluster.ask())
    assert cluster.did == ["head: drops", "head: installs", "n1: installs"]
    assert [(each.host, bool(each.install)) for each in mended] == [("head", False), ("head", True), ("n1", True)]
    assert all("srun" in host.knows for host in cluster.ask())
    assert mend_in_rounds(cluster, cluster.ask()) == []


def test_no_node_is_touched_where_it_did_not_help_or_could_not_be_done():
    cluster = Cluster([BROKEN], loads=False)
    mend_in_rounds(cluster, cluster.ask())
    assert cluster.did == ["head: drops", "head: installs", "head is in vain"] and not cluster.plugins["n1"]
    cluster = Cluster([BROKEN], closed=("head",))
    assert mend_in_rounds(cluster, cluster.ask()) == [] and cluster.did == ["head is as it was"]
    assert cluster.lines == [BROKEN]


def test_a_node_that_cannot_be_mended_leaves_what_was_done():
    cluster = Cluster([], closed=("n1",))
    assert [each.host for each in mend_in_rounds(cluster, cluster.ask())] == ["head"]
    assert cluster.did == ["head: installs"]


def test_files_are_handed_out_after_each_change_of_them_and_once_where_they_were_well():
    cluster = Cluster([BROKEN], configless=("n1",))
    mend_in_rounds(cluster, cluster.ask())
    assert cluster.did == ["head: drops", "hands out", "head: installs", "hands out"]
    cluster.did.clear()
    assert mend_in_rounds(cluster, cluster.ask()) == [] and cluster.did == ["hands out"]


def test_a_line_for_our_plugin_is_never_added_without_its_files():
    repair = Repair("n1", STACK, f"required /b1/{Kind.OURS.value}", install="/b1")
    with pytest.raises(ValueError, match="n1 shall get a plugin that was not compiled"):
        list(steps(repair, None))
    assert [stdin for _, stdin in steps(repair, Parcel("data", "sum"))] == ["data", None]
