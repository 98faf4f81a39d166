// Runs before anything is painted, so that a chosen theme does not flash. Not a module: those run later.
"use strict";
(() => {
  const chosen = localStorage.getItem("penstock-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
