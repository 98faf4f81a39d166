// A streamed answer: its text as it arrives, citations that link to their passages, and notes on what is missing or unsupported.

import { events } from "./api.js";
import { $, el, plural, announce } from "./dom.js";
import { renderText, locateSentences } from "./format.js";
import { freshnessLine } from "./freshness.js";
import { feedbackButtons } from "./results.js";

const MODES = {
  focused: "from the documents you named, whole",
  long_context: "from everything you may read here",
  semantic: "from the nearest and the newest passages",
  hybrid: "from the best passages by meaning and words",
  vector: "from the best passages by meaning",
  keyword: "from the best passages by words",
};
const MAX_TURNS = 10;
const PASSAGES_AT_FIRST = 20;
/** Number of passages listed at first; cited passages are always listed. */

let running = null;
let currentRequest = null;

/** Stop the stream, and remove the answer. */
export function stop() {
  running?.abort();
  running = currentRequest = null;
  $("answer").hidden = true;
  $("answer").replaceChildren();
}

/** Whether the answer to this request is shown or being streamed, so that going back does not request it again. */
export const isShown = (body) => currentRequest === JSON.stringify(body);

/**
 * Request an answer and show it as it arrives. showPassages(passages) lists passages below; close() restores the results;
 * followUp(text, turns) asks the next question of the conversation.
 */
export async function streamAnswer(body, { showPassages, close, followUp }) {
  stop();
  currentRequest = JSON.stringify(body);
  const controller = (running = new AbortController());
  const view = createCard(body, () => (controller.abort(), close()), () => cancel(controller));
  const draft = { text: "", passages: [], cited: new Set(), mode: "", notes: [] };
  let frameRequest = 0;
  const draw = () => {
    frameRequest = 0;
    view.text(draft, showPassages);
  };
  try {
    for await (const { event, data } of events("v1/answers", { ...body, stream: true }, controller.signal)) {
      if (event === "sources") {
        Object.assign(draft, { passages: data.passages ?? [], mode: data.mode, notes: data.notes ?? [] });
        view.sources(draft, (data.steps ?? []).find((step) => step.step === "follow_up"));
        showPassages(draft.passages.slice(0, PASSAGES_AT_FIRST), draft);
      } else if (event === "delta") {
        draft.text += data.text;
        frameRequest ||= requestAnimationFrame(draw);
      } else if (event === "citation") {
        draft.cited.add(data.n);
      } else if (event === "done") {
        cancelAnimationFrame(frameRequest);
        view.done(draft, data, showPassages);
        view.offerFollowUp((text) => followUp(text, [...(body.turns ?? []), turn(body.question, data)].slice(-MAX_TURNS)));
        return;
      } else if (event === "error") {
        const problem = data.problem ?? data;
        view.failed(problem.detail ?? problem.title ?? "The answer could not be finished.", draft.text);
        return;
      }
    }
    if (!controller.signal.aborted) view.failed("The answer is incomplete: the connection ended early.", draft.text);
  } catch (error) {
    if (error.name === "AbortError") return;
    view.failed(error.message, draft.text);
  } finally {
    cancelAnimationFrame(frameRequest);
    view.finish();
    if (running === controller) running = null;
  }

  function cancel(active) {
    active.abort();
    view.failed("Stopped.", draft.text);
  }
}

const turn = (question, { answer, answer_id }) => ({ question, answer, ...(answer_id ? { answer_id } : {}) });

