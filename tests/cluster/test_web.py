"""The web page of a real cluster, in a real browser."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from dalsegno.system.children import arguments, find
from dalsegno.system.hanging_calls import slowness
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.cluster.runs import QUICK
from tests.waiting import eventually
from tests.web.browser import DARK, LIGHT, Browser, Tab, barriers, chromium

pytestmark = pytest.mark.cluster

CLUSTER = """
name: one
target: local
partitions:
  - {name: train, nodes: 3, gpus: 2, gpu_type: h100, cpus: 4, memory: 2G, default: true}
users:
  - {name: ada}
slurm: {accounting: false}
monitoring: {enabled: true}
"""
ADA = 54321
IS_LIVE = "document.getElementById('live')?.textContent === 'live'"
SEEN_S = 3.0
DARK_TOO = ("/", "/node/train-1")
PAGES = ("/", "/runs", "/queue", "/events", "/goodput", "/users", "/drills", "/node/train-1", "/confirm?do=pause")


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(CLUSTER))
        yield cli


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@pytest.fixture
def tab(cluster: Cli, browser: Browser) -> Iterator[Tab]:
    """Return a page in which root has logged in. Its scripts must not fail during the test."""
    made = browser.tab()
    made.size(1280, 900)
    made.open(cluster.ok("web", "--no-open").strip())
    made.until(IS_LIVE)
    yield made
    assert made.errors == []


def visit(tab: Tab, path: str) -> None:
    tab.open(tab.run("location.origin") + path)
    tab.until(IS_LIVE)


def press(tab: Tab, link: str) -> None:
    """Follow a link to an action and confirm it in the dialog."""
    tab.until(f"document.querySelector('{link}')")
    tab.run(f"document.querySelector('{link}').click()")
    tab.until("document.querySelector('dialog[open] button.primary')")
    tab.run("document.querySelector('dialog[open] button.primary').click()")


def events(cluster: Cli) -> list[dict[str, str]]:
    return [json.loads(line) for line in cluster.ok("events", "--all", "--json").splitlines()]


def test_every_page_opens_without_errors_and_is_accessible(cluster: Cli, tab: Tab):
    for path in PAGES:
        tab.open(tab.run("location.origin") + path)
        for scheme in (LIGHT, DARK) if path in DARK_TOO else (LIGHT,):
            tab.size(1280, 900, scheme=scheme)
            assert barriers(tab) == [], (path, scheme)


@pytest.mark.parametrize("by", ["command", "file"])
def test_removed_user_is_logged_out(cluster: Cli, by: str):
    if by == "file":
        cluster.ok("up", cluster.file(CLUSTER.replace("- {name: ada}", "- {name: ada}\n  - {name: bea}")))
    else:
        cluster.ok("user", "add", "bea")
    address = cluster.ok("shell", "--user", "bea", "--", "dalsegno", "web", "--no-open").split()[0]
    with urlopen(address, timeout=60) as page:
        cookie = page.headers["Set-Cookie"].partition(";")[0]
    queue = Request(address.partition("/login")[0] + "/queue", headers={"Cookie": cookie})
    with urlopen(queue, timeout=60) as page:
        assert page.status == 200
    if by == "file":
        cluster.ok("up", cluster.file(CLUSTER))
    else:
        cluster.ok("user", "rm", "bea", "--remove-home")
    with pytest.raises(HTTPError, match="401"):
        urlopen(queue, timeout=60)


def test_page_shows_every_node_and_gpu(cluster: Cli, tab: Tab):
    visit(tab, "/")
    assert tab.run("[...document.querySelectorAll('.card .name')].map(each => each.textContent)") == [
        "train-1", "train-2", "train-3",
    ]  # fmt: skip
    eventually(lambda: "°C" in tab.run("document.querySelector('#node-train-1 svg.gpu title').textContent"))
    assert tab.run("document.querySelectorAll('.card svg.gpu').length") == 6


def test_verdict_names_a_dead_daemon_as_status_does(cluster: Cli, tab: Tab):
    visit(tab, "/")
    tab.until("/^healthy/.test(document.querySelector('.verdict').textContent)")
    cluster.ok("inject", "agent-dead", "train-1")
    try:
        tab.until("/node-agent on train-1 is not running/.test(document.querySelector('.verdict').textContent)")
        assert "node-agent on train-1 is not running" in cluster.ok("status").splitlines()[0]
    finally:
        cluster.ok("inject", "--clear", "train-1")
    tab.until("/^healthy/.test(document.querySelector('.verdict').textContent)")
    assert [each["text"] for each in events(cluster) if each["kind"] == "request"][-2:] == [
        "fault agent-dead injected by root",
        "fault agent-dead undone by root",
    ]


@pytest.mark.alone
def test_power_cut_is_shown_within_three_seconds(cluster: Cli, tab: Tab):
    visit(tab, "/")
    tab.run("new MutationObserver(() => { const chip = document.querySelector('#node-train-2 .chip');"
            " if (!window.seen && /lost|down|repairing/.test(chip.textContent)) window.seen = Date.now() / 1000; })"
            ".observe(document.body, {childList: true, subtree: true})")  # fmt: skip
    off_at = time.time()  # taken before the command, which returns after the cut
    cluster.ok("inject", "power-off", "train-2")
    tab.until("window.seen")
    assert tab.run("window.seen") - off_at < SEEN_S * slowness()
    tab.until("document.querySelector('#node-train-2 .chip').textContent === 'idle'", 120)


def test_run_is_cancelled_from_the_page(cluster: Cli, tab: Tab):
    script = cluster.home / "waits.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    run = cluster.ok("run", "--detach", *QUICK, "-N", "1", "--nproc-per-node", "1", str(script)).split()[0]
    tab.until(f"fetch('/run/{run}').then(answer => answer.ok)")
    tab.errors.clear()  # the page did not exist at first
    visit(tab, f"/run/{run}")
    tab.until("document.querySelector('#run-head .chip').textContent === 'running'")
    press(tab, '#run-head a[href^="/confirm?do=cancel"]')
    tab.until("document.querySelector('#run-head .chip')?.textContent === 'cancelled'")
    [record] = [each for each in events(cluster) if run in each["text"]]
    assert (record["kind"], record["text"]) == ("request", f"run {run} cancelled by root in the web page")


def test_node_is_drained_and_resumed_with_the_name_of_the_operator(cluster: Cli, tab: Tab):
    visit(tab, "/node/train-3")
    press(tab, 'a[href*="do=drain"]')
    tab.until("document.querySelector('#node-head .chip')?.textContent === 'drained'")
    assert "by root in the web page" in cluster.ok("shell", "--", "sinfo", "-R", "-h", "-o", "%E")
    press(tab, 'a[href*="do=undrain"]')
    tab.until("document.querySelector('#node-head .chip')?.textContent === 'idle'")
    assert requests(cluster, "train-3") == [
        "drained by root in the web page",
        "returned to service by root in the web page",
    ]


def test_recovery_is_paused_and_resumed_with_the_name_of_the_operator(cluster: Cli, tab: Tab):
    visit(tab, "/")
    press(tab, 'a[href="/confirm?do=pause"]')
    press(tab, 'a[href="/confirm?do=resume"]')
    tab.until("document.querySelector('a[href=\"/confirm?do=pause\"]')")
    texts = " ".join(each["text"] for each in events(cluster))
    assert "paused by root in the web page" in texts and "resumed by root in the web page" in texts


def requests(cluster: Cli, node: str) -> list[str]:
    """Return the requests of users about a node, from the journal."""
    return [each["text"] for each in events(cluster) if each["kind"] == "request" and each["node"] == node]


def test_fault_is_injected_from_the_page(cluster: Cli, tab: Tab):
    visit(tab, "/node/train-1")
    tab.run("document.querySelector('a[href*=\"do=inject\"]').click()")
    tab.until("document.querySelector('dialog[open] select')")
    tab.run("document.querySelector('dialog select').value = 'gpu-hot'")
    tab.run("document.querySelector('dialog[open] button.primary').click()")
    tab.until("/gpu-hot injected by root/.test(document.querySelector('#node-history')?.textContent)")
    cluster.ok("inject", "--clear", "train-1")


def test_page_survives_a_restart_of_the_controller_and_of_the_observer(cluster: Cli, tab: Tab):
    visit(tab, "/events")
    for program in ("controller", "observer"):
        before = daemon(cluster, program)
        os.kill(before, signal.SIGKILL)
        eventually(lambda program=program, before=before: daemon(cluster, program) not in (0, before))
        eventually(lambda: cluster.run("web", "--json").code == 0 and cluster.run("nodes").code == 0)
    tab.until(IS_LIVE)
    cluster.ok("automation", "pause")
    tab.until("/paused by/.test(document.querySelector('#events tbody tr').textContent)")
    cluster.ok("automation", "resume")
    tab.until("/resumed by/.test(document.querySelector('#events tbody tr').textContent)")
    tab.errors.clear()  # the browser reports the connections that broke


def daemon(cluster: Cli, program: str) -> int:
    """Return the PID of a daemon on the head; 0 while it does not run."""
    folder = str(cluster.home / "clusters/one")
    found = find(lambda pid: [program, folder] == arguments(pid)[3:5])
    return found[0].pid if found else 0


def test_other_users_get_the_role_of_a_user(cluster: Cli):
    assert json.loads(cluster.ok("web", "--json"))["role"] == "operator"
    other = replace(cluster, uid=ADA)
    assert json.loads(other.ok("web", "--json"))["role"] == "user"
    refused = other.run("web", "--read-only")
    assert (refused.code, "only root and the cluster's owner" in refused.err) == (1, True)
    link = json.loads(cluster.ok("web", "--read-only", "--json"))
    assert link["role"] == "viewer"
    assert "ended" in cluster.run("web", "--revoke").err


def test_tunnel_is_a_command_and_an_address(cluster: Cli):
    command, url = cluster.ok("web", "--tunnel").splitlines()
    assert command.startswith("ssh -N -L 6820:10.") and url.startswith("http://localhost:6820/login?token=")
