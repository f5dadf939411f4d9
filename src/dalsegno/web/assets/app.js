// Live updates, ages of times, dialogs and the cursor of charts. All pages can be read without this script.
"use strict";

const main = document.getElementById("main");
const live = document.getElementById("live");
let source = null;
let known = 0;
let heard = 0;

function show(state, text) {
  if (!live) return;
  live.className = "live " + state;
  if (live.textContent !== text) live.textContent = text;
  main.classList.toggle("stale", state === "off");
}

// Replace the elements that have changed, and keep focus, open details and scroll positions.
function apply(parts) {
  for (const [id, html] of Object.entries(parts)) {
    const old = document.getElementById(id);
    if (!old) return location.reload();
    const template = document.createElement("template");
    template.innerHTML = html;
    const fresh = template.content.firstElementChild;
    const focused = old.contains(document.activeElement) ? address(document.activeElement) : null;
    const scrolled = [...old.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    old.replaceWith(fresh);
    fresh.querySelectorAll(".scroll").forEach((each, index) => { each.scrollLeft = scrolled[index] || 0; });
    if (focused) fresh.querySelector(focused)?.focus({ preventScroll: true });
  }
  tick();
}

function address(element) {
  if (element.id) return "#" + CSS.escape(element.id);
  const target = element.getAttribute("href");
  return target ? `a[href="${CSS.escape(target)}"]` : null;
}

function connect() {
  const path = main?.dataset.stream;
  if (!path || source) return;
  const url = new URL(path, location.href);
  if (known) url.searchParams.set("n", known);
  source = new EventSource(url);
  source.addEventListener("update", (event) => {
    const data = JSON.parse(event.data);
    known = data.n;
    heard = Date.now();
    apply(data.parts);
    show("on", "live");
  });
  source.addEventListener("ping", () => { heard = Date.now(); show("on", "live"); });
  source.addEventListener("reload", () => location.reload());
  source.onerror = () => {
    show("off", "reconnecting");
    if (source?.readyState === EventSource.CLOSED) {  // refused: the session has ended, or too many pages are open
      disconnect();
      setTimeout(check, 3000);
    }
  };
}

async function check() {
  try {
    const answer = await fetch(location.href, { method: "HEAD", cache: "no-store" });
    if (answer.status === 401) return location.reload();
  } catch { /* the server does not answer yet */ }
  connect();
}

function disconnect() {
  source?.close();
  source = null;
}

// Times: shown as an age ("3 min ago") or as a duration ("3 min").
function span(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s >= 86400) return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  if (s >= 3600) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  if (s >= 60) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${s} s`;
}

function tick() {
  const now = Date.now();
  for (const element of document.querySelectorAll("time[data-how]")) {
    const passed = (now - Date.parse(element.dateTime)) / 1000;
    const text = element.dataset.how === "for" ? span(passed) : passed < 0 ? `in ${span(-passed)}` : `${span(passed)} ago`;
    if (element.textContent !== text) element.textContent = text;
  }
  if (source && heard && now - heard > 15000) show("off", "no answer");
}

// Confirmation: the form of the confirmation page is shown as a dialog.
document.addEventListener("click", async (event) => {
  const link = event.target.closest?.('a[href^="/confirm"]');
  if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    try {
      const answer = await fetch(link.href, { cache: "no-store" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const form = page.querySelector("form.confirm");
      if (!answer.ok || !form) { location.href = link.href; return; }
      const dialog = document.createElement("dialog");
      dialog.setAttribute("aria-label", form.querySelector("h2").textContent);
      dialog.append(document.importNode(form, true));
      document.body.append(dialog);
      dialog.addEventListener("close", () => dialog.remove());
      dialog.showModal();
    } catch { location.href = link.href; }
    return;
  }
  const close = event.target.closest?.("dialog [data-close]");
  if (close) { event.preventDefault(); close.closest("dialog").close(); }
  else if (event.target.tagName === "DIALOG") event.target.close();
});

// Charts: a cursor that shows the values at a time.
const SVG = "http://www.w3.org/2000/svg";
document.addEventListener("pointermove", (event) => {
  const chart = event.target.closest?.("svg.chart");
  document.querySelectorAll(".cursor, .cursor-text").forEach((each) => { if (!chart || each.ownerSVGElement !== chart) each.remove(); });
  if (chart) follow(chart, event);
});

function follow(chart, event) {
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
  const left = Number(chart.dataset.left), right = Number(chart.dataset.right);
  const x = Math.min(Math.max(point.x, left), right);
  chart.querySelectorAll(".cursor, .cursor-text").forEach((each) => each.remove());
  const line = document.createElementNS(SVG, "line");
  line.setAttribute("class", "cursor");
  for (const [name, value] of Object.entries({ x1: x, x2: x, y1: 10, y2: chart.viewBox.baseVal.height - 26 })) line.setAttribute(name, value);
  chart.append(line);
  for (const plot of chart.querySelectorAll(".panel-plot")) {
    const nearest = closest(plot, x);
    if (!nearest) continue;
    const { low, high, top, height, unit } = plot.dataset;
    const share = (Number(top) + Number(height) - nearest.y) / Number(height);
    const value = Number(low) + share * (Number(high) - Number(low));
    const text = document.createElementNS(SVG, "text");
    text.setAttribute("class", "cursor-text");
    text.setAttribute("x", x > (left + right) / 2 ? x - 6 : x + 6);
    text.setAttribute("text-anchor", x > (left + right) / 2 ? "end" : "start");
    text.setAttribute("y", Number(top) + 6);
    text.textContent = value.toPrecision(4) + unit;
    chart.append(text);
  }
}

function closest(plot, x) {
  let best = null;
  for (const curve of plot.querySelectorAll("polyline"))
    for (const point of curve.points) if (!best || Math.abs(point.x - x) < Math.abs(best.x - x)) best = point;
  return best;
}

// A hidden page closes its stream, because a browser opens at most six connections to a server.
document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
addEventListener("pagehide", disconnect);
addEventListener("pageshow", () => { if (!document.hidden) connect(); });

tick();
setInterval(tick, 1000);
if (!document.hidden) connect();
