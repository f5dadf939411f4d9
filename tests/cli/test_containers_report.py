"""Tests of the report of `dalsegno containers check`."""

from __future__ import annotations

from dalsegno.cli.containers import describe_steps, report_as_json, table_rows
from dalsegno.containers.plugstack import CommandStep, ContainerFinding, HostFacts
from dalsegno.containers.plugstack.facts import StackLine

LINE = StackLine("/etc/slurm/plugstack.conf", "required /lib/spank_pyxis.so")
KNOWS = {"lines": (LINE,), "plugins": ("/lib/spank_pyxis.so",), "knows": frozenset({"srun"}), "enroot": "3.5.0"}
HOSTS = [
    HostFacts("n1", **KNOWS),  # type: ignore[arg-type]
    HostFacts("n3"),
    HostFacts("n2", **KNOWS),  # type: ignore[arg-type]
    HostFacts("n4", silent="ssh: refused"),
]
STEP = CommandStep(("n1", "n2"), "load it", ("modprobe overlay", "true"), "Not at night.")


def test_hosts_with_the_same_result_share_a_row():
    assert table_rows(HOSTS) == [
        ["n[1-2]", "yes", "/lib/spank_pyxis.so", "3.5.0"],
        ["n3", "no", "-", "-"],
        ["n4", "?", "?", "?"],
    ]


def test_steps_are_numbered_text_for_a_shell():
    first, second = describe_steps([STEP, CommandStep(("n3",), "again", ("true",))])
    assert first == "# 1. on n[1-2]: load it\n# caution: Not at night.\nmodprobe overlay\ntrue"
    assert second == "# 2. on n3: again\ntrue"


def test_json_report_has_hosts_findings_commands_and_skipped_hosts():
    report = report_as_json(["n9"], HOSTS, [ContainerFinding("n3", "lacks it", "add it")], [STEP])
    assert report["ok"] is False and report["not_asked"] == ["n9"]
    assert [(host["host"], host["asked"]) for host in report["hosts"]] == [  # type: ignore[attr-defined]
        ("n1", True), ("n3", True), ("n2", True), ("n4", False)
    ]  # fmt: skip
    assert report["findings"] == [{"host": "n3", "what": "lacks it", "fix": "add it"}]
    assert report["commands"] == [
        {
            "hosts": ("n1", "n2"),
            "purpose": "load it",
            "commands": ("modprobe overlay", "true"),
            "caution": "Not at night.",
        }
    ]
