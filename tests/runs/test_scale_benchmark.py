"""The benchmark of large runs measures the default hang detection, and its page shows all figures that it measures."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from dalsegno.runs.coordinator.agents.messages import NodeActivity, WorkerActivity, read_message

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("scale")


def test_hang_detection_is_on_and_played_agents_answer_its_queries(scale: ModuleType) -> None:
    assert scale.ScaleTerms.hang_timeout_s is None
    work = WorkerActivity(5.0, 1 << 20, 95, 60)
    assert read_message(scale.activity_answer(3, [8, 9], 5.0)) == NodeActivity(3, {8: work, 9: work})


def test_page_shows_the_end_of_a_generation_and_the_time_from_the_cut(scale: ModuleType) -> None:
    page = importlib.import_module("scale_page")
    figures = {
        "stopped_s": 0.11,
        "ended_s": 0.07,
        "restarted_s": 0.48,
        "detected_s": 2.63,
        "ordered_s": 0.54,
        "recovered_s": 3.17,
    }
    lines = page.table({"coordinator": {4096: figures}, "controller": {}}).splitlines()
    shown = {cells[1].strip(): cells[2].strip() for cells in (line.split("|") for line in lines)}
    assert shown["coordinator: killed worker: report to the last order to stop: the end of the generation"] == "0.11 s"
    assert shown["coordinator: … first order to stop to the last confirmation"] == "0.07 s"
    assert shown["coordinator: … both: from the cut to the last order"] == "3.17 s"
    assert shown["coordinator: memory"] == ""


def result(nodes: int, **figures: float) -> dict[str, float]:
    """Return a result of the coordinator's part."""
    return {"nodes": nodes, "ordered_s": 0.5, "hang_detection": True, "steps": True, "node_timeout_s": 3.0, **figures}


def test_another_node_timeout_gets_its_own_rows(scale: ModuleType) -> None:
    page = importlib.import_module("scale_page")
    results = [result(4096, recovered_s=3.2), result(4096, recovered_s=1.4, node_timeout_s=1.0)]
    results.append(result(4096, recovered_s=1.5, node_timeout_s=1.0))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.table(page.group(results)).splitlines()]
    assert ["coordinator: … both: from the cut to the last order", "3.20 s", ""] in rows
    both = "coordinator, node timeout 1 s: … both: from the cut to the last order"
    assert [both, "1.50 s", "≤ 1 s"] in rows, "the worse one"


def test_page_says_what_was_switched_on(scale: ModuleType) -> None:
    page = importlib.import_module("scale_page")
    on, off = result(256), {"nodes": 256, "ordered_s": 0.5, "steps": True}  # older results do not say it
    assert page.describe_options([on]) == "Hang detection was on, and agents reported steps."
    assert page.describe_options([off]) == "Hang detection was off, and agents reported steps."
    with pytest.raises(SystemExit, match="different options"):
        page.describe_options([on, off])


def test_results_survive_the_file(scale: ModuleType, tmp_path: Path) -> None:
    page = importlib.import_module("scale_page")
    (tmp_path / "one").write_text(json.dumps(result(256)) + "\n")
    assert page.read([str(tmp_path / "one")]) == [result(256)]


def test_prose_of_the_page_claims_hang_detection_only_if_the_table_was_measured_with_it(scale: ModuleType) -> None:
    table = importlib.import_module("table")
    document = (BENCHMARKS.parent / "docs/scale.md").read_text()
    begin, end = (table.MARK.format(script="scale_page", which=which) for which in ("begin", "end"))
    before, _, rest = document.partition(begin)
    written, _, after = rest.partition(end)
    options = re.findall(r"Hang detection was (on|off), and agents reported (?:no )?steps\.", written)
    assert len(options) == 1, "scale_page.py writes this sentence above the table"
    claims = re.findall(r"hang detection (?:is|was) on\b", before + after, re.IGNORECASE)
    assert options == ["on"] or not claims
