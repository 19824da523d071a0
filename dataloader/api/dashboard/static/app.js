// What the pages do beside htmx: refreshing that stays out of the way, questions before buttons, the theme.
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
  label();
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
  label();
}

function label() {
  const isLost = !$("banner").hidden;
  refreshing?.toggleAttribute("data-lost", isLost);
  if (refreshing) refreshing.lastChild.textContent = isLost ? "No answer" : isLive() ? "Live" : "Paused";
}

function zone() { return document.documentElement.dataset.zone || "UTC"; }

// --- What went wrong is said in words; the last values stay.
document.addEventListener("htmx:response:error", (event) => {
  const ctx = event.detail.ctx;
  if (ctx.response.headers.get("Content-Type") === "application/problem+json") return mark(ctx.sourceElement, JSON.parse(ctx.text));
  if (ctx.sourceElement !== live) return tell(ctx.text || "That was refused.", "bad");
  if ("failed" in live.dataset) return;
  warn(ctx.response.status === 401 ? "You are signed out: reload this page to sign in." : ctx.text);
});
document.addEventListener("htmx:error", (event) => {
  const source = event.detail.ctx?.sourceElement;
  if (source === live) warn("The dashboard does not answer.");
  else if (source) tell("The dashboard does not answer. Whether this was done is not known: look again.", "bad");
});

// A form whose fields have faults: each stands at its field, by the longest pointer that the field has of it.
function mark(form, problem) {
  for (const field of form.querySelectorAll("[data-at]")) {
    const at = field.dataset.at, told = $(field.getAttribute("aria-describedby").split(" ")[0]);
    const own = problem.errors.filter((fault) => fault.pointer === at || fault.pointer.startsWith(at + "/"));
    told.textContent = own.map((fault) => fault.message).join("; ");
    field.toggleAttribute("aria-invalid", own.length > 0);
  }
  const known = [...form.querySelectorAll("[data-at]")].map((field) => field.dataset.at);
  const others = problem.errors.filter(({pointer}) => !known.some((at) => pointer === at || pointer.startsWith(at + "/")));
  tell([problem.detail, ...others.map((fault) => fault.message).filter((text) => text !== problem.detail)].join(" "), "bad");
  form.querySelector("[aria-invalid]")?.focus();
}

function warn(text) {
  const banner = $("banner"), words = text + " What is shown is from before.";
  if (banner.textContent !== words) banner.textContent = words;
  banner.hidden = false;
  label();
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

// --- Enter in a field presses the button of its order.
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches("fieldset input")) event.target.closest("fieldset").querySelector("[hx-post]").click();
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
  recolour();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);

function recolour() { document.dispatchEvent(new Event("dl:theme")); }

if (live) seen();
if (live && "failed" in live.dataset) $("seen").textContent = "";
