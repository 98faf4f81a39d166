// What is looked at stands in the address: it can be sent on, and back and forward work.

const LISTS = ["source", "type", "author"];
const MODES = ["hybrid", "vector", "keyword"];

export const EMPTY = Object.freeze({
  view: "search", q: "", mode: "hybrid", source: [], type: [], author: [], since: "", before: "", answer: false, doc: "", chunk: "",
});

export function read() {
  const found = new URLSearchParams(location.search);
  const state = { ...EMPTY };
  state.view = found.get("view") === "pipeline" ? "pipeline" : "search";
  state.q = found.get("q") ?? "";
  state.mode = MODES.includes(found.get("mode")) ? found.get("mode") : "hybrid";
  for (const name of LISTS) state[name] = found.getAll(name);
  state.since = date(found.get("since"));
  state.before = date(found.get("before"));
  state.answer = found.has("answer");
  state.doc = found.get("doc") ?? "";
  state.chunk = found.get("chunk") ?? "";
  return state;
}

const date = (text) => (/^\d{4}-\d{2}-\d{2}$/.test(text ?? "") ? text : "");

export function address(state) {
  const made = new URLSearchParams();
  if (state.view !== "search") made.set("view", state.view);
  if (state.q) made.set("q", state.q);
  if (state.mode !== "hybrid") made.set("mode", state.mode);
  for (const name of LISTS) for (const value of state[name]) made.append(name, value);
  for (const name of ["since", "before", "doc", "chunk"]) if (state[name]) made.set(name, state[name]);
  if (state.answer) made.set("answer", "1");
  return `?${made}`;
}

/** Write it into the address bar, as a new step of the history. What is being typed is one step until it is settled. */
export function write(state, { typing = false } = {}) {
  const to = address(state);
  if (to === location.search || (to === "?" && !location.search)) return;
  const replaced = typing && history.state?.typing;
  history[replaced ? "replaceState" : "pushState"](typing ? { typing } : null, "", to);
}

/** What was typed is what was meant: the next letter begins a new step. */
export const settle = () => history.replaceState(null, "", location.href);

/** The filters as the service takes them; undefined: none. */
export function filters(state) {
  const made = {};
  if (state.source.length) made.sources = state.source;
  if (state.type.length) made.media_types = state.type;
  if (state.author.length) made.authors = state.author;
  if (state.since) made.since = `${state.since}T00:00:00Z`;
  if (state.before) made.before = `${state.before}T00:00:00Z`;
  return Object.keys(made).length ? made : undefined;
}
