// Passages that contradict or repeat each other, of which the caller may read both: the newest in the Pipeline tab, those
// of a document in its drawer.

import { get, post } from "./api.js";
import { ago, announce, el, externalLink } from "./dom.js";

const MAX_SHOWN = 10;
const EVERY_MS = 60_000;

const TITLES = {
  number: "Different numbers", date: "Different dates", version: "Different versions", unit: "Different units",
  name: "Different names", negation: "Denied on one side", duplicate: "Duplicates", outdated: "An outdated copy",
};

let loaded = { conflicts: [], away: [], at: -Infinity };

/** Fetch the newest open conflicts, at most once a minute. Returns {conflicts, away}, as loadReviews does. */
export async function loadConflicts(signal) {
  if (performance.now() - loaded.at < EVERY_MS) return loaded;
  try {
    const { conflicts } = await get(`v1/conflicts?limit=${MAX_SHOWN}`, signal);
    loaded = { conflicts, away: [], at: performance.now() };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { conflicts: [], away: error.status === 403 ? [] : [`contradictions: ${error.message}`] };
  }
  return loaded;
}

/** Return the open conflicts of a document. */
export async function ofDocument(id, signal) {
  return (await get(`v1/conflicts?document=${encodeURIComponent(id)}&limit=${MAX_SHOWN}`, signal)).conflicts;
}

/** Discard what was fetched, because it or the caller has changed. */
export function forget() {
  loaded = { conflicts: [], away: [], at: -Infinity };
}

/** The panel of conflicts below a heading of this level. reload() is called after a decision. */
export function panel(conflicts, reload, heading = "h2") {
  if (!conflicts.length) return null;
  return el("section", { class: "panel" }, el(heading, {}, "Contradictions and copies"), el("ul", { class: "reviews" }, conflicts.map((conflict) => entry(conflict, reload))));
}

function entry(conflict, reload) {
  const decide = (decision) => async (event) => {
    event.currentTarget.disabled = true;
    try {
      await post(`v1/conflicts/${encodeURIComponent(conflict.id)}`, { decision });
      announce("The decision is stored.");
      forget();
      await reload();
    } catch (error) {
      event.target.disabled = false;
      announce(error.message);
    }
  };
  const names = conflict.titles.map((title, side) => title || conflict.external_ids[side]);
  const about = `${TITLES[conflict.kind] ?? conflict.kind}: ${names.join(" and ")}`;
  const passages = names.map((name, side) => el("div", { class: "prose" },
    el("p", {}, externalLink(conflict.source_urls[side], name), conflict.older === side ? " (older)" : null),
    conflict.quotes ? el("p", {}, conflict.quotes[side]) : null));
  return el("li", {},
    el("details", { id: `conflict-${conflict.id}` }, el("summary", { id: `about-${conflict.id}` }, el("strong", {}, about)), passages),
    el("p", { class: "when" }, ago(conflict.at)),
    el("div", { class: "decide" },
      el("button", { type: "button", class: "quiet", id: `accept-${conflict.id}`, "aria-label": `Accept ${about}`, onclick: decide("accepted") }, "Accept"),
      el("button", { type: "button", class: "quiet", id: `dismiss-${conflict.id}`, "aria-label": `Dismiss ${about}`, onclick: decide("dismissed") }, "Dismiss")));
}
