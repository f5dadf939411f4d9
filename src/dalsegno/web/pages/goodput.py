"""Goodput of runs in time and money, and GPU hours of users."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.runs.coordinator.reports.goodput import Goodput, TimeKind
from dalsegno.web.charts import shares_bar
from dalsegno.web.html import DASH, Markup, clock, link, number, plural, table, tag
from dalsegno.web.pages.labels import run_chip, run_link
from dalsegno.web.pages.runs import goodput_bar
from dalsegno.web.snapshot import RunPicture
from dalsegno.web.view import GpuPrice, Page, PageContext, PagePart, UserHours, section

DAYS = (1, 7, 30)
MAX_ROWS = 100


def goodput_page(context: PageContext) -> Page:
    """Return the page that shows how all runs have spent their time, and the cost."""
    views = [view for view in context.snapshot.runs if view.progress]
    gpus = {view.run: context.data.gpus_of(view) for view in views}
    price = context.data.gpu_price
    totals = _totals(views, len(context.snapshot.runs), gpus, price.amount)
    by_run = section("goodput", "By run", _table(views[:MAX_ROWS], gpus, price.amount), note=_note(price))
    return Page("Goodput", "goodput", (totals, by_run))


def _note(price: GpuPrice) -> str:
    return f"GPUs: the largest number that the run has held, with its spares; {price.text}"


def _spent(views: Sequence[RunPicture], weights: dict[str, int] | None = None) -> dict[TimeKind, float]:
    found = dict.fromkeys(TimeKind, 0.0)
    for view in views:
        account = view.progress.account if view.progress else Goodput(0.0)
        for kind, seconds in account.spent.items():
            found[kind] += seconds * (1 if weights is None else weights[view.run])
    return found


def _totals(views: Sequence[RunPicture], count: int, gpus: dict[str, int], price: float) -> PagePart:
    spent, weighted = _spent(views), _spent(views, gpus)
    total, gpu_s = sum(spent.values()), sum(weighted.values())
    if not total:
        return section("goodput-all", "All runs", tag("p", "No run has reported a step yet.", class_="empty"))
    items = [
        tag("li", tag("span", class_=f"key time-{kind.value}"), f"{kind.value} ",
            tag("b", f"{spent[kind] / total:.1%}"), f" {clock(spent[kind])}",
            _gpu_hours(weighted[kind], price) if gpu_s else "")
        for kind in TimeKind
    ]  # fmt: skip
    bar = shares_bar([(f"time-{kind.value}", spent[kind]) for kind in TimeKind], "time of all runs")
    reporting = "" if len(views) == count else f", {len(views):,} report steps"
    note = f"{plural(count, 'run')}{reporting}, {spent[TimeKind.PRODUCTIVE] / total:.1%} productive"
    return section("goodput-all", "All runs", bar, tag("ul", items, class_="legend wide-legend"), note=note)


def _gpu_hours(gpu_s: float, price: float) -> str:
    hours = gpu_s / 3600
    return f", {hours:,.1f} GPU hours" + (f", {hours * price:,.2f}" if price else "")


def _table(views: Sequence[RunPicture], gpus: dict[str, int], price: float) -> Markup:
    head = ["Run", "State", "User", "GPUs", "Goodput", "Productive", "Lost", "Other", "GPU hours", "Failures"]
    if price:
        head += ["Cost", "Lost cost"]
    return table(head, [_row(view, gpus[view.run], price) for view in views], empty="No run has reported a step yet.",
                 class_="wide")  # fmt: skip


def _row(view: RunPicture, gpus: int, price: float) -> list[object]:
    account = view.progress.account if view.progress else Goodput(0.0)
    total = sum(account.spent.values())
    good, lost = account.spent.get(TimeKind.PRODUCTIVE, 0.0), account.spent.get(TimeKind.LOST, 0.0)
    hours = total * gpus / 3600
    row: list[object] = [
        tag("th", run_link(view.run), scope="row"), run_chip(view.status), view.status.user, number(gpus or DASH),
        tag("td", tag("span", f"{account.share:.0%} ", goodput_bar(account), class_="inline-bar")),
        number(clock(good)), number(clock(lost)), number(clock(total - good - lost)),
        number(f"{hours:,.2f}" if gpus else DASH), number(account.failures),
    ]  # fmt: skip
    return [*row, number(f"{hours * price:,.2f}"), number(f"{lost * gpus / 3600 * price:,.2f}")] if price else row


def users_page(context: PageContext) -> Page:
    """Return the page with the GPU hours of users in the last days."""
    asked = context.query.get("days", "")
    days = int(asked) if asked in map(str, DAYS) else 7
    hours = context.data.user_hours(days)
    links = [link(f"/users?days={each}", plural(each, "day"), class_="on" if each == days else None) for each in DAYS]
    choice = tag("span", links, class_="choice")
    if hours is None:
        text = (
            "There are no GPU hours: without accounting, Slurm does not record which jobs ran and how many GPUs they "
            "had. Set slurm.accounting: true in the cluster file. Jobs that start after that are counted."
        )
        return Page("Users", "users", (section("users", "GPU hours", tag("p", text, class_="empty")), _now(context)))
    most = max((each.gpu_hours for each in hours), default=0.0)
    price = context.data.gpu_price
    head = ["User", "Account", "Jobs", "GPU hours", "Node hours", *(["Cost"] if price.amount else []), ""]
    body = table(head, [_user(each, most, price.amount) for each in hours], empty="No job ran in this time.")
    cost = tag("p", f"Cost {price.text}.", class_="note") if price.amount else None
    return Page("Users", "users", (section("users", "GPU hours", body, cost, note=choice), _now(context)))


def _user(each: UserHours, most: float, price: float) -> list[object]:
    bar = shares_bar([("busy", each.gpu_hours), ("none", max(most - each.gpu_hours, 0.0))], "share of the largest")
    money = [number(f"{each.gpu_hours * price:,.2f}")] if price else []
    return [
        tag("th", each.user, scope="row"), each.account, number(f"{each.jobs:,}"), number(f"{each.gpu_hours:,.1f}"),
        number(f"{each.node_hours:,.1f}"), *money, tag("td", bar, class_="bar-cell"),
    ]  # fmt: skip


def _now(context: PageContext) -> PagePart:
    used: dict[str, int] = {}
    for job in context.snapshot.jobs:
        if job.nodes and not job.state.ended:
            used[job.user] = used.get(job.user, 0) + job.gpus
    rows = [
        [tag("th", user, scope="row"), number(gpus)] for user, gpus in sorted(used.items(), key=lambda one: -one[1])
    ]
    return section("users-now", "GPUs in use now", table(["User", "GPUs"], rows, empty="No job runs."))
