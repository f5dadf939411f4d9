"""The certificate of a cluster: its verdict, its comparison with an older one, its JSON and its page."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.bench.certificate.certificate import (
    ON_REQUEST,
    BetterFigure,
    Certificate,
    CertificateTrend,
    CertificateUnreadable,
    CertifiedFigure,
    CertifiedPart,
    CertifyPart,
    PartOutcome,
    change_rows,
    compare_certificates,
    comparison_notes,
    not_measured,
    read_certificate,
    skipped,
)
from dalsegno.bench.certificate.page import render_certificate
from dalsegno.bench.certificate.parts import (
    NodeHealth,
    certify_collectives,
    certify_container,
    certify_devices,
    certify_health,
    certify_pairs,
    certify_power_cut,
    certify_storage,
    certify_versions,
)
from dalsegno.bench.nccl.verdict import BenchLevel
from dalsegno.bench.node.versions_measure import read_versions, versions_here
from dalsegno.cli.measure.certify import PARTS, command
from dalsegno.cli.measure.certify_parts import CertifyAsk, CertifyStage, measure_part, prefixed
from dalsegno.cluster import SlurmHere
from dalsegno.errors import NotThere, UsageError

PASS, DEGRADED, FAIL, UNKNOWN = BenchLevel.PASS, BenchLevel.DEGRADED, BenchLevel.FAIL, BenchLevel.UNKNOWN
HOSTILE = "<script>alert('1')</script>\x1b[31m"


def part(which: CertifyPart, level: BenchLevel, *figures: CertifiedFigure) -> CertifiedPart:
    return CertifiedPart(which, PartOutcome.MEASURED, level, "a sentence", figures)


def certificate(*parts: CertifiedPart) -> Certificate:
    return Certificate("one", 1_700_000_000.0, ("n1", "n2"), parts, version="1.0")


def test_the_options_name_all_parts():
    assert tuple(each.value for each in CertifyPart) == PARTS


# The verdict


@pytest.mark.parametrize(
    ("levels", "verdict", "code"),
    [
        ((PASS, PASS), PASS, 0),
        ((PASS, DEGRADED), DEGRADED, 3),
        ((DEGRADED, FAIL), FAIL, 1),
        ((PASS, BenchLevel.IMPOSSIBLE), FAIL, 1),
        ((PASS, UNKNOWN), PASS, 0),
        ((UNKNOWN, UNKNOWN), UNKNOWN, 5),
    ],
)
def test_the_worst_part_decides_and_one_without_limits_does_not_count(
    levels: tuple[BenchLevel, BenchLevel], verdict: BenchLevel, code: int
):
    found = certificate(part(CertifyPart.PAIRS, levels[0]), part(CertifyPart.GEMM, levels[1])).level
    assert (found, found.exit_code) == (verdict, code)


def test_a_part_that_could_not_be_run_rules_out_a_pass_but_one_that_was_skipped_does_not():
    passed = part(CertifyPart.HEALTH, PASS)
    assert certificate(passed, skipped(CertifyPart.GEMM, "not asked for")).level is PASS
    assert certificate(passed, not_measured(CertifyPart.GEMM, "no torch")).level is UNKNOWN
    failed = part(CertifyPart.HEALTH, FAIL)
    assert certificate(failed, not_measured(CertifyPart.GEMM, "no torch")).level is FAIL
    assert certificate(skipped(CertifyPart.GEMM, "not asked for")).level is UNKNOWN


# JSON


def test_a_certificate_survives_its_json_report():
    figure = CertifiedFigure("steps lost", 3.0, "steps", BetterFigure.LOWER)
    whole = replace(part(CertifyPart.POWER_CUT, PASS, figure), findings=("f",), head=("A",), rows=(("1",),))
    parts = (whole, not_measured(CertifyPart.GEMM, "why"))
    first = replace(certificate(*parts), simulated=("gloo",), quick=True, measured=1)
    assert read_certificate(first.to_json()) == first
    assert json.loads(first.to_json())["level"] == "UNKNOWN"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "nonsense", '{"format": "other"}', "[" * 100_000, '{"format": "dalsegno-certificate-1"}']
)
def test_file_that_is_not_a_certificate_is_refused_with_a_hint(text: str):
    with pytest.raises(CertificateUnreadable) as refused:
        read_certificate(text, "old.json")
    assert "old.json" in refused.value.what
    assert "certificate.json" in refused.value.hint


def test_parts_of_a_later_version_are_left_out():
    value = certificate(part(CertifyPart.GEMM, PASS)).to_dict()
    value["parts"].append({**value["parts"][0], "part": "quantum"})
    assert [each.part for each in read_certificate(json.dumps(value)).parts] == [CertifyPart.GEMM]


# Comparison


def test_worse_figures_come_first_and_small_differences_are_left_out():
    def made(fast: float, start: float, steady: float, level: BenchLevel) -> Certificate:
        pairs = (CertifiedFigure("n1 - n2", fast, "GB/s"), CertifiedFigure("n1 - n3", steady, "GB/s"))
        starts = CertifiedFigure("start", start, "s", BetterFigure.LOWER)
        return certificate(part(CertifyPart.PAIRS, level, *pairs), part(CertifyPart.CONTAINER, PASS, starts))

    changes = compare_certificates(made(10.0, 1.0, 5.0, PASS), made(6.0, 0.5, 4.8, FAIL))
    assert [(each.name, each.trend) for each in changes] == [
        ("verdict", CertificateTrend.WORSE),
        ("n1 - n2", CertificateTrend.WORSE),
        ("start", CertificateTrend.BETTER),
    ]
    assert change_rows(changes)[1] == ["pairs", "n1 - n2", "10 GB/s", "6 GB/s", "worse: -40%"]


def test_a_longer_time_is_worse():
    def made(value: float) -> Certificate:
        return certificate(part(CertifyPart.POWER_CUT, PASS, CertifiedFigure("r", value, "s", BetterFigure.LOWER)))

    (change,) = compare_certificates(made(1.0), made(3.0))
    assert (change.trend, change.share) == (CertificateTrend.WORSE, 2.0)


def test_figure_that_is_no_longer_measured_is_named():
    old = certificate(part(CertifyPart.GEMM, PASS, CertifiedFigure("n1 GPU 0", 1.0, "TFLOP/s")))
    (whole,) = compare_certificates(old, certificate(not_measured(CertifyPart.GEMM, "no torch")))
    (single,) = compare_certificates(old, certificate(part(CertifyPart.GEMM, PASS)))
    assert (whole.trend, whole.now) == (CertificateTrend.MISSING, "not measured")
    assert (single.trend, single.name) == (CertificateTrend.MISSING, "n1 GPU 0")


def test_a_certificate_does_not_differ_from_itself():
    one = certificate(part(CertifyPart.GEMM, PASS, CertifiedFigure("zero", 0.0, "GB/s")))
    assert compare_certificates(one, one) == []
    assert comparison_notes(one, one) == []
    assert len(comparison_notes(one, replace(one, cluster="two", quick=True, simulated=("x",), nodes=("n1",)))) == 4


# Partial certificates


def test_the_heading_of_a_partial_certificate_names_the_parts_that_count():
    names = [each for each in CertifyPart if each not in ON_REQUEST]
    usual = [part(each, PASS) for each in names] + [skipped(each, "not requested") for each in ON_REQUEST]
    assert certificate(*usual).heading == "PASS"
    health = [part(each, PASS) if each is CertifyPart.HEALTH else skipped(each, "left out") for each in CertifyPart]
    partial = certificate(*health)
    assert partial.heading == partial.to_dict()["heading"] == "PASS, only health"
    assert "PASS, only health</span></h1>" in render_certificate(partial)
    no_gemm = [skipped(each.part, "left out") if each.part is CertifyPart.GEMM else each for each in usual]
    assert certificate(*no_gemm).heading == "PASS, without gemm"
    assert certificate(*(skipped(each, "left out") for each in CertifyPart)).heading.startswith("no verdict, without ")


@pytest.mark.parametrize(
    ("words", "what"),
    [(["--only", "health", "--power-cut"], "`--only health` leaves out the part that `--power-cut` requests"),
     (["--skip", "power-cut", "--power-cut"], "`--skip power-cut` leaves out the part that `--power-cut` requests"),
     (["--only", "health", "--container-image", "a"], "leaves out the part that `--container-image` requests"),
     (["--only", "power-cut"], "`--only power-cut` needs `--power-cut`"),
     (["--only", "gemm", "--skip", "gemm"], "contradict each other")],
)  # fmt: skip
def test_a_requested_part_that_is_left_out_is_refused(words: list[str], what: str):
    error = CliRunner().invoke(command, words, standalone_mode=False).exception
    assert isinstance(error, UsageError) and what in error.what and error.hint


def test_an_older_certificate_that_is_a_page_is_wrong_usage(tmp_path: Path):
    page = tmp_path / "certificate.html"
    page.write_text(render_certificate(certificate(part(CertifyPart.GEMM, PASS))))
    error = CliRunner().invoke(command, ["--against", str(page)], standalone_mode=False).exception
    assert isinstance(error, UsageError) and error.exit_code == 2 and "is not a certificate" in error.what


def test_without_a_cluster_certify_says_so_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(
        "#!/bin/sh\necho 'sinfo: error: fetch_config: DNS SRV lookup failed' >&2\n"
        "echo 'sinfo: fatal: Could not establish a configuration source' >&2\nexit 1\n"
    )
    sinfo.chmod(0o755)
    for name in ("SLURM_CONF", "DALSEGNO_CLUSTER", "DALSEGNO_CONTROLLER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    words = ["--only", "health", "--output", str(tmp_path / "report")]
    error = CliRunner().invoke(command, words, standalone_mode=False).exception
    assert isinstance(error, NotThere) and error.what == "there is no cluster yet"
    assert not (tmp_path / "report").exists()


# Parts


def test_health_fails_for_a_node_out_of_service_and_has_no_verdict_without_agents():
    well = NodeHealth("n1", "idle", True, failed=())
    assert certify_health([well], []).level is PASS
    assert certify_health([well, replace(well, warned=("clock",))], []).level is DEGRADED
    assert certify_health([well, replace(well, failed=("xid",))], []).level is FAIL
    assert certify_health([NodeHealth("n2", "idle", True)], []).level is UNKNOWN
    down = certify_health([well, NodeHealth("n2", "down*", False, "lost")], [])
    assert (down.level, down.findings[0]) == (FAIL, "n2 is down*: lost")
    assert [each.value for each in down.figures] == [1]


def test_versions_that_differ_between_nodes_are_named_with_their_nodes():
    same = {"slurmd": "24.11", "torch": "2.9"}
    found = certify_versions({"n1": same, "n2": same, "n3": {**same, "torch": ""}}, [])
    assert (found.level, found.findings) == (DEGRADED, ("torch differs: none on n3; 2.9 on n1, n2",))
    assert certify_versions({"n1": same, "n2": same}, []).level is PASS
    assert certify_versions({"n1": same}, []).level is UNKNOWN


def test_the_versions_of_this_machine_are_read_back_from_a_line():
    line = json.dumps({"host": "n1", "versions": versions_here()})
    found = read_versions(f"a warning\n{line}\n[1]\n")
    assert list(found) == ["n1"]
    assert found["n1"]["python"].startswith("3.")


def test_storage_fails_if_a_folder_cannot_be_used_and_names_a_slow_node():
    def speed(host: str, write: float, error: str = "") -> dict[str, object]:
        return {"host": host, "folder": "/fsx", "fstype": "nfs4", "write_mb_per_s": write, "read_mb_per_s": 9.0,
                "files_per_s": 5.0, "error": error, "shared": True}  # fmt: skip

    good = [speed("n1", 100.0), speed("n2", 110.0)]
    assert certify_storage([*good, speed("n3", 90.0)], []).level is PASS
    slow = certify_storage([*good, speed("n3", 20.0)], [])
    assert (slow.level, slow.findings) == (DEGRADED, ("/fsx on n3 writes at 20% of the median of the nodes",))
    assert certify_storage([*good, speed("n3", 20.0)], [], compare_nodes=False).level is PASS
    assert certify_storage([*good, speed("n3", 0.0, "Permission denied")], []).level is FAIL


def test_a_bad_link_fails_the_pairs_and_is_drawn():
    groups = [{"nodes": ["n1", "n2"], "busbw": 1.0}, {"nodes": ["n1", "n3"], "busbw": 0.1}]
    report = {"nodes": ["n1", "n2", "n3"], "usual": 1.0, "groups": groups, "faults": [], "unsure": []}
    assert certify_pairs(report, []).level is PASS
    assert certify_pairs({**report, "unsure": ["n3"]}, []).level is DEGRADED
    slower = {"results": 5, "threshold": 2.0, "slower": True}
    assert certify_pairs({**report, "history": slower}, []).level is DEGRADED
    assert certify_pairs({**report, "history": slower}, [], compare_history=False).level is PASS
    found = certify_pairs({**report, "faults": [{"kind": "link", "nodes": ["n1", "n3"], "share": 0.1}]}, [])
    assert (found.level, found.findings, len(found.pictures)) == (FAIL, ("bad link n1 - n3",), 1)


def test_one_pair_without_a_floor_has_no_verdict():
    groups = [{"nodes": ["n1", "n2"], "busbw": 1.0}]
    report = {"nodes": ["n1", "n2"], "usual": 1.0, "groups": groups, "faults": [], "unsure": [], "floor": 0.0}
    assert certify_pairs(report, []).level is UNKNOWN
    assert certify_pairs({**report, "floor": 0.5}, []).level is PASS
    history = {"results": 5, "threshold": 0.5, "slower": False}
    assert certify_pairs({**report, "history": history}, []).level is PASS
    assert certify_pairs({**report, "history": history}, [], compare_history=False).level is UNKNOWN


def test_pairs_of_one_node_are_not_measured_for_a_plain_reason(tmp_path: Path):
    ask = CertifyAsk(None, True, 1, None, None, tmp_path)
    stage = CertifyStage(ask, "one", SlurmHere({}), (), 1, "", 0, ())
    found = measure_part(CertifyPart.PAIRS, stage, lambda text: None)
    assert (found.word, found.summary) == ("not measured", "a pair needs two nodes, and one node is measured")


def test_the_worst_collective_counts():
    def report(test: str, level: str) -> dict[str, object]:
        rows = [{"size": 1024 * n, "out_of_place": {"busbw": 2.0 * n}, "in_place": {"busbw": 1.0 * n}} for n in (1, 4)]
        return {"test": test, "level": level, "reason": "no expectation", "machines": "2 nodes", "expected": None,
                "rows": rows, "hints": ["measure more"]}  # fmt: skip

    found = certify_collectives([report("all_reduce", "PASS"), report("alltoall", "UNKNOWN")], ["c"])
    assert (found.level, found.findings) == (UNKNOWN, ("alltoall: measure more",))
    assert found.figures[0] == CertifiedFigure("all_reduce bus bandwidth", 4.0, "GB/s")


def test_a_slow_device_degrades_and_two_devices_have_no_verdict():
    def device(host: str, value: float, product: str = "x") -> dict[str, object]:
        result = {"test": "gemm", "host": host, "device": "CPU 0", "product": product, "value": value, "best": 2}
        return {"result": result}

    good = [device("n1", 1.0), device("n2", 1.0)]
    assert certify_devices(good, []).level is UNKNOWN
    assert certify_devices([*good, device("n3", 1.0)], []).level is PASS
    slow = certify_devices([*good, device("n3", 0.5)], [])
    assert (slow.level, slow.findings) == (DEGRADED, ("CPU 0 of n3: 50% of the median",))
    different = certify_devices([*good, device("n3", 1.0, "y")], [])
    few = ("fewer than 3 devices of a kind are not compared with each other",)
    assert (different.level, different.findings) == (UNKNOWN, few)


def test_a_power_cut_must_be_survived_and_the_node_must_return():
    fault = {"node": "n1", "known_s": 1.0, "resumed_s": 2.0, "returned_s": 9.0, "steps_lost": 4}
    report = {"survived": True, "exit_code": 0, "orphans": 0, "exact": True, "faults": [fault]}
    assert certify_power_cut(report, []).level is PASS
    assert certify_power_cut({**report, "faults": [{**fault, "returned_s": None}]}, []).level is DEGRADED
    lost = certify_power_cut({**report, "survived": False, "exit_code": 1, "orphans": 2}, [])
    assert (lost.level, lost.findings) == (FAIL, ("the run ended with exit code 1", "processes left behind: 2"))
    inexact = certify_power_cut({**report, "survived": False, "exact": False}, [])
    assert (inexact.level, inexact.findings) == (FAIL, ("the weights differ from those of an undisturbed run",))


# The page


def test_the_page_holds_everything_and_loads_nothing_from_elsewhere():
    cut = certify_container(2.0, 1.0, 3, ["srun --container-image=a true"])
    old = certificate(part(CertifyPart.PAIRS, PASS, CertifiedFigure("n1 - n2", 9.0, "GB/s")))
    groups = [{"nodes": ["n1", "n2"], "busbw": 1.0}]
    pairs = certify_pairs({"nodes": ["n1", "n2"], "usual": 1.0, "groups": groups, "faults": [], "unsure": []}, ["cmd"])
    new = replace(certificate(pairs, cut, not_measured(CertifyPart.GEMM, "no torch")), simulated=("virtual hosts",))
    page = render_certificate(new, compare_certificates(old, new), comparison_notes(old, new))
    for text in ("no verdict", "virtual hosts", "not measured", "no torch", "<svg", "cmd", "worse: -89%"):
        assert text in page
    assert "<script" not in page
    assert page.replace('xmlns="http://www.w3.org/2000/svg"', "").count("http") == 0


def test_names_of_others_are_escaped_on_the_page():
    health = certify_health([NodeHealth(HOSTILE, HOSTILE, False, HOSTILE, (HOSTILE,))], [HOSTILE])
    groups = [{"nodes": [HOSTILE, "n2"], "busbw": 1.0}]
    pairs = certify_pairs(
        {"nodes": [HOSTILE, "n2"], "usual": 1.0, "groups": groups, "faults": [], "unsure": [HOSTILE]}, [HOSTILE]
    )
    parts = (health, pairs, certify_versions({HOSTILE: {HOSTILE: HOSTILE}, "n2": {}}, []))
    whole = Certificate(HOSTILE, 0.0, (HOSTILE,), parts, (HOSTILE,), version=HOSTILE)
    page = render_certificate(whole, compare_certificates(whole, whole), [HOSTILE])
    assert "<script" not in page
    assert "\x1b" not in page
    assert page.count("&lt;script&gt;") > 10


def test_progress_of_a_part_has_no_clock_and_no_lines_of_a_table():
    lines: list[str] = []
    say = prefixed(lines.append, "collectives")
    for line in ("  1.2 s  waiting for nodes", "  1.3 s  # Using devices", "# nThread 1", "", "measuring"):
        say(line)
    assert lines == ["collectives: waiting for nodes", "collectives: measuring"]
