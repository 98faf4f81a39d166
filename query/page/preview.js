// A proposed edit of the document in the drawer: which answers it would change. Nothing is stored.

import { post } from "./api.js";
import { el, plural } from "./dom.js";

const KINDS = {
  lost: "Lost", uncited: "No longer cited", contradicts: "Contradicts another document", changed: "Quotes other text",
};
const DIFFERENCES = {
  number: "another number", date: "another date", version: "another version", unit: "another unit", name: "another name",
  negation: "denied on one side",
};
const MAX_SHOWN = 50;

const drafts = new Map();
/** Edited texts of this visit, by document: closing the drawer loses none. */

/** Discard the drafts, because the caller has changed. */
export const forget = () => drafts.clear();

/** The part of the drawer in which the reader edits the document's text. signal: aborts what runs when the drawer closes. */
export function section(doc, signal) {
  const id = doc.document_id;
  const text = el("textarea", { id: "edit-text", rows: "12", spellcheck: "false", "aria-describedby": "edit-hint" });
  const undo = el("button", { type: "button", class: "quiet" }, "Undo the edit");
  const stop = el("button", { type: "button", class: "quiet", hidden: true }, "Stop");
  const run = el("button", { type: "submit", class: "primary" }, "Preview");
  const progress = el("progress", { "aria-label": "Asking the questions" });
  const seconds = el("span", { class: "quiet-text" });
  const busy = el("p", { class: "busy", hidden: true }, progress, seconds);
  const status = el("p", { role: "status" });
  const findings = el("div", {});

  const remember = () => (text.value === text.defaultValue ? drafts.delete(id) : drafts.set(id, text.value));
  text.addEventListener("input", remember);
  undo.addEventListener("click", () => {
    text.value = text.defaultValue;
    remember();
    text.focus();
  });

  function running(is) {
    if (!is && document.activeElement === stop) run.focus();
    busy.hidden = stop.hidden = !is;
    run.setAttribute("aria-disabled", String(is)); // it keeps the focus
  }

  async function preview(event) {
    event.preventDefault();
    if (!busy.hidden) return;
    const controller = new AbortController();
    const abort = () => controller.abort();
    signal.addEventListener("abort", abort);
    stop.onclick = abort;
    const began = performance.now();
    const showSeconds = () => (seconds.textContent = `${Math.round((performance.now() - began) / 1000)} s`);
    const clock = setInterval(showSeconds, 1000);
    showSeconds();
    findings.replaceChildren();
    status.textContent = "Asking the questions, of the text as it is and with your edit. It takes up to a minute.";
    running(true);
    try {
      const edited = { path: doc.external_id, external_id: doc.external_id, content: text.value, title: doc.title };
      const report = await post("v1/previews", { source: doc.source, documents: [{ ...edited, media_type: doc.media_type ?? undefined }] }, controller.signal);
      status.textContent = summary(report);
      findings.replaceChildren(...described(report));
    } catch (error) {
      const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
      status.textContent = error.name === "AbortError" ? "Stopped." : `There is no preview: ${error.message}.${wait}`;
    } finally {
      clearInterval(clock);
      signal.removeEventListener("abort", abort);
      running(false);
    }
  }

  return el("details", {
    class: "preview",
    ontoggle: ({ currentTarget }) => {
      if (!currentTarget.open || text.defaultValue) return;
      text.defaultValue = doc.text ?? ""; // megabytes are laid out only for who edits them
      text.value = drafts.get(id) ?? text.defaultValue;
    },
  },
    el("summary", {}, "Preview an edit"),
    el("form", { class: "edit", onsubmit: preview },
      el("label", { for: "edit-text" }, "The new text"), text,
      el("p", { id: "edit-hint", class: "quiet-text" }, "Nothing is stored or published. Questions with known answers, and your standing questions, are asked as if this text were published."),
      el("div", { class: "buttons" }, undo, stop, run)),
    busy, status, findings);
}

function summary({ documents, questions, affected, skipped, findings, took_ms: took }) {
  if (documents.every(({ state }) => state === "unchanged")) return "The text is as it was: no answer changes.";
  if (!questions && !skipped) return "There is nothing to ask: no question with a known answer whose documents you may read, and no standing question of yours.";
  const worse = findings.filter(({ kind }) => kind !== "changed").length;
  const verdict = worse ? `${plural(worse, "answer")} would be worse.` : findings.length ? "Answers would change; none would be lost." : "No answer would change.";
  const left = skipped ? ` There was no time for ${plural(skipped, "more question")}.` : "";
  return `${verdict} ${plural(questions, "question")} asked, ${affected.toLocaleString("en")} of them affected, in ${(took / 1000).toFixed(1)} s.${left}`;
}

function described({ findings }) {
  if (!findings.length) return [];
  const more = findings.length - MAX_SHOWN;
  return [
    el("ol", { class: "findings", "aria-label": "Answers that would change" }, findings.slice(0, MAX_SHOWN).map(finding)),
    ...(more > 0 ? [el("p", { class: "quiet-text" }, `${plural(more, "more answer")} would change.`)] : []),
  ];
}

function finding({ question, kind, standing_id: standing, moved, before, after, contradictions }) {
  const key = ({ document_id: id, excerpt }) => `${id} ${excerpt}`;
  const without = (quoted, others) => quoted.filter((of) => !others.some((other) => key(other) === key(of)));
  return el("li", {},
    el("p", {}, el("strong", { class: kind === "changed" ? "" : "worse" }, KINDS[kind] ?? kind), ": ", question),
    standing ? el("p", { class: "quiet-text" }, "Your standing question") : null,
    moved.map(place),
    el("ul", { class: "lines" },
      without(before, after).map((quoted) => line("removed", "Quoted now", quoted)),
      without(after, before).map((quoted) => line("added", "Quoted with the edit", quoted)),
      contradictions.map(({ kind: difference, new: edited, other }) => [
        line("doubtful", `The edit says (${DIFFERENCES[difference] ?? difference})`, edited), line("doubtful", "Another document says", other),
      ])));
}

function place({ external_id: id, anchor, before, after }) {
  const what = anchor ? `“${anchor}” in ${id}` : id;
  return el("p", { class: "quiet-text" }, `${what}: result ${before} now, ${after ? `result ${after}` : "no result"} with the edit`);
}

const line = (kind, label, { title, external_id: id, excerpt }) => el("li", { class: kind },
  el("p", { class: "quiet-text" }, `${label} · ${title || id}`), el("p", {}, excerpt));
