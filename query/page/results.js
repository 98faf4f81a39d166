// Passages: what they say, where they stand, why they were found.

import { post } from "./api.js";
import { day, el, outward, place, plural, say, svg, web } from "./dom.js";
import { marked, snippet } from "./words.js";

const RANKERS = { vector: "meaning", keyword: "words" };
const TYPES = {
  "text/markdown": "Markdown", "text/plain": "Text", "text/html": "Web page", "application/pdf": "PDF",
  "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "Word",
  "application/vnd.openxmlformats-officedocument.presentationml.presentation": "Slides",
  "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "Spreadsheet",
  "text/x-python": "Python", "text/csv": "Table",
};

export const typeName = (type) => TYPES[type] ?? type?.replace(/^[^/]*\/(x-)?/, "") ?? "";

const FEW_LINES = 4;
/** So few need not be unfolded: a line loses nothing. */

/** A passage without a heading that is shown above it already. */
function headless(result) {
  const heading = /^\s*#{1,6}\s+(.+)\n/.exec(result.text);
  return heading && [result.title, ...(result.headings ?? [])].includes(heading[1].trim()) ? result.text.slice(heading[0].length) : result.text;
}

/** Those unfolded by hand, so that a new answer to the same words leaves them so. */
const unfolded = new Set();

/** One result as a list item. n: its number, where an answer cites it. open: shows its document. */
export function card(result, { stems, query, n, open }) {
  const id = `passage-${n ?? result.chunk_id}`;
  const body = el("div", { class: "text" });
  const short = snippet(headless(result), stems);
  const flat = short.whole && (result.text.match(/\S.*$/gm) ?? []).length < FEW_LINES;
  const more = flat ? null : el("button", { type: "button", class: "link more" });
  const show = (all) => {
    body.classList.toggle("all", all);
    body.replaceChildren(marked(all ? result.text : short.text, stems));
    if (more) {
      more.textContent = all ? "Show less" : "Show the whole passage";
      more.setAttribute("aria-expanded", String(all));
    }
    unfolded[all ? "add" : "delete"](result.chunk_id);
  };
  const toggle = () => more && show(!body.classList.contains("all"));
  more?.addEventListener("click", toggle);
  show(Boolean(more) && unfolded.has(result.chunk_id));

  const article = el(
    "article",
    { tabindex: "-1", id, "aria-labelledby": `${id}-title`, data: { chunk: result.chunk_id, document: result.document_id } },
    el(
      "header", {},
      el("h3", { id: `${id}-title` },
        n && el("span", { class: "number" }, String(n)),
        el("a", { href: `?doc=${result.document_id}`, class: "title", onclick: (event) => opened(event, open, result) },
          marked(result.title || result.external_id, stems)),
      ),
      origin(result),
    ),
    trail(result),
    body,
    more,
    also(result, open),
    el("footer", {}, why(result), thumbs({ chunk_id: result.chunk_id, query }, "this passage")),
  );
  article.toggle = toggle;
  article.open = () => open(result);
  article.source = web(result.source_url);
  return el("li", {}, article);
}

function opened(event, open, result) {
  if (event.metaKey || event.ctrlKey || event.shiftKey) return; // a new tab is the browser's business
  event.preventDefault();
  open(result);
}

/** The line under the title: source, where it leads, who wrote it and when, what it is. */
function origin(result) {
  const url = web(result.source_url);
  return el(
    "p", { class: "origin" },
    el("span", { class: "source" }, result.source),
    url
      ? outward(result.source_url, [url.host, el("span", { "aria-hidden": "true" }, " ↗"), el("span", { class: "visually-hidden" }, " (opens the source in a new tab)")], "host")
      : el("span", {}, place(result.source_url) || result.external_id),
    result.author && el("span", {}, result.author),
    result.source_modified_at && day(result.source_modified_at),
    result.media_type && el("span", {}, typeName(result.media_type)),
  );
}

function trail(result) {
  const path = (result.headings ?? []).filter((heading) => heading && heading !== result.title);
  return path.length ? el("p", { class: "trail" }, path.join(" › ")) : null;
}

/** Near-duplicates that stand behind this one. Each is a name, or {title, source_url, document_id}. */
function also(result, open) {
  const others = (result.also ?? []).map((other) => (typeof other === "string" ? { title: other } : other));
  if (!others.length) return null;
  const named = (other) => {
    const title = other.title || other.source_url || "another document";
    if (other.document_id) {
      return el("button", { type: "button", class: "link", onclick: () => open(other) }, title);
    }
    return outward(other.source_url, title);
  };
  return el("p", { class: "also" }, "Also in ", others.flatMap((other, at) => [at ? ", " : null, named(other)]));
}

function why(result) {
  const ranks = Object.entries(result.ranks ?? {}).filter(([, rank]) => rank);
  const only = ranks.length === 1 ? `, only by ${RANKERS[ranks[0][0]]}` : "";
  const merged = (result.chunk_ids ?? []).length;
  const told = [
    ...ranks.map(([ranker, rank]) => [ranker, `${RANKERS[ranker] ?? ranker} #${rank}`, `Number ${rank} by ${RANKERS[ranker] ?? ranker}${only}`]),
    typeof result.rerank_score === "number" && ["rerank", `rerank ${result.rerank_score.toFixed(2)}`, "The reranker's score"],
    merged > 1 && ["merged", `${plural(merged, "passage")} joined`, "Neighbouring passages shown as one"],
  ].filter(Boolean);
  if (!told.length) return el("span", {});
  return el("ul", { class: "why", "aria-label": "Why it was found" }, told.map(([kind, words, more]) => el("li", { class: `rank ${kind}`, title: more }, words)));
}

/** Thumbs for an answer or a passage: what is judged goes with the verdict. */
export function thumbs(judged, what) {
  const group = el("div", { class: "thumbs", role: "group", "aria-label": `Was ${what} helpful?` });
  const button = (verdict, label, sign) =>
    el("button", { type: "button", class: "icon small", "aria-pressed": "false", "aria-label": `${label}: ${what}`, title: label, onclick: (event) => send(event.currentTarget, verdict) }, sign);
  const up = button("up", "Helpful", hand(false));
  const down = button("down", "Not helpful", hand(true));
  async function send(pressed, verdict) {
    for (const one of [up, down]) one.setAttribute("aria-pressed", String(one === pressed));
    try {
      await post("v1/feedback", { ...judged, verdict });
      say("Thank you for the feedback.");
    } catch (error) {
      pressed.setAttribute("aria-pressed", "false");
      pressed.title = error.message;
      say(`The feedback could not be stored: ${error.message}`);
    }
  }
  group.append(up, down);
  return group;
}

const HAND = "M7 11v9H4v-9zm0 0 4.2-7.2c1.6 0 2.4 1.2 2 2.8L12.4 10H18c1.5 0 2.4 1.2 2.1 2.6l-1.3 5.6c-.3 1.1-1.1 1.8-2.2 1.8H7";

const hand = (down) => svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true", class: down && "turned" }, svg("path", { d: HAND }));
