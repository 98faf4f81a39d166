// For operators: the review queue of answers. An answer's text is shown only if the operator may read all its documents.

import { get, post } from "./api.js";
import { ago, el, announce } from "./dom.js";
import { renderText, locateSentences } from "./format.js";

const MAX_SHOWN = 10;

/** Fetch the newest waiting answers. Returns {waiting, away}; away holds a message if they cannot be fetched. */
export async function loadReviews(signal) {
  try {
    return { waiting: (await get(`v1/review?limit=${MAX_SHOWN}`, signal)).waiting, away: [] };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { waiting: [], away: error.status === 403 ? [] : [`answers to review: ${error.message}`] };
  }
}

const percent = (share) => `${Math.round(share * 100)} %`;

/** The panel of answers to review. reload() is called after a decision. */
export function panel(answers, reload) {
  if (!answers.length) return null;
  return el("section", { class: "panel" }, el("h2", {}, "Answers to review"), el("ul", { class: "reviews" }, answers.map((answer) => reviewEntry(answer, reload))));
}

function reviewEntry(answer, reload) {
  const decide = (verdict) => async (event) => {
    event.currentTarget.disabled = true;
    try {
      await post(`v1/review/${encodeURIComponent(answer.answer_id)}`, { verdict });
      announce("The decision is stored.");
      await reload();
    } catch (error) {
      event.target.disabled = false;
      announce(error.message);
    }
  };
  const votes = [answer.feedback?.up && `${answer.feedback.up} helpful`, answer.feedback?.down && `${answer.feedback.down} not helpful`].filter(Boolean);
  const { ranges } = locateSentences(answer.answer ?? "", answer.unsupported);
  return el("li", {},
    el("details", { id: `review-${answer.answer_id}` },
      el("summary", { id: `about-${answer.answer_id}` }, el("strong", {}, answer.question)),
      answer.answer === null
        ? el("p", { class: "quiet-text" }, "The text is not shown, because you may not read all documents that it was made from.")
        : el("div", { class: "prose" }, renderText(answer.answer, { cite: () => null, unsupported: ranges }))),
    el("p", { class: "when" }, [ago(answer.asked_at), `${percent(answer.support)} supported`, `${percent(answer.density)} cited`, ...answer.reasons.map((reason) => reason.replaceAll("_", " ")), ...votes].join(" · ")),
    el("div", { class: "decide" },
      el("button", { type: "button", class: "quiet", id: `right-${answer.answer_id}`, "aria-label": `It was right: ${answer.question}`, onclick: decide("right") }, "Right"),
      el("button", { type: "button", class: "quiet", id: `wrong-${answer.answer_id}`, "aria-label": `It was wrong: ${answer.question}`, onclick: decide("wrong") }, "Wrong")));
}
