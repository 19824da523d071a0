// The buttons that copy a text: their own, or that of an element of the page.
"use strict";

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copies]");
  if (!button) return;
  const {text, of, copies} = button.dataset;
  try {
    await copied(text ?? $(of).textContent);
    tell(`Copied ${copies}.`, "ok");
  } catch {
    tell("The browser does not let this page copy. Select the text and copy it by hand.", "bad");
  }
});

// Without https a page has no clipboard of its own, except on this machine.
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  area.readOnly = true;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  if (!isDone) throw new Error("refused");
}
