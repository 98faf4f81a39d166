// The page: what is asked stands in the address, and everything shown follows from it.

import * as answer from "./answer.js";
import { who } from "./api.js";
import { $ } from "./dom.js";
import * as choices from "./filters.js";
import * as keys from "./keys.js";
import * as pipeline from "./pipeline.js";
import * as search from "./search.js";
import * as signin from "./signin.js";
import * as address from "./state.js";
import * as story from "./story.js";
import { wanted } from "./words.js";

let state = address.read();
let opened = null;
/** The passage that the drawer was opened for. */

const results = () => search.now(state, open);

function change(part, how) {
  const asked = ["q", "mode", "source", "type", "author", "since", "before"].some((name) => name in part && part[name] !== state[name]);
  state = { ...state, ...part };
  if (asked && !("answer" in part)) state.answer = false;
  address.write(state, how);
  if (asked && !state.answer) answer.stop();
}

/** Draw everything from the state: after loading, and after back and forward. */
async function render() {
  const searching = state.view === "search";
  $("view-search").hidden = !searching;
  $("view-pipeline").hidden = searching;
  for (const tab of document.querySelectorAll(".tabs a")) {
    tab.toggleAttribute("aria-current", false);
    if (tab.dataset.view === state.view) tab.setAttribute("aria-current", "page");
    if (tab.dataset.view === "pipeline") tab.hidden = !signin.operator() && searching;
  }
  document.title = searching ? (state.q ? `${state.q} – Penstock` : "Penstock") : "Pipeline – Penstock";
  pipeline[searching ? "stop" : "start"]();
  if ($("query").value !== state.q) $("query").value = state.q;
  for (const input of $("modes").querySelectorAll("input")) input.checked = input.value === state.mode;
  choices.draw(state, filtered);
  showDocument();
  if (!searching) return;
  if (state.answer && state.q.trim()) {
    if (!answer.shows(question())) await write();
  } else {
    answer.stop();
    await results();
  }
}

function filtered(part) {
  change(part);
  choices.draw(state, filtered);
  results();
}

function open(result) {
  opened = result;
  change({ doc: result.document_id, chunk: result.chunk_id ?? "" });
  showDocument();
}

function showDocument() {
  if (!state.doc) return void ($("story").open && $("story").close());
  const passage = opened?.document_id === state.doc ? opened.text : undefined;
  story.show(state.doc, {
    passage, stems: wanted(state.q),
    closed() {
      if (state.doc) change({ doc: "", chunk: "" });
      const from = opened && document.querySelector(`#results article[data-chunk="${CSS.escape(opened.chunk_id ?? "")}"]`);
      opened = null;
      from?.focus({ preventScroll: true });
    },
  });
}

const question = () => ({ question: state.q.trim(), filters: address.filters(state), ...(state.mode === "hybrid" ? {} : { mode: state.mode }) });

async function write() {
  const asked = question();
  if (!asked.question) return void $("query").focus();
  if (!state.answer) change({ answer: true });
  search.notices([]);
  const list = (passages) => search.lend(passages, asked.question, open);
  await answer.write(asked, { list, close: closeAnswer });
}

function closeAnswer() {
  answer.stop();
  if (!state.answer) return;
  change({ answer: false });
  results();
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
const SIGNS = { system: "◐", light: "☀", dark: "☾" };

function theme(next) {
  if (next === "system") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("penstock-theme");
  } else {
    document.documentElement.dataset.theme = next;
    localStorage.setItem("penstock-theme", next);
  }
  $("theme").textContent = SIGNS[next];
  $("theme").title = `Colours: ${next === "system" ? "the system's setting" : next} (t)`;
  $("theme").setAttribute("aria-label", `Colours: ${next === "system" ? "the system's setting" : next}`);
}

const present = () => document.documentElement.dataset.theme ?? "system";
const nextTheme = () => theme(THEMES[(THEMES.indexOf(present()) + 1) % THEMES.length]);

/** Somebody said who they are, or the page was loaded: begin anew. */
async function begin() {
  search.forget();
  try {
    if (!(await signin.recognise())) return;
    await choices.load();
  } catch (error) {
    search.failed(error);
  }
  await render();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  change({ q: $("query").value });
  address.settle();
  results();
});
$("query").addEventListener("input", () => {
  change({ q: $("query").value }, { typing: true });
  document.title = state.q ? `${state.q} – Penstock` : "Penstock";
  search.later(state, open);
});
$("modes").addEventListener("change", (event) => {
  change({ mode: event.target.value });
  results();
});
$("answer-it").addEventListener("click", write);
$("filters-open").addEventListener("click", toggleFilters);
$("help-open").addEventListener("click", keys.help);
$("theme").addEventListener("click", nextTheme);
$("who").addEventListener("click", () => signin.open(begin));
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-view], a[data-home]");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  if (link.dataset.home !== undefined) change({ ...address.EMPTY });
  else change({ view: link.dataset.view });
  render();
});
// At the beginning, or when what proved it has expired.
document.addEventListener("stranger", () => {
  const known = who().token || who().as;
  if (!$("signin").open) signin.open(begin, known ? "The service does not know this token, or it has expired." : "");
});
addEventListener("popstate", () => {
  state = address.read();
  render();
});
keys.listen({
  answer: write, escape, theme: nextTheme,
  search: () => $("query").select(),
  searching: () => state.view === "search",
});
theme(present());
if (matchMedia("(hover: hover)").matches && !state.doc) $("query").focus();
begin();
