"""Tests of `dalsegno exporter` on a real Slurm: what it counts, and hostile names."""

from __future__ import annotations

import json
import re
import urllib.request

from tests.cluster.conftest import Cli
from tests.observe.text_format import ReadFamily, read_families
from tests.waiting import eventually

NAME = 'a"} 1\nslurm_nodes_down 99\n{b="'


def test_exporter_counts_the_jobs_of_a_real_cluster(shared: Cli) -> None:
    process = shared.start("exporter", "-M", "shared", "--open", "--listen", "127.0.0.1:0", "--interval", "1s")
    jobs: list[str] = []
    try:
        assert process.stdout
        address = re.search(r"http://\S+/metrics", process.stdout.readline())
        assert address

        def scraped() -> dict[str, ReadFamily]:
            with urllib.request.urlopen(address[0], timeout=60) as answer:
                return read_families(answer.read())

        def waits() -> float:
            found = scraped()["slurm_job_queue_wait_seconds"].samples
            return found["slurm_job_queue_wait_seconds_count", (("partition", "lab"),)]

        assert eventually(lambda: scraped()["slurm_nodes_idle"].value()) >= 1
        before = eventually(lambda: waits() + 1) - 1  # waits are counted from the second cycle on
        eventually(lambda: scraped()["dalsegno_collector_success"].value(source="sshare"))
        words = ("--parsable", "-p", "lab", "--gpus=1", "-J", NAME, f"--comment={NAME}", "-o", "/dev/null")
        jobs.append(shared.ok("shell", "--", "sbatch", *words, "--wrap", "sleep 600").strip())
        eventually(lambda: scraped()["dalsegno_node_job"].value(node="lab-1", job_id=jobs[0], user="root"))
        eventually(lambda: waits() == before + 1)
        eventually(lambda: scraped()["dalsegno_gpu_seconds_total"].value(user="root", account="root") > 1)
        found = scraped()
        assert found["dalsegno_gpus"].value(partition="lab", state="alloc") == 1
        assert found["slurm_nodes_down"].value() == 0
    finally:
        process.terminate()
        process.communicate(timeout=60)
        for job in jobs:
            shared.ok("shell", "--", "scancel", job)
    assert process.returncode == 0


def test_exporter_once_agrees_with_sinfo(shared: Cli) -> None:
    found = read_families(shared.ok("exporter", "--once", "-M", "shared", "--compat", "sckyzo").encode())
    nodes = {node["name"] for node in json.loads(shared.ok("status", "--json", "-M", "shared"))["nodes"]}
    assert found["slurm_nodes_total"].value() == len(nodes)
    assert {dict(labels)["node"] for _, labels in found["dalsegno_node_state"].samples} == nodes
    assert found["slurm_account_fairshare"].samples
