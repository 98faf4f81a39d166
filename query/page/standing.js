// The reader's standing questions, with what has happened to their answers, and the difference when one is asked again.

import { get, post, remove } from "./api.js";
import { ago, announce, el, plural } from "./dom.js";
import { renderText } from "./format.js";
import { freshnessLine } from "./freshness.js";

const EVERY_MS = 60_000;

const KINDS = { unreadable: "may no longer be read", deleted: "deleted", changed: "changed", new: "a new passage" };
const LINES = { same: "Unchanged", removed: "Removed", added: "Added", withheld: "Withheld" };
const WITHHELD = "This sentence is withheld, because you may not read a passage behind it any more.";

let loaded = { standing: [], at: -Infinity };

/** Discard what was fetched, because it or the caller has changed. */
export function forget() {
  loaded = { standing: [], at: -Infinity };
}

/** Add the reader's standing questions to an element, if there are any. They are fetched at most once a minute. */
export async function addTo(element) {
  if (performance.now() - loaded.at >= EVERY_MS) {
    const before = loaded;
    try {
      const { standing } = await get("v1/standing");
      if (loaded !== before) return; // the caller has changed meanwhile, or another request was faster
      loaded = { standing, at: performance.now() };
    } catch (error) {
      if (error.status !== 403) element.append(el("p", { class: "doubt" }, el("strong", {}, "Unavailable: "), `standing questions: ${error.message}`));
      return;
    }
  }
  if (!loaded.standing.length) return;
  element.append(el("section", { class: "panel standing", "aria-label": "Standing questions" },
    el("h2", {}, "Your standing questions"), el("ul", { class: "reviews" }, loaded.standing.map(entry))));
}

function entry(summary) {
  const { id, question } = summary;
  const path = `v1/standing/${encodeURIComponent(id)}`;
  const body = el("div", { class: "prose" });
  const state = el("p", { class: "when" }, stateOf(summary));
  const details = el("details", { ontoggle: () => details.open && !body.childElementCount && show() }, el("summary", {}, el("strong", {}, question)), body);

  async function show() {
    try {
      body.replaceChildren(sentences(await get(path)));
    } catch (error) {
      body.replaceChildren(el("p", { class: "doubt" }, error.message));
    }
  }

  /** Run an action of a button, which is disabled meanwhile. */
  const button = (title, action) => el("button", { type: "button", class: "quiet", "aria-label": `${title}: ${question}`, onclick: async (event) => {
    const pressed = event.currentTarget;
    pressed.disabled = true;
    try {
      await action();
      forget();
    } catch (error) {
      announce(error.message);
      body.replaceChildren(el("p", { class: "doubt" }, error.message));
      details.open = true;
    } finally {
      pressed.disabled = false;
    }
  } }, title);

  const item = el("li", {}, details, state, el("div", { class: "decide" },
    button("Ask again", async () => {
      const answer = await post(`${path}/answer`);
      body.replaceChildren(difference(answer.difference));
      details.open = true;
      const freshness = freshnessLine(answer.freshness);
      state.replaceChildren("Current · answered just now", ...(freshness ? [" · ", freshness] : []));
      announce("The question was asked again.");
    }),
    button("Remove", async () => {
      await remove(path);
      item.remove();
      announce("The question was removed.");
    })));
  return item;
}

function stateOf({ state, changes, asked_at }) {
  const changed = changes.map(({ kind, sentences: numbers }) => `${KINDS[kind] ?? kind} (${plural(numbers.length, "sentence")})`);
  const words = { current: "Current", erased: "Erased with a document that it was made from", invalidated: `No longer certain: ${changed.join(", ")}` };
  return `${words[state] ?? state} · answered ${ago(asked_at)}`;
}

function sentences(standing) {
  if (!standing.sentences.length) return el("p", { class: "quiet-text" }, "There is no answer: ask again.");
  return el("ol", { class: "lines" }, standing.sentences.map(({ text, changes }) => el("li", { class: changes.length ? "doubtful" : "" },
    text === null ? el("p", { class: "quiet-text" }, WITHHELD) : renderText(text, { cite: () => null }),
    changes.length ? el("p", { class: "quiet-text" }, changes.map((kind) => KINDS[kind] ?? kind).join(", ")) : null)));
}

function difference(lines) {
  return el("ul", { class: "lines" }, lines.map(({ change, text }) => el("li", { class: change },
    el("p", { class: "quiet-text" }, LINES[change] ?? change), text === null ? el("p", {}, WITHHELD) : renderText(text, { cite: () => null }))));
}
