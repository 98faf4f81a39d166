// Runs before the first paint, so that the page does not flash in another theme. It is no module, because modules run later.
"use strict";
(() => {
  const chosen = localStorage.getItem("penstock-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
