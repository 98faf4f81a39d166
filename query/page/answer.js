// A streamed answer: text as it comes, citations that lead to their passage, and plainly what is missing or unsupported.

import { events } from "./api.js";
import { $, el, plural, say } from "./dom.js";
import { formatted, located } from "./format.js";
import { thumbs } from "./results.js";

const MODES = {
  focused: "from the documents you named, whole",
  long_context: "from everything you may read here",
  semantic: "from the nearest and the newest passages",
  hybrid: "from the best passages by meaning and words",
  vector: "from the best passages by meaning",
  keyword: "from the best passages by words",
};
const SHOWN = 20;
/** Passages listed at first; those that are cited always are. */

let running = null;
let about = null;

/** Stop writing, and forget what was written. */
export function stop() {
  running?.abort();
  running = about = null;
  $("answer").hidden = true;
  $("answer").replaceChildren();
}

/** Whether that very answer is shown, or being written: nobody asks for it twice by going back. */
export const shows = (body) => about === JSON.stringify(body);

/** Ask, and show as it comes. list(passages, cited) shows the passages below; close() gives the results back. */
export async function write(body, { list, close }) {
  stop();
  about = JSON.stringify(body);
  const mine = (running = new AbortController());
  const view = frame(body.question, () => (mine.abort(), close()), () => halt(mine));
  const told = { text: "", passages: [], cited: new Set(), mode: "", notes: [] };
  let drawn = 0;
  const draw = () => {
    drawn = 0;
    view.text(told, list);
  };
  try {
    for await (const { event, data } of events("v1/answers", { ...body, stream: true }, mine.signal)) {
      if (event === "sources") {
        Object.assign(told, { passages: data.passages ?? [], mode: data.mode, notes: data.notes ?? [] });
        view.sources(told);
        list(told.passages.slice(0, SHOWN), told);
      } else if (event === "delta") {
        told.text += data.text;
        drawn ||= requestAnimationFrame(draw);
      } else if (event === "citation") {
        told.cited.add(data.n);
      } else if (event === "done") {
        cancelAnimationFrame(drawn);
        view.done(told, data, list);
        return;
      } else if (event === "error") {
        const problem = data.problem ?? data;
        view.failed(problem.detail ?? problem.title ?? "The answer could not be finished.", told.text);
        return;
      }
    }
    if (!mine.signal.aborted) view.failed("The answer is incomplete: the connection ended early.", told.text);
  } catch (error) {
    if (error.name === "AbortError") return;
    view.failed(error.message, told.text);
  } finally {
    cancelAnimationFrame(drawn);
    view.still();
    if (running === mine) running = null;
  }

  function halt(controller) {
    controller.abort();
    view.failed("Stopped.", told.text);
  }
}

/** The card itself; each method shows one more thing that is known. */
function frame(question, close, halt) {
  const text = el("div", { class: "prose" }, el("p", { class: "thinking" }, "Reading", el("span", { class: "dots", "aria-hidden": "true" })));
  const from = el("p", { class: "from" });
  const notes = el("ul", { class: "notes", hidden: true });
  const foot = el("footer", {});
  const halting = el("button", { type: "button", class: "quiet", onclick: halt }, "Stop");
  const card = $("answer");
  card.replaceChildren(
    el("header", {}, el("h2", {}, "Answer"), from, halting,
      el("button", { type: "button", class: "icon", "aria-label": "Close the answer", title: "Close (Esc)", onclick: close }, "×")),
    text, notes, foot,
  );
  card.setAttribute("aria-busy", "true");
  card.hidden = false;
  say("Writing an answer.");

  const cite = (told) => (n) => {
    const passage = told.passages.find((one) => one.n === n);
    return passage && el("a", { class: "cite", href: `#passage-${n}`, title: passage.title || passage.external_id, "aria-label": `Passage ${n}: ${passage.title || passage.external_id}`,
      onclick: (event) => (event.preventDefault(), jump(n, told)) }, String(n));
  };
  let reveal = () => {};
  function jump(n, told) {
    if (!$(`passage-${n}`)) reveal(told);
    const target = $(`passage-${n}`);
    if (!target) return;
    for (const lit of document.querySelectorAll(".lit")) lit.classList.remove("lit");
    target.classList.add("lit");
    target.focus({ preventScroll: true });
    target.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }
  const remark = (...items) => {
    notes.append(...items.map(([kind, words]) => el("li", { class: kind }, words)));
    notes.hidden = !notes.childElementCount;
  };

  return {
    sources(told) {
      from.textContent = [MODES[told.mode] ?? told.mode, told.passages.length && plural(told.passages.length, "passage")].filter(Boolean).join(" · ");
      remark(...told.notes.map((note) => ["note", note]));
    },
    text(told) {
      const whole = told.text.replace(/\[[\d\s,;]*$/, ""); // half a citation is none yet
      text.replaceChildren(formatted(whole, { cite: cite(told) }));
      text.classList.add("writing");
    },
    done(told, done, list) {
      const words = done.answer ?? told.text;
      const { ranges, missing } = located(words, done.unsupported);
      const cited = new Set([...told.cited, ...(done.citations ?? []).map((one) => one.n)]);
      const nothing = done.relevant === false;
      const fresh = (done.notes ?? []).filter((note) => !told.notes.includes(note));
      reveal = () => list(told.passages, told);
      text.replaceChildren(formatted(words, { cite: cite(told), unsupported: ranges }));
      card.classList.toggle("nothing", nothing);
      if (told.passages.length > SHOWN) {
        list(told.passages.filter((one, at) => at < SHOWN || cited.has(one.n)), told);
        foot.append(el("button", { type: "button", class: "link", onclick: (event) => (reveal(), event.currentTarget.remove()) }, `Show all ${told.passages.length} passages`));
      }
      remark(...fresh.map((note) => ["note", note]));
      const doubtful = (done.unsupported ?? []).length;
      if (ranges.length) remark(["doubt", ranges.length === 1 ? "One sentence is underlined because no passage supports it: check it yourself." : `${ranges.length} sentences are underlined because no passage supports them: check them yourself.`]);
      for (const sentence of missing) remark(["doubt", `Not supported: ${sentence}`]);
      if (done.grounded === false && !doubtful && !nothing && done.model) remark(["doubt", "This answer does not say where it comes from: read the passages before you rely on it."]);
      if (nothing) remark(["note", "Try other words, fewer filters, or ask somebody who may read more."]);
      foot.prepend(el("p", { class: "by" }, done.model ? `Written by ${done.model}` : "Quotations, not written by a model", done.review ? " · marked for review" : null));
      if (done.answer_id) foot.append(thumbs({ answer_id: done.answer_id, query: question }, "this answer"));
      say(nothing ? "Nothing relevant was found." : `The answer is complete, with ${plural(cited.size, "citation")}.`);
    },
    failed(why, soFar) {
      if (!soFar) text.replaceChildren();
      remark(["doubt", why]);
      say(why);
    },
    still() {
      text.classList.remove("writing");
      halting.remove();
      card.removeAttribute("aria-busy");
    },
  };
}
