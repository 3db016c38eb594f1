// Before the page is drawn: the theme that was chosen here before. Without one, the system's holds.
"use strict";
try {
  const chosen = localStorage.getItem("moonpool-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is closed: the system's theme it is.
}
