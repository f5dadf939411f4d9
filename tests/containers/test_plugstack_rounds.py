"""Who is mended when: on hosts that share one plugstack.conf, and have their plugins on disks of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import pytest

from dalsegno.containers.plugstack.compiling import Parcel
from dalsegno.containers.plugstack.facts import HostFacts, Kind, StackLine
from dalsegno.containers.plugstack.imagined import imagine, imagine_handed_out
from dalsegno.containers.plugstack.mending import steps
from dalsegno.containers.plugstack.repairs import Repair, decide_repairs
from dalsegno.containers.plugstack.rounds import mend_in_rounds

STACK = "/shared/plugstack.conf"
FILES = "/var/lib/dalsegno/containers/b1"
BROKEN = "required /nope/x.so"


@dataclass
class Cluster:
    """Hosts whose srun gives up at the first required plugin that is not there, as Slurm's does."""

    lines: list[str]
    own: Collection[str] = ()  # hosts that have their plugstack.conf for themselves, and BROKEN in it
    closed: Collection[str] = ()  # hosts where nobody may write
    loads: bool = True  # our plugin, where it is
    configless: Collection[str] = ()
    silent: Collection[str] = ()
    plugins: dict[str, set[str]] = field(default_factory=lambda: {"head": set(), "n1": set()})
    did: list[str] = field(default_factory=list)
    owned: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owned = {name: [BROKEN] for name in self.own}

    def ask(self) -> list[HostFacts]:
        return [self._answer(name) for name in self.plugins]

    def _answer(self, name: str) -> HostFacts:
        if name in self.silent:
            return HostFacts(name, silent="ssh: refused")
        lines = tuple(StackLine(STACK, text) for text in self.owned.get(name, self.lines))
        facts = HostFacts(
            name, name == "head", slurm="23.11.4", conf="/shared/slurm.conf", stack=STACK, files=(STACK,), lines=lines,
            plugins=tuple(self.plugins[name]), place=name if name in self.own else "1",
            file_system="xfs" if name in ("head", *self.own) else "nfs",
        )  # fmt: skip
        if name in self.configless:
            return replace(facts, conf="/run/slurm/conf/slurm.conf", lines=())
        required = [line.plugin for line in lines if line.text.startswith("required")]
        if away := [plugin for plugin in required if not facts.is_there(plugin)]:
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
        what = {"files": repair.install, "drops": repair.drop, "adds": repair.add}
        self.did.append(f"{repair.host}: {' and '.join(word for word, done in what.items() if done)}")
        if repair.install:
            self.plugins[repair.host].add(repair.plugin)
        dropped = [line.text for line in repair.drop]
        lines = self.owned.get(repair.host, self.lines)
        lines[:] = [*(line for line in lines if line not in dropped), *([repair.add] if repair.add else [])]
        self.did += [f"{name} starts no job" for name in self.plugins if name not in self.silent and self._lacks(name)]

    def _lacks(self, name: str) -> bool:
        lines = [StackLine(STACK, text) for text in self.owned.get(name, self.lines)]
        return any(line.kind and line.plugin not in self.plugins[name] for line in lines)

    def hand_out(self) -> None:
        self.did.append("hands out")

    def hold_back(self, lacking: Sequence[HostFacts], plugin: str) -> None:
        self.did.append(f"{','.join(host.host for host in lacking)} lacks it")

    def leave_nodes(self, unmended: Sequence[HostFacts], vain: bool) -> None:
        self.did.append(f"{','.join(host.host for host in unmended)} is {'in vain' if vain else 'as it was'}")


@dataclass
class Imagined(Cluster):
    """One that is asked what it would answer."""

    hosts: list[HostFacts] = field(default_factory=list)

    def __init__(self, hosts: list[HostFacts]) -> None:
        super().__init__([])
        self.hosts = hosts

    def ask(self) -> list[HostFacts]:
        return self.hosts

    def mend(self, hosts: Sequence[HostFacts], repairs: Sequence[Repair]) -> list[Repair]:
        self.hosts = imagine(self.hosts, repairs)
        return list(repairs)

    def hand_out(self) -> None:
        self.hosts = imagine_handed_out(self.hosts)


def test_files_come_to_all_hosts_before_the_line_that_they_share():
    cluster = Cluster([])
    mended = mend_in_rounds(cluster, cluster.ask())
    assert cluster.did == ["head: files", "n1: files", "head: adds"]
    assert [each.host for each in mended] == ["head", "n1", "head"]
    assert all("srun" in host.knows for host in cluster.ask())
    assert mend_in_rounds(cluster, cluster.ask()) == []


def test_no_line_is_written_that_one_of_its_readers_has_no_files_for():
    cluster = Cluster([], closed=("n1",))
    assert [each.files() for each in mend_in_rounds(cluster, cluster.ask())] == [Repair("head", install=FILES)]
    assert cluster.did == ["head: files", "n1 lacks it"] and cluster.lines == []
    cluster.closed = ()
    mend_in_rounds(cluster, cluster.ask())
    assert all("srun" in host.knows for host in cluster.ask()) and "n1 starts no job" not in cluster.did


