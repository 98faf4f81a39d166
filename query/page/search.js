// Live results: asked for while one types, the one before given up; what is shown stays until the next is there.

import { post } from "./api.js";
import { $, el, plural, say } from "./dom.js";
import { sources } from "./filters.js";
import { card } from "./results.js";
import { filters } from "./state.js";
import { wanted } from "./words.js";

const PAUSE_MS = 160;
/** Without a key: about the time between two keys of somebody who types slowly. */
const TOP = 12;

let running = null;
let waiting = 0;
let last = null;
/** What the list shows: {key, found}. An answer borrows the list and gives it back. */

export function later(state, open) {
  clearTimeout(waiting);
  waiting = setTimeout(() => now(state, open), PAUSE_MS);
}

const keyOf = (state) => JSON.stringify([state.q.trim(), state.mode, filters(state)]);

/** Search, unless that very answer is shown already. */
export async function now(state, open) {
  clearTimeout(waiting);
  running?.abort();
  running = null;
  const key = keyOf(state);
  if (!state.q.trim()) {
    last = null;
    return landing();
  }
  if (last?.key === key) return show(last.found, state, open);
  const mine = (running = new AbortController());
  $("results").setAttribute("aria-busy", "true");
  try {
    const found = await post("v1/search", { query: state.q.trim(), mode: state.mode, top: TOP, filters: filters(state) }, mine.signal);
    if (mine.signal.aborted) return;
    last = { key, found };
    show(found, state, open);
  } catch (error) {
    if (error.name === "AbortError") return;
    last = null;
    failed(error);
  } finally {
    if (running === mine) {
      running = null;
      $("results").removeAttribute("aria-busy");
    }
  }
}

/** Forget what was found: another asks now. */
export function forget() {
  last = null;
}

function show(found, state, open) {
  const stems = wanted(state.q);
  const results = found.results ?? [];
  $("results").dataset.of = state.q.trim();
  $("results").replaceChildren(...results.map((result) => card(result, { stems, query: state.q.trim(), open })));
  $("status").textContent = results.length ? `${plural(results.length, "passage")} · ${Math.round(found.took_ms)} ms` : "";
  notices(found.degraded ?? []);
  empty(found, state);
  steps(found);
  say(results.length ? `${plural(results.length, "passage")} found.` : "Nothing found.");
}

/** Passages that an answer was given, in place of the results. */
export function lend(passages, query, open) {
  const stems = wanted(query);
  $("results").removeAttribute("aria-busy");
  $("results").replaceChildren(...passages.map((one) => card(one, { stems, query, n: one.n, open })));
  $("empty").replaceChildren();
  $("how").hidden = true;
  $("status").textContent = passages.length ? "The passages this answer was given" : "";
}

/** Before the first word: what there is to search. */
function landing() {
  $("results").replaceChildren();
  $("results").removeAttribute("aria-busy");
  $("status").textContent = "";
  $("how").hidden = true;
  notices([]);
  const readable = sources();
  $("empty").replaceChildren(
    el("div", { class: "landing" },
      el("h2", {}, "What would you like to know?"),
      el("p", {}, "Results appear while you type. ", el("kbd", {}, "Ctrl"), " ", el("kbd", {}, "Enter"), " writes an answer from them, with its sources."),
      readable.length > 0 && el("p", { class: "quiet-text" }, "You can search ", readable.slice(0, 8).map((one, n) => [n ? " · " : null, el("strong", {}, one.value)]), readable.length > 8 && ` and ${readable.length - 8} more`)),
  );
}

function empty(found, state) {
  const shown = [];
  if (!(found.results ?? []).length) {
    const narrowed = Boolean(filters(state));
    shown.push(
      el("h2", {}, "Nothing relevant was found"),
      el("p", {}, narrowed ? "Perhaps the filters are too narrow. " : "Try other words, or fewer. ", "Only documents that you may read are searched."),
    );
  } else if (found.relevant === false) {
    $("notices").append(el("p", { class: "note" }, "None of this seems to be about your question: these are only the nearest passages."));
  }
  $("empty").replaceChildren(shown.length ? el("div", { class: "landing" }, shown) : "");
}

/** Say plainly that this is less than it could be. */
export function notices(reasons) {
  $("notices").replaceChildren(...reasons.map((reason) => el("p", { class: "doubt" }, el("strong", {}, "Incomplete: "), reason)));
}

export function failed(error) {
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  $("notices").replaceChildren(el("p", { class: "doubt", role: "alert" }, `${error.message}${wait}`));
  $("results").removeAttribute("aria-busy");
  $("status").textContent = "";
}

function steps(found) {
  const row = (step) => {
    const { step: name, name: other, took_ms, ...facts } = step;
    const told = Object.entries(facts).map(([key, value]) => `${key.replaceAll("_", " ")} ${value}`).join(", ");
    return el("div", {}, el("dt", {}, name ?? other), el("dd", {}, `${took_ms} ms${told ? ` · ${told}` : ""}`));
  };
  $("how").hidden = !(found.steps ?? []).length;
  $("steps").replaceChildren(...(found.steps ?? []).map(row));
}
