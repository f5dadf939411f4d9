"""Tests of the pages about runs: GPUs, rates and journal entries."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.hardware.catalog import prices
from dalsegno.runs.coordinator.reports.history import StepPoint
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import NodeRole, RunNodeStatus
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster, Monitoring, Node
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.base import Target
from dalsegno.targets.folder import ClusterFolder
from dalsegno.web.charts import run_chart
from dalsegno.web.data import ClusterData, most_nodes, price_of
from dalsegno.web.pages.runs import entry_text, reported
from dalsegno.web.snapshot import RunPicture
from dalsegno.web.view import GpuPrice
from tests.web.played import run


def data(folder: Path) -> ClusterData:
    def no_target() -> Target:
        raise AssertionError("not needed")

    cluster = Cluster("c", "local", (), ())
    return ClusterData(ClusterFolder(folder), SlurmClient(LocalRunner(), {}), no_target, lambda: cluster)


def run_in(folder: Path, plan: object, *entries: dict[str, object], spare: str = "") -> RunPicture:
    """Return a run with this plan and this journal."""
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "journal.jsonl").write_text("".join(json.dumps({"at": 1.0, **entry}) + "\n" for entry in entries))
    view = run("train-aaaaa", "ada", os.geteuid(), ("n1", "n2"))
    spares = [RunNodeStatus(spare, NodeRole.SPARE)] if spare else []
    status = replace(view.status, nodes=(*view.status.nodes, *spares))
    return RunPicture(str(folder), os.geteuid(), status, view.progress)


def test_run_holds_the_gpus_it_requested_not_all_of_its_nodes(tmp_path: Path):
    plan = {"request": {"gpus_per_node": {"count": 4, "type": "h100"}}}
    view = run_in(tmp_path, plan, {"event": "generation", "nodes": ["n1", "n2"]})
    assert data(tmp_path).gpus_of(view) == 8


def test_spares_of_a_run_are_held_too(tmp_path: Path):
    plan = {"request": {"gpus_per_node": {"count": 4}, "spares": 1}}
    formed = {"event": "generation", "nodes": ["n1", "n2"]}
    view = run_in(tmp_path, plan, {"event": "granted", "nodes": ["n1", "n2", "n3"]}, formed)
    assert data(tmp_path).gpus_of(view) == 12
    assert data(tmp_path).gpus_of(run_in(tmp_path, plan, formed, spare="n3")) == 12, "granted by another job"


@pytest.mark.parametrize(
    "plan", [None, [], {"request": 5}, {"request": {"gpus_per_node": {"count": "x"}}}, {"request": {}}]
)
def test_without_a_plan_the_gpus_are_unknown(tmp_path: Path, plan: object):
    assert data(tmp_path).gpus_of(run_in(tmp_path, plan, {"event": "generation", "nodes": ["n1"]})) == 0


def test_most_nodes_of_an_elastic_run_count():
    sizes = [{"at": 1.0, "event": "generation", "nodes": ["n"] * count} for count in (2, 4, 3)]
    assert most_nodes(sizes) == 4
    assert most_nodes([*sizes, {"at": 1.0, "event": "generation", "nodes": 9}], 5) == 5


def test_rates_are_those_of_all_ranks():
    view = run("llama-k3f9x", "ada", 1001, ("gpu-1", "gpu-2"))
    assert dict(reported(view))["tokens/s"] == 16 * 512_300.0
    assert "tokens_per_s" not in dict(reported(view))
    assert "tokens/s" not in dict(reported(run("llama-k3f9x", "ada", 1001, (), world_size=0)))


def test_current_figure_is_clear_of_the_labels_of_its_axis():
    points = [StepPoint(float(at), at, 1, 7.5 if at < 5 else 0.001998, 0.1) for at in range(10)]
    drawn = run_chart(points, (), (), 10.0)
    texts = re.findall(r'<text x="([0-9.]+)" y="([0-9.]+)"([^>]*)>(.*?)</text>', drawn)
    (title,) = (float(y) for _, y, _, text in texts if text.startswith("loss "))
    labels = [float(y) for _, y, more, _ in texts if 'text-anchor="end"' in more]
    assert "0.001998" in drawn
    assert labels and all(abs(title - y) > 11 for y in labels), "one line of text is 11 high"


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            {"event": "ready", "node": "train-2", "warm": True, "seconds": 11.546533189000002, "threads": []},
            "train-2 is ready after 11.5 s, with modules imported in advance",
        ),
        ({"event": "ready", "node": "train-2"}, "train-2 is ready"),
        ({"event": "granted", "job": 7, "nodes": ["n1", "n2"], "role": "main"}, "Slurm granted job 7: n1, n2"),
        ({"event": "generation", "generation": 2, "nodes": ["n"] * 9}, "generation 2 starts on 9 nodes"),
        ({"event": "job over", "job": 7, "state": "CANCELLED"}, "job 7 is over: cancelled"),
        ({"event": "lost", "node": "n1", "why": "no answer"}, "n1 is lost: no answer"),
        ({"event": "pause", "seconds": 30}, "waits 30 s before the next restart"),
        ({"event": "ended", "code": 0, "why": ""}, "the run ended with exit code 0"),
        ({"event": "newer", "share": 0.123456789, "nodes": ["n1"]}, "newer: share 0.1235, nodes n1"),
    ],
)
def test_journal_entries_are_sentences(entry: dict[str, object], text: str):
    assert entry_text({"at": 1.0, **entry}) == text


@pytest.mark.parametrize("event", [event.value for event in RunEvent])
@pytest.mark.parametrize("value", [None, "x", 5, 1e308, float("nan"), ["n1"]])
def test_every_entry_is_shown_whatever_its_values_are(event: str, value: object):
    names = ("node", "nodes", "job", "state", "seconds", "why", "rank", "what", "code", "text", "host", "generation")
    assert isinstance(entry_text({"at": 1.0, "event": event, **dict.fromkeys(names, value)}), str)


def priced(*nodes: Node, own: float | None = None) -> GpuPrice:
    return price_of(Cluster("c", "local", nodes, (), monitoring=Monitoring(gpu_hour_price=own)))


def test_price_of_a_gpu_hour_is_the_list_price_unless_the_file_has_one():
    h100, p5 = Node("n1", 8, 1, gpus=8, gpu_type="h100"), Node("n2", 8, 1, gpus=8, instance="ml.p5.48xlarge")
    listed = prices()["h100"]
    found = priced(h100, p5, Node("cpu", 8, 1))
    assert found.amount == listed.usd_per_gpu_hour > 0
    assert listed.date in found.text and "AWS us-east-1 p5.48xlarge" in found.text and "mean" not in found.text
    assert (priced(h100, own=2.5).amount, priced(h100, own=0).amount) == (2.5, 0.0)
    assert "as the cluster file says" in priced(h100, own=2.5).text


def test_price_of_mixed_gpus_is_their_mean_and_unknown_gpus_have_none():
    h100, l4 = Node("n1", 8, 1, gpus=8, gpu_type="h100"), Node("n2", 8, 1, gpus=4, gpu_type="l4")
    found = priced(h100, l4)
    known = prices()
    mean = (8 * known["h100"].usd_per_gpu_hour + 4 * known["l4"].usd_per_gpu_hour) / 12
    assert found.amount == pytest.approx(mean) and "the mean of" in found.text
    assert priced(h100, Node("n3", 8, 1, gpus=8, gpu_type="special")) == GpuPrice(), "half a price would mislead"
    assert "gpu_hour_price" in priced(Node("cpu", 8, 1)).text
