// For operators: answers that somebody should look at. What was written is there only for who may read all it is made of.

import { get, post } from "./api.js";
import { ago, el, say } from "./dom.js";
import { formatted, located } from "./format.js";

const SHOWN = 10;

/** The newest that wait, and what is to be said when they are not known: {waiting, away}. */
export async function waiting(signal) {
  try {
    return { waiting: (await get(`v1/review?limit=${SHOWN}`, signal)).waiting, away: [] };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { waiting: [], away: error.status === 403 ? [] : [`answers to review: ${error.message}`] };
  }
}

const percent = (share) => `${Math.round(share * 100)} %`;

/** A panel of them. again() is called when one was decided on. */
export function panel(found, again) {
  if (!found.length) return null;
  return el("section", { class: "panel" }, el("h2", {}, "Answers to review"), el("ul", { class: "reviews" }, found.map((one) => entry(one, again))));
}

function entry(one, again) {
  const decide = (verdict) => async (event) => {
    event.currentTarget.disabled = true;
    try {
      await post(`v1/review/${encodeURIComponent(one.answer_id)}`, { verdict });
      say("Noted.");
      await again();
    } catch (error) {
      event.target.disabled = false;
      say(error.message);
    }
  };
  const votes = [one.feedback?.up && `${one.feedback.up} helpful`, one.feedback?.down && `${one.feedback.down} not helpful`].filter(Boolean);
  const { ranges } = located(one.answer ?? "", one.unsupported);
  return el("li", {},
    el("details", { id: `review-${one.answer_id}` },
      el("summary", { id: `about-${one.answer_id}` }, el("strong", {}, one.question)),
      one.answer === null
        ? el("p", { class: "quiet-text" }, "It was made from documents that you may not all read, so its text is not shown.")
        : el("div", { class: "prose" }, formatted(one.answer, { cite: () => null, unsupported: ranges }))),
    el("p", { class: "when" }, [ago(one.asked_at), `${percent(one.support)} supported`, `${percent(one.density)} cited`, ...one.reasons.map((reason) => reason.replaceAll("_", " ")), ...votes].join(" · ")),
    el("div", { class: "decide" },
      el("button", { type: "button", class: "quiet", id: `right-${one.answer_id}`, "aria-label": `It was right: ${one.question}`, onclick: decide("right") }, "Right"),
      el("button", { type: "button", class: "quiet", id: `wrong-${one.answer_id}`, "aria-label": `It was wrong: ${one.question}`, onclick: decide("wrong") }, "Wrong")));
}
