// Applies the previously chosen theme before the page is drawn; the default is the system's theme.
"use strict";
try {
  const chosen = localStorage.getItem("moonpool-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is unavailable: use the system's theme.
}
