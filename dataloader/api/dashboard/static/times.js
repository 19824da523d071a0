// How long ago an instant is, kept true without a request, and the choice of the zone.
// The server writes each instant in the zone of the page; these words stand in its place, and it stays in the title.
"use strict";

const AGES = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"]], FARTHEST = 7 * 86_400;
const ahead = Number(document.documentElement.dataset.now) * 1000 - Date.now() || 0;  // of this machine's clock
const written = new WeakMap();  // of an element: the server's words, and ours in their place

function age(seconds) {
  const [size, unit] = AGES.find(([size]) => Math.abs(seconds) >= size) || [1, "s"];
  const words = `${Math.floor(Math.abs(seconds) / size)} ${unit}`;
  return Math.abs(seconds) < 1 ? "now" : seconds > 0 ? `${words} ago` : `in ${words}`;
}

function retell() {
  const now = Date.now() + ahead;
  for (const each of document.querySelectorAll("time.ago")) {
    const known = written.get(each), text = each.textContent;
    const theirs = known && text === known.ours ? known.theirs : text;
    const seconds = (now - Date.parse(each.dateTime)) / 1000;
    const ours = Math.abs(seconds) < FARTHEST ? age(seconds) : theirs;
    written.set(each, {theirs, ours});
    if (text !== ours) each.textContent = ours;
  }
}

retell();
setInterval(() => { if (!document.hidden) retell(); }, 1000);
// A refresh brings the server's words back; this runs before they are painted.
if (live) new MutationObserver(retell).observe(live, {childList: true, characterData: true, subtree: true});

// --- The zone: of the installation, UTC, or the browser's. Pages come in it, so it is kept where the server sees it.
const zones = $("zone"), own = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";

function keep(name) {
  const secure = location.protocol === "https:" ? "; secure" : "";
  document.cookie = `dl_zone=${name}; path=/; max-age=${name ? 31_536_000 : 0}; samesite=lax${secure}`;
  location.reload();
}

if (zones) {
  zones.querySelector("[value=browser]").textContent = `${own} (this browser)`;
  zones.addEventListener("change", () => keep({server: "", utc: "UTC", browser: own}[zones.value]));
  // The reader has travelled. A zone that the server does not know would not be chosen again.
  if (zones.dataset.choice === "browser" && zone() !== own) keep(own);
}
