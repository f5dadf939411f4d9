"""The pages of generated clusters in a real browser: a phone, no JavaScript, one node, a thousand, hostile texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from dalsegno.health.result import Verdict
from dalsegno.observe.http_server import HttpServer
from dalsegno.observe.metrics_endpoint import ListenAddress
from dalsegno.recovery.journal.event import EventKind
from dalsegno.runs.status import RunPhase
from dalsegno.web.requests import ActionKind
from dalsegno.web.sessions import WebRole
from dalsegno.web.snapshot import ControllerPart, RunPicture, SlurmPart
from dalsegno.web.sources import PlayedSources
from dalsegno.web.view import CheckRecord, EvidenceBundle, NodeDetails, RunDetails, UserHours
from tests.web.browser import DARK, LIGHT, Browser, Tab, barriers, chromium
from tests.web.played import PlayedData, PlayedSite, event, job, journal, large_cluster, node, run, small_cluster

pytestmark = pytest.mark.cluster  # a browser: too slow for the unit part

IS_LIVE = "document.getElementById('live')?.textContent === 'live'"
SECTIONS = ("/", "/runs", "/queue", "/events", "/goodput", "/users", "/drills")
PHONE = (390, 844)
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
EVIL = '"><img src=x onerror="window.harmed=1"><script>window.harmed=2</script><svg onload=window.harmed=3>\'"'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@contextmanager
def opened(browser: Browser, site: PlayedSite, *, scripts: bool = True) -> Iterator[Tab]:
    """Serve a site and log root in. At the end the browser must have reported no error."""
    listener = ListenAddress("127.0.0.1", 0).open()
    server = HttpServer(listener, site.app.handle)
    server.start()
    tab = browser.tab()
    try:
        tab.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        token = site.sessions.issue(WebRole.OPERATOR, 0, "root")
        tab.open(f"http://127.0.0.1:{listener.getsockname()[1]}/login?token={token}")
        yield tab
        assert tab.errors == []
    finally:
        tab.call("Page.navigate", url="about:blank")
        server.close()
        site.close()


def visit(tab: Tab, path: str) -> None:
    tab.open(tab.run("location.origin") + path)


def text_of(tab: Tab) -> str:
    return str(tab.run("document.body.innerText"))


def one_node() -> PlayedSources:
    return PlayedSources(SlurmPart((node("gpu-1"),), ()), ControllerPart({}, {}))


def test_page_of_a_run_with_charts_and_faults_is_accessible_in_light_and_dark(browser: Browser):
    with opened(browser, PlayedSite(small_cluster())) as tab:
        visit(tab, "/run/llama-k3f9x")
        tab.until(IS_LIVE)
        assert tab.run("document.querySelectorAll('svg').length") > 1, "charts and timeline"
        for scheme in (LIGHT, DARK):
            tab.size(1280, 900, scheme=scheme)
            assert barriers(tab) == [], scheme


def test_every_page_fits_a_phone_in_light_and_dark(browser: Browser):
    with opened(browser, PlayedSite(small_cluster())) as tab:
        colours = set()
        for scheme in (LIGHT, DARK):
            tab.size(*PHONE, phone=True, scheme=scheme)
            for path in (*SECTIONS, "/run/llama-k3f9x", "/node/gpu-8", "/confirm?do=drain&node=gpu-3"):
                visit(tab, path)
                assert (path, tab.run("innerWidth"), tab.run(TOO_WIDE)) == (path, PHONE[0], 0)
            colours.add(tab.run("getComputedStyle(document.body).backgroundColor"))
            assert barriers(tab) == [], scheme
        assert len(colours) == 2, "dark differs from light"


@pytest.mark.parametrize(("sources", "nodes"), [(one_node(), 1), (large_cluster(1000), 1000)], ids=["1", "1000"])
def test_map_reads_well_with_one_node_and_with_a_thousand(browser: Browser, sources: PlayedSources, nodes: int):
    with opened(browser, PlayedSite(sources)) as tab:
        for size, phone in (((1280, 900), False), (PHONE, True)):
            tab.size(*size, phone=phone)
            visit(tab, "/")
            tab.until(IS_LIVE)
            shown = "[...document.querySelectorAll('.card, .tile')].map(each => each.getBoundingClientRect())"
            assert tab.run(f"{shown}.length") == nodes
            outside = f"{shown}.filter(box => box.width < 8 || box.left < 0 || box.right > innerWidth).length"
            assert (tab.run(outside), tab.run(TOO_WIDE)) == (0, 0), "every node can be seen and pressed"
            assert "1 node" in text_of(tab) or f"{nodes:,}" in text_of(tab)


def test_pages_read_and_actions_work_without_javascript(browser: Browser):
    site = PlayedSite(small_cluster())
    with opened(browser, site, scripts=False) as tab:
        assert tab.run("location.pathname") == "/", "the login needs no script"
        assert not tab.run(IS_LIVE), "scripts are off"
        expected = {
            "/": ("gpu-1", "gpu-10", "being repaired", "°C", "Xid 79, fell off the bus", "llama-k3f9x"),
            "/runs": ("llama-k3f9x", "2.139", "vit-q8m2z"),
            "/run/llama-k3f9x": ("gpu-4", "no answer from host", "loss", "step time"),
            "/node/gpu-8": ("gpu-8", "NVIDIA H100", "dmesg.txt", "returned to service"),
            "/queue": ("sweep <img src=x>", "Resources", "bob"),
            "/events": ("drained by ada in the web page: fan is loud",),
            "/goodput": ("llama-k3f9x",),
            "/users": ("ada", "nlp", "vision"),
            "/drills": ("91",),
        }
        for path, words in expected.items():
            visit(tab, path)
            seen = tab.run("document.body.textContent")
            assert [word for word in words if word not in seen] == [], path
        visit(tab, "/node/gpu-3")
        tab.run("document.querySelector('a[href*=\"do=drain\"]').click()")
        tab.until("location.pathname === '/confirm' && document.querySelector('form[action=\"/do\"] button.primary')")
        assert site.actions.done == [], "it asks first"
        tab.run("document.querySelector('form[action=\"/do\"] button.primary').click()")
        tab.until("location.pathname === '/node/gpu-3'")
        assert [(action.kind, action.node) for action, _ in site.actions.done] == [(ActionKind.DRAIN, "gpu-3")]


# Hostile texts


class HostileData(PlayedData):
    """Node details in which every text that other people can write is HTML."""

    def node_details(self, node: str) -> NodeDetails:
        return replace(
            super().node_details(node),
            tried=(EVIL,),
            excused=(EVIL,),
            checks=(CheckRecord(1.0, EVIL, Verdict.FAILED, EVIL),),
            events=(event(1, EVIL, node, EventKind.REQUEST),),
            evidence=(EvidenceBundle(EVIL, ((EVIL, 1),)),),
        )

    def run_details(self, view: RunPicture) -> RunDetails:
        entries = [{key: EVIL if isinstance(value, str) and key in ("node", "why", "what") else value
                    for key, value in entry.items()} for entry in journal()]  # fmt: skip
        return replace(super().run_details(view), entries=tuple(entries))

    def user_hours(self, days: int) -> list[UserHours]:
        return [UserHours(EVIL, EVIL, 1, 2.0, 3.0)]


def hostile_cluster() -> PlayedSources:
    """A cluster in which names, reasons, accounts, notes and events are HTML."""
    sources = small_cluster()
    assert isinstance(sources.slurm_part, SlurmPart) and isinstance(sources.controller_part, ControllerPart)
    infos = [replace(each, reason=EVIL, partitions=(EVIL,)) for each in sources.slurm_part.nodes]
    jobs = [job(7, EVIL, EVIL, nodes=("gpu-1",), reason=EVIL, partition=EVIL, account=EVIL)]
    records = {name: replace(each, note=EVIL, reason=EVIL) for name, each in sources.controller_part.nodes.items()}
    events = (event(1, EVIL, "gpu-1", EventKind.REQUEST), event(2, EVIL, EVIL))
    controller = replace(sources.controller_part, nodes=records, events=events)
    made = (run("llama-k3f9x", EVIL, 1001, ("gpu-1", EVIL)), run("old-aaaaa", EVIL, 1001, (), RunPhase.ENDED))
    runs = tuple(replace(each, status=replace(each.status, name=EVIL)) for each in made)
    return PlayedSources(SlurmPart(tuple(infos), tuple(jobs)), controller, runs)


def test_html_in_the_texts_of_others_is_shown_and_never_runs(browser: Browser):
    site = PlayedSite(hostile_cluster(), data=HostileData())
    shown = 0
    with opened(browser, site) as tab:
        for path in (*SECTIONS, "/run/llama-k3f9x", "/node/gpu-1", "/node/gpu-8", "/confirm?do=drain&node=gpu-1"):
            visit(tab, path)
            if not path.startswith("/confirm"):
                tab.until(IS_LIVE)
            assert (path, tab.run("window.harmed ?? 0")) == (path, 0)
            assert tab.run("document.querySelectorAll('img, main script, [onerror], [onload]').length") == 0, path
            shown += "onerror" in tab.run("document.body.textContent")
    assert shown >= 6, "the texts were on the pages"