/** Create the card of an answer. Each method of the returned object shows one more part of it. */
function createCard({ question, turns = [] }, close, cancel) {
  const text = el("div", { class: "prose" }, el("p", { class: "thinking" }, "Reading", el("span", { class: "dots", "aria-hidden": "true" })));
  const from = el("p", { class: "from" });
  const notes = el("ul", { class: "notes", hidden: true });
  const before = turns.length ? [el("ol", { class: "turns", "aria-label": "Questions before" }, ...turns.map((earlier) => el("li", {}, earlier.question)))] : [];
  const foot = el("footer", {});
  const stopButton = el("button", { type: "button", class: "quiet", onclick: cancel }, "Stop");
  const card = $("answer");
  card.replaceChildren(
    el("header", {}, el("h2", {}, "Answer"), from, stopButton,
      el("button", { type: "button", class: "icon", "aria-label": "Close the answer", title: "Close (Esc)", onclick: close }, "×")),
    ...before, text, notes, foot,
  );
  card.setAttribute("aria-busy", "true");
  card.hidden = false;
  announce("Writing an answer.");

  const cite = (draft) => (n) => {
    const passage = draft.passages.find((candidate) => candidate.n === n);
    return passage && el("a", { class: "cite", href: `#passage-${n}`, title: passage.title || passage.external_id, "aria-label": `Passage ${n}: ${passage.title || passage.external_id}`,
      onclick: (event) => (event.preventDefault(), scrollToPassage(n, draft)) }, String(n));
  };
  let showAll = () => {};
  function scrollToPassage(n, draft) {
    if (!$(`passage-${n}`)) showAll(draft);
    const target = $(`passage-${n}`);
    if (!target) return;
    for (const lit of document.querySelectorAll(".lit")) lit.classList.remove("lit");
    target.classList.add("lit");
    target.focus({ preventScroll: true });
    target.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }
  const addNotes = (...items) => {
    notes.append(...items.map(([kind, words]) => el("li", { class: kind }, words)));
    notes.hidden = !notes.childElementCount;
  };

  return {
    sources(draft, followUp) {
      from.textContent = [MODES[draft.mode] ?? draft.mode, draft.passages.length && plural(draft.passages.length, "passage")].filter(Boolean).join(" · ");
      if (followUp && followUp.by !== "unchanged") addNotes(["note", `Understood as: ${followUp.question}`]);
      addNotes(...draft.notes.map((note) => ["note", note]));
    },
    text(draft) {
      const whole = draft.text.replace(/\[[\d\s,;]*$/, ""); // without a citation that is not complete yet
      text.replaceChildren(renderText(whole, { cite: cite(draft) }));
      text.classList.add("writing");
    },
    done(draft, done, showPassages) {
      const words = done.answer ?? draft.text;
      const { ranges, missing } = locateSentences(words, done.unsupported);
      const cited = new Set([...(done.model ? draft.cited : []), ...(done.citations ?? []).map((citation) => citation.n)]);
      const noInformation = done.relevant === false;
      const newNotes = (done.notes ?? []).filter((note) => !draft.notes.includes(note));
      showAll = () => showPassages(draft.passages, draft);
      text.replaceChildren(renderText(words, { cite: cite(draft), unsupported: ranges }));
      card.classList.toggle("nothing", noInformation);
      if (draft.passages.length > PASSAGES_AT_FIRST) {
        showPassages(draft.passages.filter((passage, n) => n < PASSAGES_AT_FIRST || cited.has(passage.n)), draft);
        foot.append(el("button", { type: "button", class: "link", onclick: (event) => (showAll(), event.currentTarget.remove()) }, `Show all ${draft.passages.length} passages`));
      }
      addNotes(...newNotes.map((note) => ["note", note]));
      const doubtful = (done.unsupported ?? []).length;
      if (ranges.length) addNotes(["doubt", ranges.length === 1 ? "One sentence is underlined because no passage supports it: check it yourself." : `${ranges.length} sentences are underlined because no passage supports them: check them yourself.`]);
      for (const sentence of missing) addNotes(["doubt", `Not supported: ${sentence}`]);
      if (done.grounded === false && !doubtful && !noInformation && done.model) addNotes(["doubt", "This answer has no citations: read the passages before you rely on it."]);
      if (noInformation) addNotes(["note", "Try other words or fewer filters, or ask a colleague with access to more documents."]);
      const freshness = freshnessLine(done.freshness ?? []);
      foot.prepend(el("p", { class: "by" }, done.model ? `Written by ${done.model}` : "Quotations, not written by a model", done.review ? " · marked for review" : null, freshness && [" · ", freshness]));
      if (done.answer_id) foot.append(feedbackButtons({ answer_id: done.answer_id, query: question }, "this answer"));
      announce(noInformation ? "Nothing relevant was found." : `The answer is complete, with ${plural(cited.size, "citation")}.`);
    },
    offerFollowUp(ask) {
      const input = el("input", { type: "text", autocomplete: "off", maxlength: "8000", placeholder: "Ask a follow-up question", "aria-label": "Follow-up question" });
      const submit = (event) => (event.preventDefault(), input.value.trim() && ask(input.value.trim()));
      foot.append(el("form", { class: "follow-up", onsubmit: submit }, input, el("button", { type: "submit", class: "quiet" }, "Ask")));
    },
    failed(why, soFar) {
      if (!soFar) text.replaceChildren();
      addNotes(["doubt", why]);
      announce(why);
    },
    finish() {
      text.classList.remove("writing");
      stopButton.remove();
      card.removeAttribute("aria-busy");
    },
  };
}
