// The chart of the overview: processed runs, and below them, on a scale of their own, the failed ones.
// Canvas knows no CSS variables, so its colours are read from the page.
"use strict";

const LANES = {processed: {height: 150, plot: 132}, failed: {height: 84, plot: 42}};  // pixels; of these for bars
const LEAST = 4;  // pixels of a bar that is not zero
let lanes = null;

function figures() {
  const source = $("pace-data");
  return source && {columns: JSON.parse(source.dataset.columns), step: Number(source.dataset.step)};
}

function color(name) {
  const probe = $("pace-chart");
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.style.color = "";
  return found;
}

function ceiling(high) { return Math.max(high * 1.1, 4); }

// Of one lane: the instants, the steps that are over, and the step so far, which is paler.
function bars(instants, counts, plot) {
  const last = counts.length - 1, least = LEAST * ceiling(Math.max(...counts)) / plot;
  const heights = counts.map((n) => (n ? Math.max(n, least) : n));
  return [instants, heights.map((n, at) => (at < last ? n : null)), heights.map((n, at) => (at < last ? null : n))];
}

function clock(seconds, how) { return new Date(seconds * 1000).toLocaleString("en-GB", {timeZone: zone(), ...how}); }

const HOUR = {hour: "2-digit", minute: "2-digit"}, DAY = {weekday: "short", day: "numeric"};

function said({columns: [instants, processed, failed], step}, at) {
  const from = instants[at], days = step * instants.length > 86_400 ? {...DAY, month: "short"} : {};
  const until = at === instants.length - 1 ? "now" : clock(from + step, HOUR);
  const count = (n) => n.toLocaleString("en");
  return `${clock(from, {...days, ...HOUR})} to ${until}: ${count(processed[at])} ended, ${count(failed[at])} of them failed`;
}

function point(lane) {
  const known = figures(), left = lane.cursor.left;
  if (!known || left == null || left < 0) return;
  const at = Math.floor((lane.posToVal(left, "x") - known.columns[0][0]) / known.step);
  if (at >= 0 && at < known.columns[0].length) $("pace-point").textContent = said(known, at);
}

function lane(name, tint, holder, known) {
  const {height} = LANES[name], isLast = name === "failed", span = known.step * known.columns[0].length;
  const axis = {stroke: color("dim"), grid: {stroke: color("line"), width: 1}, ticks: {stroke: color("line"), width: 1}, font: "12px system-ui, sans-serif"};
  const series = (label, more) => ({label, stroke: color(tint), fill: color(tint), width: 0, points: {show: false}, paths: uPlot.paths.bars({size: [0.8, 12], align: 1}), ...more});
  const place = document.createElement("div");
  place.id = `${name}-lane`;
  holder.append(place);
  return new uPlot({
    width: holder.clientWidth, height,
    tzDate: (second) => uPlot.tzDate(new Date(second * 1000), zone()),
    padding: [10, 20, 0, 0],
    cursor: {y: false, drag: {x: false, y: false}, sync: {key: "throughput"}},
    legend: {show: false},
    // A bar stands to the right of its instant: the last one needs its step too.
    scales: {x: {range: (_, first, last) => [first, last + known.step]}, y: {range: (_, low, high) => [0, ceiling(high)]}},
    axes: [
      {...axis, size: isLast ? 28 : 6, ...(span > 86_400 ? {incrs: [86_400, 172_800]} : {}),
        values: (_, splits) => splits.map((at) => (isLast ? clock(at, span > 86_400 ? DAY : HOUR) : ""))},
      {...axis, size: 56, space: isLast ? 18 : 30, incrs: [1, 2, 5, 10, 20, 50].flatMap((n) => [0, 1, 2, 3, 4, 5, 6, 7].map((power) => n * 100 ** power)).sort((a, b) => a - b),
        values: (_, splits) => splits.map((n) => n.toLocaleString("en", n < 10000 ? {} : {notation: "compact"}))},
    ],
    series: [{}, series(name), series("so far", isLast ? {} : {alpha: 0.5})],
    hooks: {setCursor: [point]},
  }, bars(known.columns[0], known.columns[isLast ? 2 : 1], LANES[name].plot), place);
}

function draw(anew) {
  const holder = $("pace-chart"), known = figures();
  if (!holder || !known) return;
  if (lanes && !anew) {
    lanes[0].setData(bars(known.columns[0], known.columns[1], LANES.processed.plot));
    return lanes[1].setData(bars(known.columns[0], known.columns[2], LANES.failed.plot));
  }
  for (const each of lanes || []) each.destroy();
  holder.replaceChildren();
  lanes = [lane("processed", "done", holder, known), lane("failed", "failed", holder, known)];
}

function fit() {
  for (const [nth, name] of Object.keys(LANES).entries()) lanes?.[nth].setSize({width: $("pace-chart").clientWidth, height: LANES[name].height});
}

if ($("pace-chart")) {
  draw(true);
  new ResizeObserver(fit).observe($("pace-chart"));
  document.addEventListener("htmx:after:swap", (event) => { if (event.detail.ctx.sourceElement === live) draw(false); });
  document.addEventListener("dl:theme", () => draw(true));
}
