// Before the first paint: the colours that were chosen on this device.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* storage may be refused: as the system */ }
