"""Tests that each check fails, passes and is unknown on recorded inputs.

A folder below tests/recorded/health/<check>/ is a node: files by their paths, and commands with their output
(`RecordedNode`). Its name starts with good, bad or garbage. Numbered folders inside it are consecutive observations.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from dalsegno.health import Result, Verdict, passed
from dalsegno.health.check import Check, Context
from dalsegno.health.checks import CHECKS
from dalsegno.health.expected import expected_of
from dalsegno.health.facts import SeenBefore
from dalsegno.health.node_reader import RecordedNode
from dalsegno.health.runner import examine
from dalsegno.spec.health import CHECK_THRESHOLDS

RECORDED = Path(__file__).parents[1] / "recorded" / "health"
KINDS = {
    "good": {Verdict.PASSED},
    "bad": {Verdict.FAILED, Verdict.WARNED},
    "garbage": {Verdict.UNKNOWN},
}
ONLY_WARN = {"gpu-heating", "fabric-errors", "network", "zombies"}  # these never disturb a job


def cases(check: str, kind: str, within: Path = RECORDED) -> list[Path]:
    return sorted(path for path in (within / check).glob(f"{kind}*") if path.is_dir())


def looks(case: Path) -> list[Path]:
    return sorted((path for path in case.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)) or [case]


def judged(check: Check, case: Path) -> Result:
    """Return the result of the check on the last recorded observation."""
    seen, result = SeenBefore(), None
    for look in looks(case):
        own = look / "etc/slurm/slurm.conf"
        conf = (own if own.exists() else RECORDED / "slurm.conf").read_text()
        node = RecordedNode(look, expected_of("gpu-1", conf), seen)
        context = sorted(check.contexts, key=lambda each: list(Context).index(each))[0]
        found = examine([check], context, node, {})
        result = found[0].result if found else None
    assert result is not None, f"{check.name} does not apply to {case}"
    return result


def lacking(checks: Iterable[Check], within: Path = RECORDED) -> list[str]:
    """Return the kinds of recorded input that checks lack."""
    return [f"{check.name}: {kind}" for check in checks for kind in KINDS if not cases(check.name, kind, within)]


EVERY = [(check, kind, case) for check in CHECKS for kind in KINDS for case in cases(check.name, kind)]


@pytest.mark.parametrize(("check", "kind", "case"), EVERY, ids=lambda each: getattr(each, "name", str(each)))
def test_each_check_judges_recorded_inputs(check: Check, kind: str, case: Path) -> None:
    result = judged(check, case)
    assert result.verdict in KINDS[kind], result


def answers(case: Path) -> list[Path]:
    """Return the files that may be truncated: those of tools and people. Files of the kernel are always complete."""
    found = [path for path in case.rglob("*") if path.parent.name == "commands" or path.name == "telemetry.json"]
    return [path for path in found if path.is_file() and path.stat().st_size]


CUT = [(check, case) for check in CHECKS for case in cases(check.name, "good") if answers(case)]


@pytest.mark.parametrize(("check", "case"), CUT, ids=lambda each: each.name)
def test_a_truncated_answer_never_fails_a_node(check: Check, case: Path, tmp_path: Path) -> None:
    for path in answers(case):
        copy = tmp_path / "case"
        shutil.copytree(case, copy)
        whole = path.read_text()
        for tenths in range(10):
            (copy / path.relative_to(case)).write_text(whole[: len(whole) * tenths // 10])
            result = judged(check, copy)
            assert result.verdict is not Verdict.FAILED, f"{path.name} cut off after {tenths}/10: {result}"
        shutil.rmtree(copy)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_each_check_can_fail(check: Check) -> None:
    verdicts = {judged(check, case).verdict for case in cases(check.name, "bad")}
    assert (Verdict.FAILED in verdicts) != (check.name in ONLY_WARN)


def test_every_check_has_good_bad_and_garbage_inputs() -> None:
    assert lacking(CHECKS) == []


def test_a_check_without_inputs_is_reported(tmp_path: Path) -> None:
    never = Check("never", "cannot fail", lambda node: "", lambda answer: passed("always"))
    (tmp_path / "never" / "good").mkdir(parents=True)
    assert lacking([never], tmp_path) == ["never: bad", "never: garbage"]


def test_recorded_inputs_exist_only_for_existing_checks() -> None:
    assert {path.name for path in RECORDED.iterdir() if path.is_dir()} == {check.name for check in CHECKS}


def names(checks: Sequence[Check]) -> list[str]:
    return [check.name for check in checks]


def test_every_check_has_a_unique_name_and_a_description() -> None:
    assert len(set(names(CHECKS))) == len(CHECKS)
    assert all(check.about and check.contexts and check.every_s >= 1 for check in CHECKS)


def test_the_cluster_file_knows_every_check_and_threshold_by_name() -> None:
    assert {check.name: tuple(check.thresholds) for check in CHECKS} == CHECK_THRESHOLDS
