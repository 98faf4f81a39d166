// The page. Its state is in the URL, and everything is drawn from the state.

import * as answer from "./answer.js";
import { credentials } from "./api.js";
import { $ } from "./dom.js";
import * as choices from "./filters.js";
import * as keys from "./keys.js";
import * as pipeline from "./pipeline.js";
import * as search from "./search.js";
import * as signin from "./signin.js";
import * as address from "./state.js";
import * as story from "./story.js";
import { queryStems } from "./words.js";

let state = address.read();
let openedResult = null;
/** The result whose document the drawer shows. */

const turnsOf = new Map();
/** The conversation before each follow-up question of this visit, by the question. */

const showResults = () => search.searchNow(state, openDocument);

function change(changes, options) {
  const searchChanged = ["q", "mode", "sort", "source", "type", "author", "meta", "since", "before"].some((name) => name in changes && changes[name] !== state[name]);
  state = { ...state, ...changes };
  if (searchChanged && !("answer" in changes)) state.answer = false;
  address.write(state, options);
  if (searchChanged && !state.answer) answer.stop();
}

/** Draw everything from the state, after loading and after going back or forward. */
async function render() {
  const searching = state.view === "search";
  $("view-search").hidden = !searching;
  $("view-pipeline").hidden = searching;
  for (const tab of document.querySelectorAll(".tabs a")) {
    tab.toggleAttribute("aria-current", false);
    if (tab.dataset.view === state.view) tab.setAttribute("aria-current", "page");
    if (tab.dataset.view === "pipeline") tab.hidden = !signin.isOperator() && searching;
  }
  document.title = searching ? (state.q ? `${state.q} – Penstock` : "Penstock") : "Pipeline – Penstock";
  pipeline[searching ? "stop" : "start"]();
  if ($("query").value !== state.q) $("query").value = state.q;
  for (const input of $("modes").querySelectorAll("input")) input.checked = input.value === state.mode;
  drawOrder();
  choices.drawFilters(state, applyFilters);
  showDocument();
  if (!searching) return;
  if (state.answer && state.q.trim()) {
    if (!answer.isShown(question())) await writeAnswer();
  } else {
    answer.stop();
    await showResults();
  }
}

function drawOrder() {
  $("sort").value = address.order(state);
  $("sort").disabled = state.mode === "vector";
}

function applyFilters(changes) {
  change(changes);
  choices.drawFilters(state, applyFilters);
  showResults();
}

function openDocument(result) {
  openedResult = result;
  change({ doc: result.document_id, chunk: result.chunk_id ?? "" });
  showDocument();
}

function showDocument() {
  if (!state.doc) return void ($("story").open && $("story").close());
  const passage = openedResult?.document_id === state.doc ? openedResult.text : undefined;
  story.show(state.doc, {
    passage, stems: queryStems(state.q),
    onClosed() {
      if (state.doc) change({ doc: "", chunk: "" });
      const from = openedResult && document.querySelector(`#results article[data-chunk="${CSS.escape(openedResult.chunk_id ?? "")}"]`);
      openedResult = null;
      from?.focus({ preventScroll: true });
    },
  });
}

const question = () => {
  const turns = turnsOf.get(state.q.trim());
  return { question: state.q.trim(), filters: address.filters(state), ...(state.mode === "hybrid" ? {} : { mode: state.mode }), ...(turns ? { turns } : {}) };
};

function followUp(text, turns) {
  turnsOf.set(text, turns);
  change({ q: text, answer: true });
  render();
}

async function writeAnswer() {
  const body = question();
  if (!body.question) return void $("query").focus();
  if (!state.answer) change({ answer: true });
  search.showNotices([]);
  const showPassages = (passages) => search.showPassages(passages, body.question, openDocument);
  await answer.streamAnswer(body, { showPassages, close: closeAnswer, followUp });
}

function closeAnswer() {
  answer.stop();
  if (!state.answer) return;
  change({ answer: false });
  showResults();
}

function escape() {
  if (state.answer) closeAnswer();
  else if (!$("filters").hidden) toggleFilters();
  else if (document.activeElement === $("query")) $("query").blur();
  else $("query").focus();
}

function toggleFilters() {
  $("filters").hidden = !$("filters").hidden;
  $("filters-open").setAttribute("aria-expanded", String(!$("filters").hidden));
}

const THEMES = ["system", "light", "dark"];
const THEME_ICONS = { system: "◐", light: "☀", dark: "☾" };

function setTheme(next) {
  if (next === "system") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("penstock-theme");
  } else {
    document.documentElement.dataset.theme = next;
    localStorage.setItem("penstock-theme", next);
  }
  $("theme").textContent = THEME_ICONS[next];
  $("theme").title = `Colours: ${next === "system" ? "the system's setting" : next} (t)`;
  $("theme").setAttribute("aria-label", `Colours: ${next === "system" ? "the system's setting" : next}`);
}

const currentTheme = () => document.documentElement.dataset.theme ?? "system";
const nextTheme = () => setTheme(THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length]);

/** Start after the page was loaded, and again after the credentials changed. */
async function start() {
  for (const part of [search, choices, pipeline, story]) part.clear();
  answer.stop();
  turnsOf.clear();
  openedResult = null;
  choices.drawFilters(state, applyFilters);
  try {
    if (!(await signin.identify())) return;
    await choices.loadFacets();
  } catch (error) {
    search.showError(error);
  }
  await render();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  change({ q: $("query").value });
  address.endTyping();
  showResults();
});
$("query").addEventListener("input", () => {
  turnsOf.delete($("query").value.trim());
  change({ q: $("query").value }, { typing: true });
  document.title = state.q ? `${state.q} – Penstock` : "Penstock";
  search.searchSoon(state, openDocument);
});
$("modes").addEventListener("change", (event) => {
  change({ mode: event.target.value });
  drawOrder();
  showResults();
});
$("sort").addEventListener("change", (event) => {
  change({ sort: event.target.value });
  showResults();
});
$("more-results").addEventListener("click", () => search.showMore(state, openDocument));
$("answer-it").addEventListener("click", writeAnswer);
$("filters-open").addEventListener("click", toggleFilters);
$("help-open").addEventListener("click", keys.showHelp);
$("theme").addEventListener("click", nextTheme);
$("who").addEventListener("click", () => signin.open(start));
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-view], a[data-home]");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  if (link.dataset.home !== undefined) change({ ...address.EMPTY });
  else change({ view: link.dataset.view });
  render();
});
// The service answered 401: there are no credentials yet, or they have expired.
document.addEventListener("unauthenticated", () => {
  const known = credentials().token || credentials().as;
  if (!$("signin").open) signin.open(start, known ? "The service does not know this token, or it has expired." : "");
});
addEventListener("popstate", () => {
  state = address.read();
  render();
});
keys.listenForKeys({
  answer: writeAnswer, escape, theme: nextTheme,
  search: () => $("query").select(),
  searching: () => state.view === "search",
});
setTheme(currentTheme());
if (matchMedia("(hover: hover)").matches && !state.doc) $("query").focus();
start();
