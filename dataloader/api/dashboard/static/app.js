// What the pages do beside htmx: refreshing that stays out of the way, questions before buttons, the chart, the theme.
// Nothing here makes HTML of text.
"use strict";

const $ = (id) => document.getElementById(id);
const live = $("live");

// --- Refreshing: paused while the tab is hidden or the reader wishes it; an unchanged page is a 304.
let etag = null;
const refreshing = $("refreshing");
const isLive = () => !refreshing || refreshing.getAttribute("aria-pressed") === "true";

refreshing?.addEventListener("click", () => {
  refreshing.setAttribute("aria-pressed", String(!isLive()));
  refreshing.lastChild.textContent = isLive() ? "Live" : "Paused";
  if (isLive()) refresh();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && isLive()) refresh(); });

function refresh() { if (live) htmx.trigger(live, "refresh"); }

document.addEventListener("htmx:config:request", (event) => {
  const ctx = event.detail.ctx;
  if (ctx.sourceElement !== live) return;
  const ticks = ctx.sourceEvent?.type === "every";
  if ((ticks && (document.hidden || !isLive())) || live.querySelector("[data-gone]")) return event.preventDefault();
  if (etag) ctx.request.headers["If-None-Match"] = etag;
});

document.addEventListener("htmx:after:request", (event) => {
  const ctx = event.detail.ctx, status = ctx.response.status;
  if (ctx.sourceElement !== live) return;
  if (status === 200 && "failed" in live.dataset) return location.reload();  // the page around it is missing too
  if (status === 200) etag = ctx.response.headers.get("ETag");
  if (status === 200 || status === 304) seen();
});

function seen() {
  $("seen").textContent = "As of " + new Date().toLocaleTimeString("en-GB", {timeZone: zone()});
  if (!$("banner").hidden) $("banner").hidden = true;
}

function zone() { return document.documentElement.dataset.zone || "UTC"; }

// --- What went wrong is said in words; the last values stay.
document.addEventListener("htmx:response:error", (event) => {
  const ctx = event.detail.ctx;
  if (ctx.sourceElement !== live) return tell(ctx.text || "That was refused.", "bad");
  if ("failed" in live.dataset) return;
  warn(ctx.response.status === 401 ? "You are signed out: reload this page to sign in." : ctx.text);
});
document.addEventListener("htmx:error", (event) => {
  const source = event.detail.ctx?.sourceElement;
  if (source === live) warn("The dashboard does not answer.");
  else if (source) tell("The dashboard does not answer. Whether this was done is not known: look again.", "bad");
});

function warn(text) {
  const banner = $("banner"), words = text + " What is shown is from before.";
  if (banner.textContent !== words) banner.textContent = words;
  banner.hidden = false;
}

function tell(text, kind) {
  const said = document.createElement("p"), away = document.createElement("button");
  said.className = kind;
  said.textContent = text + " ";
  away.type = "button";
  away.className = "quiet";
  away.dataset.dismiss = "";
  away.setAttribute("aria-label", "Dismiss this message");
  away.textContent = "×";
  said.append(away);
  $("flash").replaceChildren(said);
}

document.addEventListener("click", (event) => {
  if (event.target.closest("[data-dismiss]")) $("flash").replaceChildren();
});

// --- Questions: one dialog outside what is refreshed.
document.addEventListener("htmx:confirm", (event) => {
  event.preventDefault();
  const {ctx, issueRequest, dropRequest} = event.detail;
  const dialog = $("confirm"), yes = $("yes");
  $("question").textContent = ctx.confirm;
  yes.textContent = ctx.sourceElement.textContent.trim();
  yes.className = ctx.sourceElement.classList.contains("grave") ? "grave" : "";
  yes.onclick = () => dialog.close("yes");
  $("no").onclick = () => dialog.close("");
  dialog.onclose = () => (dialog.returnValue === "yes" ? issueRequest() : dropRequest());
  dialog.returnValue = "";
  dialog.showModal();
});

// --- The theme: as the system, light, dark.
const themes = ["", "light", "dark"], names = ["system", "light", "dark"];
let chosen = Math.max(0, themes.indexOf(document.documentElement.dataset.theme || ""));
$("chosen").textContent = names[chosen];
$("theme").addEventListener("click", () => {
  chosen = (chosen + 1) % themes.length;
  $("chosen").textContent = names[chosen];
  if (themes[chosen]) document.documentElement.dataset.theme = themes[chosen];
  else delete document.documentElement.dataset.theme;
  try { localStorage.setItem("theme", themes[chosen]); } catch { /* then for this page only */ }
  draw(true);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));

// --- The chart. Canvas knows no CSS variables, so its colours are read from the page.
let chart = null;

function color(name) {
  const probe = $("pace-chart");
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.style.color = "";
  return found;
}

const HEIGHT = 210, PLOT = 170;  // pixels of the chart, and of what is left for bars

// The minutes, what was processed in each that is over, the same of the minute so far, and the failures. Beside a burst
// a few failures would be lower than a pixel: they are drawn 4 pixels high.
function columns([minutes, processed, failed]) {
  const last = minutes.length - 1, least = 4 * ceiling(Math.max(...processed)) / PLOT;
  return [
    minutes,
    processed.map((n, at) => (at < last ? n : null)),
    processed.map((n, at) => (at < last ? null : n)),
    failed.map((n) => (n ? Math.max(n, least) : n)),
  ];
}

function ceiling(high) { return Math.max(high * 1.1, 6); }

function draw(anew) {
  const holder = $("pace-chart"), source = $("pace-data");
  if (!holder || !source) return;
  const data = columns(JSON.parse(source.dataset.pace));
  if (chart && !anew) return chart.setData(data);
  chart?.destroy();
  const axis = {stroke: color("dim"), grid: {stroke: color("line"), width: 1}, ticks: {stroke: color("line"), width: 1}, font: "12px system-ui, sans-serif"};
  const bars = uPlot.paths.bars({size: [0.8, 12], align: 1});
  const series = (label, name, more) => ({label, stroke: color(name), fill: color(name), width: 0, paths: bars, points: {show: false}, ...more});
  chart = new uPlot({
    width: holder.clientWidth, height: HEIGHT,
    tzDate: (second) => uPlot.tzDate(new Date(second * 1000), source.dataset.zone),
    padding: [10, 20, 0, 0],
    cursor: {y: false, drag: {x: false, y: false}},
    legend: {show: false},
    // A bar stands to the right of its instant: the last one needs its minute too.
    scales: {x: {range: (_, first, last) => [first, last + 60]}, y: {range: (_, low, high) => [0, ceiling(high)]}},
    axes: [
      {...axis, size: 30, values: (_, splits) => splits.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB", {timeZone: source.dataset.zone, hour: "2-digit", minute: "2-digit"}))},
      {...axis, size: 56, values: (_, splits) => splits.map((n) => n.toLocaleString("en", n < 10000 ? {} : {notation: "compact"}))},
    ],
    series: [{}, series("processed", "done"), series("so far", "done", {alpha: 0.5}), series("failed", "failed")],
  }, data, holder);
}

new ResizeObserver(() => chart?.setSize({width: $("pace-chart").clientWidth, height: HEIGHT})).observe($("pace-chart") || document.body);
document.addEventListener("htmx:after:swap", (event) => { if (event.detail.ctx.sourceElement === live) draw(false); });
draw(false);
if (live) seen();
if (live && "failed" in live.dataset) $("seen").textContent = "";
