// Live results: searched while the user types. A new search cancels the previous one, whose results stay until it completes.

import { post } from "./api.js";
import { $, el, plural, announce } from "./dom.js";
import { sources } from "./filters.js";
import { freshnessLine } from "./freshness.js";
import { resultCard } from "./results.js";
import * as standing from "./standing.js";
import { filters, order } from "./state.js";
import { queryStems } from "./words.js";

const PAUSE_MS = 160;
/** Pause in typing after which a search starts, about the time between two keys of a slow typist. */
const TOP = 12;

let running = null;
let timer = 0;
let last = null;
/** The last search, {key, response}: its results are shown again when an answer is closed. */

export function searchSoon(state, open) {
  clearTimeout(timer);
  timer = setTimeout(() => searchNow(state, open), PAUSE_MS);
}

const keyOf = (state) => JSON.stringify(request(state));

const request = (state) => ({ query: state.q.trim(), mode: state.mode, top: TOP, filters: filters(state), ...(order(state) === "relevance" ? {} : { sort: order(state) }) });

/** Search, unless the response to the same search is known. */
export async function searchNow(state, open) {
  clearTimeout(timer);
  running?.abort();
  running = null;
  const key = keyOf(state);
  if (!state.q.trim()) {
    last = null;
    return showLandingPage();
  }
  if (last?.key === key) return renderResults(last.response, state, open);
  const controller = (running = new AbortController());
  $("results").setAttribute("aria-busy", "true");
  try {
    const response = await post("v1/search", request(state), controller.signal);
    if (controller.signal.aborted) return;
    last = { key, response };
    renderResults(response, state, open);
  } catch (error) {
    if (error.name === "AbortError") return;
    last = null;
    showError(error);
  } finally {
    if (running === controller) {
      running = null;
      $("results").removeAttribute("aria-busy");
    }
  }
}

/** Add the next page to the results that are shown. It is what the search finds now, without them. */
export async function showMore(state, open) {
  if (!last?.response.cursor || last.key !== keyOf(state)) return;
  const of = last;
  $("more-results").disabled = true;
  try {
    const next = await post("v1/search", { ...request(state), cursor: of.response.cursor });
    if (last !== of) return; // another search was made meanwhile
    last = { key: of.key, response: { ...of.response, cursor: next.cursor, results: [...of.response.results, ...next.results] } };
    const stems = queryStems(state.q);
    $("results").append(...next.results.map((result) => resultCard(result, { stems, query: state.q.trim(), open })));
    $("status").textContent = plural(last.response.results.length, "passage");
    $("more-results").hidden = !next.cursor;
    announce(`${plural(next.results.length, "more passage")}.`);
  } catch (error) {
    showError(error);
  } finally {
    $("more-results").disabled = false;
  }
}

/** Discard everything that was found, because the caller has changed. */
export function clear() {
  clearTimeout(timer);
  running?.abort();
  running = last = null;
  standing.forget();
  for (const id of ["results", "empty", "notices", "steps", "status"]) $(id).replaceChildren();
  $("results").removeAttribute("aria-busy");
  $("how").hidden = $("more-results").hidden = true;
}

function renderResults(response, state, open) {
  const stems = queryStems(state.q);
  const results = response.results ?? [];
  $("results").dataset.of = state.q.trim();
  $("results").replaceChildren(...results.map((result) => resultCard(result, { stems, query: state.q.trim(), open })));
  $("status").textContent = results.length ? `${plural(results.length, "passage")} · ${Math.round(response.took_ms)} ms` : "";
  const freshness = freshnessLine(response.freshness ?? []);
  if (freshness) $("status").append(results.length ? " · " : "", freshness);
  $("more-results").hidden = !response.cursor;
  showNotices(response.degraded ?? []);
  renderEmpty(response, state);
  renderSteps(response);
  announce(results.length ? `${plural(results.length, "passage")} found.` : "Nothing found.");
}

/** Show the passages of an answer in place of the results. */
export function showPassages(passages, query, open) {
  const stems = queryStems(query);
  $("results").removeAttribute("aria-busy");
  $("results").replaceChildren(...passages.map((passage) => resultCard(passage, { stems, query, n: passage.n, open })));
  $("empty").replaceChildren();
  $("how").hidden = $("more-results").hidden = true;
  $("status").textContent = passages.length ? "The passages of this answer" : "";
}

/** Shown without a query: which sources can be searched, and the reader's standing questions. */
function showLandingPage() {
  $("results").replaceChildren();
  $("results").removeAttribute("aria-busy");
  $("status").textContent = "";
  $("how").hidden = $("more-results").hidden = true;
  showNotices([]);
  const readable = sources();
  const below = el("div", {});
  $("empty").replaceChildren(
    el("div", { class: "landing" },
      el("h2", {}, "What would you like to know?"),
      el("p", {}, "Results appear while you type. ", el("kbd", {}, "Ctrl"), " ", el("kbd", {}, "Enter"), " writes an answer from them, with its sources."),
      readable.length > 0 && el("p", { class: "quiet-text" }, "You can search ", readable.slice(0, 8).map((source, n) => [n ? " · " : null, el("strong", {}, source.value)]), readable.length > 8 && ` and ${readable.length - 8} more`)),
    below,
  );
  standing.addTo(below);
}

function renderEmpty(response, state) {
  const shown = [];
  if (!(response.results ?? []).length) {
    const narrowed = Boolean(filters(state));
    shown.push(
      el("h2", {}, "Nothing relevant was found"),
      el("p", {}, narrowed ? "The filters may be too narrow. " : "Try other words, or fewer. ", "Only documents that you may read are searched."),
    );
  } else if (response.relevant === false) {
    $("notices").append(el("p", { class: "note" }, "No result seems relevant to your query: these are only the nearest passages."));
  }
  $("empty").replaceChildren(shown.length ? el("div", { class: "landing" }, shown) : "");
}

/** Show why the results are incomplete. */
export function showNotices(reasons) {
  $("notices").replaceChildren(...reasons.map((reason) => el("p", { class: "doubt" }, el("strong", {}, "Incomplete: "), reason)));
}

export function showError(error) {
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  $("notices").replaceChildren(el("p", { class: "doubt", role: "alert" }, `${error.message}${wait}`));
  $("results").removeAttribute("aria-busy");
  $("status").textContent = "";
}

function renderSteps(response) {
  const row = (step) => {
    const { step: name, name: otherName, took_ms, ...facts } = step;
    const details = Object.entries(facts).map(([key, value]) => `${key.replaceAll("_", " ")} ${value}`).join(", ");
    return el("div", {}, el("dt", {}, name ?? otherName), el("dd", {}, `${took_ms} ms${details ? ` · ${details}` : ""}`));
  };
  $("how").hidden = !(response.steps ?? []).length;
  $("steps").replaceChildren(...(response.steps ?? []).map(row));
}
