// The state of the page, in the URL's query: it can be shared, and going back and forward works.

const LISTS = ["source", "type", "author", "meta"]; // meta: KEY=VALUE, the value as JSON
const MODES = ["hybrid", "vector", "keyword"];
const ORDERS = ["relevance", "newest", "oldest"];

export const EMPTY = Object.freeze({
  view: "search", q: "", mode: "hybrid", sort: "relevance", source: [], type: [], author: [], meta: [], since: "", before: "", answer: false, doc: "", chunk: "",
});

export function read() {
  const parameters = new URLSearchParams(location.search);
  const state = { ...EMPTY };
  state.view = parameters.get("view") === "pipeline" ? "pipeline" : "search";
  state.q = parameters.get("q") ?? "";
  state.mode = MODES.includes(parameters.get("mode")) ? parameters.get("mode") : "hybrid";
  state.sort = ORDERS.includes(parameters.get("sort")) ? parameters.get("sort") : "relevance";
  for (const name of LISTS) state[name] = parameters.getAll(name);
  state.meta = state.meta.filter(condition);
  state.since = date(parameters.get("since"));
  state.before = date(parameters.get("before"));
  state.answer = parameters.has("answer");
  state.doc = parameters.get("doc") ?? "";
  state.chunk = parameters.get("chunk") ?? "";
  return state;
}

const date = (text) => (/^\d{4}-\d{2}-\d{2}$/.test(text ?? "") ? text : "");

export function toQuery(state) {
  const parameters = new URLSearchParams();
  if (state.view !== "search") parameters.set("view", state.view);
  if (state.q) parameters.set("q", state.q);
  if (state.mode !== "hybrid") parameters.set("mode", state.mode);
  if (state.sort !== "relevance") parameters.set("sort", state.sort);
  for (const name of LISTS) for (const value of state[name]) parameters.append(name, value);
  for (const name of ["since", "before", "doc", "chunk"]) if (state[name]) parameters.set(name, state[name]);
  if (state.answer) parameters.set("answer", "1");
  return `?${parameters}`;
}

/** Write the state into the URL as a new entry of the history. All changes while typing share one entry. */
export function write(state, { typing = false } = {}) {
  const to = toQuery(state);
  if (to === location.search || (to === "?" && !location.search)) return;
  const replaced = typing && history.state?.typing;
  history[replaced ? "replaceState" : "pushState"](typing ? { typing } : null, "", to);
}

/** End the entry of the text that was typed; the next change begins a new one. */
export const endTyping = () => history.replaceState(null, "", location.href);

/** The key and the value of a filter KEY=VALUE; null: it is none. */
export function condition(text) {
  const at = text.indexOf("=");
  try {
    const value = JSON.parse(text.slice(at + 1));
    return at > 0 && ["string", "number", "boolean"].includes(typeof value) ? [text.slice(0, at), value] : null;
  } catch {
    return null;
  }
}

/** The order of results; search by meaning alone has only that by relevance. */
export const order = (state) => (state.mode === "vector" ? "relevance" : state.sort);

/** The filters of a request; undefined: none. */
export function filters(state) {
  const result = {};
  if (state.source.length) result.sources = state.source;
  if (state.type.length) result.media_types = state.type;
  if (state.author.length) result.authors = state.author;
  const metadata = {};
  for (const [name, value] of state.meta.map(condition).filter(Boolean)) (metadata[name] ??= []).push(value);
  if (state.meta.length) result.metadata = metadata;
  if (state.since) result.since = `${state.since}T00:00:00Z`;
  if (state.before) result.before = `${state.before}T00:00:00Z`;
  return Object.keys(result).length ? result : undefined;
}
