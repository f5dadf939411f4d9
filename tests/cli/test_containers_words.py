"""How `dalsegno containers check` names hosts of which the same is to be said."""

from __future__ import annotations

from dalsegno.cli.containers_words import absent, as_json, rows, sentences
from dalsegno.containers.plugstack import Finding, HostFacts, Repair
from dalsegno.containers.plugstack.facts import StackLine

LINE = StackLine("/etc/slurm/plugstack.conf", "required /lib/spank_pyxis.so")
KNOWS = {"lines": (LINE,), "plugins": ("/lib/spank_pyxis.so",), "knows": frozenset({"srun"}), "enroot": "3.5.0"}
HOSTS = [
    HostFacts("n1", **KNOWS),  # type: ignore[arg-type]
    HostFacts("n3"),
    HostFacts("n2", **KNOWS),  # type: ignore[arg-type]
    HostFacts("n4", silent="ssh: refused"),
]


def test_hosts_that_are_alike_are_one_row_where_the_first_of_them_stood():
    assert rows(HOSTS) == [
        ["n[1-2]", "yes", "/lib/spank_pyxis.so", "3.5.0"],
        ["n3", "no", "-", "-"],
        ["n4", "?", "?", "?"],
    ]


def test_the_same_finding_of_two_hosts_is_told_once():
    found = [Finding("n1", "lacks it", "add it"), Finding("n3", "is full", "wait"), Finding("n2", "lacks it", "add it")]
    assert sentences(found) == ["n[1-2]: lacks it\n  fix: add it", "n3: is full\n  fix: wait"]


def test_what_is_done_to_a_host_in_two_steps_is_one_entry_of_json():
    done = [Repair("n1", install="/p"), Repair("n2", install="/p"), Repair("n1", "/s", "required x")]
    assert as_json([], [], [], done)["repaired"] == [
        {"host": "n1", "done": ["installs Dal Segno's plugin in /p", "adds `required x` to /s"]},
        {"host": "n2", "done": ["installs Dal Segno's plugin in /p"]},
    ]


def test_hosts_that_the_files_did_not_come_to_are_told_what_becomes_of_them():
    silent, asleep = absent(["n1", "n2"], ["n3"], "/p/b1")
    assert silent.startswith("n[1-2] could not be asked: ") and "no job starts there until" in silent
    assert "run the same again when it answers" in silent and "nodename=n[1-2] state=drain" in silent
    assert asleep.startswith("n3 is powered down: ") and "have /p/b1 in what it boots from" in asleep
    assert absent([], [], "/p/b1") == []


def test_json_has_each_host_and_those_that_were_not_asked():
    told = as_json(["n9"], HOSTS, [], [])
    assert told["ok"] is True and told["not_asked"] == ["n9"]
    assert [(host["host"], host["asked"]) for host in told["hosts"]] == [  # type: ignore[attr-defined]
        ("n1", True), ("n3", True), ("n2", True), ("n4", False)
    ]  # fmt: skip
