// Keys for all pages, and what the list of jobs does beside htmx: ticks that survive a refresh, orders behind a preview.
"use strict";

// --- Keys: not while something is typed, nor with a modifier, nor over a dialog.
const inField = (element) => element.closest("input:not([type=checkbox]), textarea, select, [contenteditable]");
const jobRows = () => [...document.querySelectorAll("#live tr[id^=job-]")];
const currentRow = () => document.activeElement?.closest("#live tr[id^=job-]");

function move(step) {
  const rows = jobRows(), at = rows.indexOf(currentRow());
  const row = rows[at < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + step, 0), rows.length - 1)];
  row?.querySelector("a.id")?.focus();
}

const keys = {
  "/": () => { const box = $("search"); if (box) { box.focus(); box.select(); } else location.assign(document.documentElement.dataset.jobs); },
  "j": () => move(1),
  "k": () => move(-1),
  "x": () => currentRow()?.querySelector("input[type=checkbox]")?.click(),
  "?": () => $("keys").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (event.key === "Escape" && event.target.id === "search") return event.target.blur();
  if (inField(event.target) || document.querySelector("dialog[open]") || !Object.hasOwn(keys, event.key)) return;
  event.preventDefault();
  keys[event.key]();
});

document.addEventListener("click", (event) => { if (event.target.closest("[data-close]")) event.target.closest("dialog").close(); });

// --- Ticks: of single jobs, or all that match. The refreshed part is drawn anew from them.
const ticked = new Set();
let isAll = false;

function showTicks() {
  const bar = $("bulk");
  if (!bar) return;
  const boxes = [...document.querySelectorAll("#live input[name=job_id]")];
  for (const box of boxes) box.checked = isAll || ticked.has(box.value);
  const page = $("tick-page"), here = boxes.filter((box) => box.checked).length;
  if (page) { page.checked = boxes.length > 0 && here === boxes.length; page.indeterminate = here > 0 && here < boxes.length; }
  const words = isAll ? `All that match are selected: ${bar.dataset.total}` : ticked.size ? `${ticked.size} selected` : "None is selected";
  if ($("ticked").textContent !== words) $("ticked").textContent = words;
  $("tick-all").setAttribute("aria-pressed", String(isAll));
  for (const button of bar.querySelectorAll("[data-order]")) button.disabled = !isAll && !ticked.size;
}

document.addEventListener("change", (event) => {
  if (event.target.id === "tick-page") {
    isAll = false;
    for (const box of document.querySelectorAll("#live input[name=job_id]")) event.target.checked ? ticked.add(box.value) : ticked.delete(box.value);
  } else if (event.target.name === "job_id") {
    if (isAll) { isAll = false; for (const box of document.querySelectorAll("#live input[name=job_id]:checked")) ticked.add(box.value); }
    event.target.checked ? ticked.add(event.target.value) : ticked.delete(event.target.value);
  } else return;
  showTicks();
});

document.addEventListener("click", (event) => {
  if (event.target.closest("#tick-all")) { isAll = !isAll; ticked.clear(); return showTicks(); }
  const button = event.target.closest("#bulk [data-order]");
  if (!button) return;
  const target = isAll ? `{"matching": ${$("bulk").dataset.matching}}` : JSON.stringify({job_ids: [...ticked]});
  htmx.ajax("POST", $("bulk").dataset.preview, {source: button, target: "#preview", swap: "innerHTML", values: {order: button.dataset.order, target}});
});

document.addEventListener("htmx:after:swap", () => {
  showTicks();
  const dialog = $("order");
  if (dialog && $("preview").childElementCount && !dialog.open) dialog.showModal();
});

$("order")?.addEventListener("close", () => {
  const isOver = !$("preview").querySelector("form[hx-post]");
  $("preview").replaceChildren();  // what goes on by itself ends with its form
  if (isOver) { ticked.clear(); isAll = false; }
  showTicks();
});
showTicks();