def test_a_host_that_was_away_gets_its_files_and_the_line_stays_as_it_is():
    cluster = Cluster([], silent=("n1",))
    mend_in_rounds(cluster, cluster.ask())
    assert cluster.did == ["head: files", "head: adds"]
    before, cluster.silent = list(cluster.lines), ()
    assert mend_in_rounds(cluster, cluster.ask()) == [Repair("n1", STACK, install=FILES).files()]
    assert cluster.lines == before and all("srun" in host.knows for host in cluster.ask())


def test_where_another_build_is_in_use_all_who_read_the_line_get_the_new_one_first():
    old = f"/old/{Kind.OURS.value}"
    cluster = Cluster([f"required {old}"], plugins={"head": {old}, "n1": {old}, "n2": set()})
    mend_in_rounds(cluster, cluster.ask())
    did = [each for each in cluster.did if each != "n2 starts no job"]  # nor did it before
    assert did == ["head: files", "n1: files", "n2: files", "head: drops and adds"]
    assert all("srun" in host.knows for host in cluster.ask())


def test_what_shows_only_when_a_line_is_gone_is_done_where_jobs_are_handed_in_before_any_node():
    cluster = Cluster([BROKEN], own=("n2",), plugins={"head": set(), "n1": set(), "n2": set()})
    mend_in_rounds(cluster, cluster.ask())
    assert cluster.did == [
        "head: drops", "head: files", "n1: files", "head: adds", "n2: drops", "n2: files", "n2: adds"
    ]  # fmt: skip
    assert all("srun" in host.knows for host in cluster.ask())
    assert mend_in_rounds(cluster, cluster.ask()) == []


def test_no_node_gets_a_line_where_it_did_not_help_or_could_not_be_done():
    cluster = Cluster([BROKEN], loads=False, own=("n2",), plugins={"head": set(), "n1": set(), "n2": set()})
    mend_in_rounds(cluster, cluster.ask())
    assert cluster.did == ["head: drops", "head: files", "n1: files", "head: adds", "head is in vain"]
    assert cluster.owned["n2"] == [BROKEN]
    cluster = Cluster([], closed=("head",))
    assert mend_in_rounds(cluster, cluster.ask()) == [] and cluster.did == ["head is as it was"]
    cluster = Cluster([BROKEN], closed=("head",))
    assert mend_in_rounds(cluster, cluster.ask()) == [] and cluster.did == ["head is as it was"]
    assert cluster.lines == [BROKEN]


def test_a_node_with_files_of_its_own_that_cannot_be_mended_keeps_none_of_the_others_from_it():
    cluster = Cluster([], own=("n1",), closed=("n1",))
    mend_in_rounds(cluster, cluster.ask())
    assert cluster.did == ["head: files", "head: adds"]


def test_files_are_handed_out_after_each_change_of_them_and_once_where_they_were_well():
    cluster = Cluster([BROKEN], configless=("n1",))
    mend_in_rounds(cluster, cluster.ask())
    assert cluster.did == ["head: drops", "hands out", "head: files", "n1: files", "head: adds", "hands out"]
    cluster.did.clear()
    assert mend_in_rounds(cluster, cluster.ask()) == [] and cluster.did == ["hands out"]


def test_nothing_is_handed_out_to_a_host_that_lacks_what_is_required():
    cluster = Cluster([f"required {FILES}/{Kind.OURS.value} squashfs=user"], configless=("n1",), closed=("n1",))
    cluster.plugins["head"].add(f"{FILES}/{Kind.OURS.value}")
    assert mend_in_rounds(cluster, cluster.ask()) == [] and cluster.did == ["n1 lacks it"]


@pytest.mark.parametrize("lines", [[], [BROKEN], [BROKEN, "required /nope/y.so", "optional /nope/z.so"]])
@pytest.mark.parametrize("more", [{}, {"configless": ("n1",)}, {"own": ("n1",)}])
def test_a_plan_is_all_that_is_done_then(lines: list[str], more: dict[str, Collection[str]]):
    cluster, imagined = Cluster(list(lines), **more), Imagined(Cluster(list(lines), **more).ask())  # type: ignore[arg-type]
    assert mend_in_rounds(imagined, imagined.hosts) == mend_in_rounds(cluster, cluster.ask())
    assert all("srun" in host.knows for host in imagined.hosts)


def test_a_line_for_our_plugin_is_never_added_without_its_files():
    repair = Repair("n1", STACK, f"required /b1/{Kind.OURS.value}", install="/b1")
    with pytest.raises(ValueError, match="n1 shall get a plugin that was not compiled"):
        list(steps(repair, None))
    assert [stdin for _, stdin in steps(repair, Parcel("data", "sum"))] == ["data", None]
