"""What `--dry-run` tells: every round of it, in its order, though each shows only when the one before is done."""

from __future__ import annotations

import pytest

from dalsegno.cli.containers import _plan, _show_plan
from dalsegno.cli.containers_site import Site
from dalsegno.containers.plugstack.facts import HostFacts, StackLine

STACK, BROKEN = "/shared/plugstack.conf", "required /nope/x.so"


def host(name: str, **more: object) -> HostFacts:
    facts: dict[str, object] = {
        "login": name == "head", "slurm": "23.11.4", "conf": "/shared/slurm.conf", "stack": STACK, "files": (STACK,),
        "place": "1", "file_system": "nfs", "lines": (StackLine(STACK, BROKEN),),
        "errors": ("srun: error: spank: dlopen(/nope/x.so): cannot open shared object file",), **more,
    }  # fmt: skip
    return HostFacts(name, **facts)  # type: ignore[arg-type]


def test_a_dry_run_tells_all_rounds_in_their_order_and_what_becomes_of_hosts_that_are_away(
    capsys: pytest.CaptureFixture[str],
):
    served = host("n2", conf="/run/slurm/conf/slurm.conf", lines=(), errors=())
    hosts = [host("head"), host("n1"), served, HostFacts("n3", silent="ssh: refused")]
    for together in _plan(Site(False, ("head",), ("n1", "n2", "n3"), ("n9",), {}), hosts, "/p"):
        _show_plan(together)
    silent, asleep, *lines = capsys.readouterr().err.splitlines()
    assert silent.startswith("warning: n3 could not be asked: ")
    assert asleep.startswith("warning: n9 is powered down: ")
    assert [" ".join(line.split()[:3]) for line in lines] == [
        "head: puts `required", "head: has slurmctld", "head: installs Dal", "n[1-2]: installs Dal",
        "head: adds `required", "head: has slurmctld",
    ]  # fmt: skip


def test_a_dry_run_says_that_a_line_would_be_held_back(capsys: pytest.CaptureFixture[str]):
    hosts = [host("head", lines=(), errors=()), host("n1", slurm="23.02.1", lines=(), errors=())]
    planned = _plan(Site(False, ("head",), ("n1",), (), {}), hosts, "/p")
    assert [each.add for together in planned for each in together] == [""], "files for the head, and no line"
    said = capsys.readouterr().err
    assert "error: n1 reads the same plugstack.conf as others, and has no /p/" in said and "no line is written" in said
