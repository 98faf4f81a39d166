// Cards of results: text, origin, ranks and feedback.

import { post } from "./api.js";
import { day, el, externalLink, shortLocation, plural, announce, svg, webUrl } from "./dom.js";
import { renderText } from "./format.js";
import { highlight, highlightWithin, snippet } from "./words.js";

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
/** A passage with fewer lines is shown on one line and needs no button to expand it. */

/** The text of a passage without its first heading, if the card shows that heading already. */
function withoutHeading(result) {
  const heading = /^\s*#{1,6}[^\S\n]+(\S.*)\n/.exec(result.text);
  return heading && [result.title, ...(result.headings ?? [])].includes(heading[1].trim()) ? result.text.slice(heading[0].length) : result.text;
}

/** Types whose line breaks and marks mean something else than in Markdown. */
const LAID_OUT = new Set(["application/json", "application/sql", "application/x-ndjson", "application/x-sh"]);

/** Whether the texts of a type are Markdown, as those of web pages and Office files are after extraction. */
function isMarkdown(type) {
  const name = (type ?? "text/plain").split(";")[0].trim().toLowerCase();
  return name.startsWith("text/") ? name === "text/markdown" || name === "text/html" : !LAID_OUT.has(name);
}

function wholeText(result, stems) {
  return isMarkdown(result.media_type) ? highlightWithin(renderText(result.text), stems) : highlight(result.text, stems);
}

/** Chunks that the reader expanded; they stay expanded when the results are drawn again. */
const expandedChunks = new Set();

/** A result as a list item. n: its number, if an answer cites it. open(result): shows its document. */
export function resultCard(result, { stems, query, n, open }) {
  const id = `passage-${n ?? result.chunk_id}`;
  const body = el("div", { class: "text" });
  const short = snippet(withoutHeading(result), stems);
  const flat = short.whole && (result.text.match(/\S.*$/gm) ?? []).length < FEW_LINES;
  const more = flat ? null : el("button", { type: "button", class: "link more" });
  const show = (all) => {
    body.classList.toggle("all", all);
    body.classList.toggle("prose", all && isMarkdown(result.media_type));
    body.replaceChildren(all ? wholeText(result, stems) : highlight(short.text, stems));
    if (more) {
      more.textContent = all ? "Show less" : "Show the whole passage";
      more.setAttribute("aria-expanded", String(all));
    }
    expandedChunks[all ? "add" : "delete"](result.chunk_id);
  };
  const toggle = () => more && show(!body.classList.contains("all"));
  more?.addEventListener("click", toggle);
  show(Boolean(more) && expandedChunks.has(result.chunk_id));

  const article = el(
    "article",
    { tabindex: "-1", id, "aria-labelledby": `${id}-title`, data: { chunk: result.chunk_id, document: result.document_id } },
    el(
      "header", {},
      el("h3", { id: `${id}-title` },
        n && el("span", { class: "number" }, String(n)),
        el("a", { href: `?doc=${result.document_id}`, class: "title", onclick: (event) => onTitleClick(event, open, result) },
          highlight(result.title || result.external_id, stems)),
      ),
      origin(result),
    ),
    headingPath(result),
    body,
    more,
    duplicates(result, open),
    el("footer", {}, rankBadges(result), feedbackButtons({ chunk_id: result.chunk_id, query }, "this passage")),
  );
  article.toggle = toggle;
  article.open = () => open(result);
  article.source = webUrl(result.source_url);
  return el("li", {}, article);
}

function onTitleClick(event, open, result) {
  if (event.metaKey || event.ctrlKey || event.shiftKey) return; // the browser opens a new tab
  event.preventDefault();
  open(result);
}

/** The line under the title: source, link, author, date and type. */
function origin(result) {
  const url = webUrl(result.source_url);
  return el(
    "p", { class: "origin" },
    el("span", { class: "source" }, result.source),
    url
      ? externalLink(result.source_url, [url.host, el("span", { "aria-hidden": "true" }, " ↗"), el("span", { class: "visually-hidden" }, " (opens the source in a new tab)")], "host")
      : el("span", {}, shortLocation(result.source_url) || result.external_id),
    result.author && el("span", {}, result.author),
    result.source_modified_at && day(result.source_modified_at),
    result.media_type && el("span", {}, typeName(result.media_type)),
  );
}

function headingPath(result) {
  const path = (result.headings ?? []).filter((heading) => heading && heading !== result.title);
  return path.length ? el("p", { class: "trail" }, path.join(" › ")) : null;
}

/** Near-duplicates of this result. Each is a name, or {title, source_url, document_id}. */
function duplicates(result, open) {
  const others = (result.also ?? []).map((other) => (typeof other === "string" ? { title: other } : other));
  if (!others.length) return null;
  const named = (other) => {
    const title = other.title || other.source_url || "another document";
    if (other.document_id) {
      return el("button", { type: "button", class: "link", onclick: () => open(other) }, title);
    }
    return externalLink(other.source_url, title);
  };
  return el("p", { class: "also" }, "Also in ", others.flatMap((other, at) => [at ? ", " : null, named(other)]));
}

function rankBadges(result) {
  const ranks = Object.entries(result.ranks ?? {}).filter(([, rank]) => rank);
  const only = ranks.length === 1 ? `, only by ${RANKERS[ranks[0][0]]}` : "";
  const merged = (result.chunk_ids ?? []).length;
  const badges = [
    ...ranks.map(([ranker, rank]) => [ranker, `${RANKERS[ranker] ?? ranker} #${rank}`, `Number ${rank} by ${RANKERS[ranker] ?? ranker}${only}`]),
    typeof result.rerank_score === "number" && ["rerank", `rerank ${result.rerank_score.toFixed(2)}`, "The reranker's score"],
    merged > 1 && ["merged", `${plural(merged, "passage")} joined`, "Neighbouring passages shown as one"],
  ].filter(Boolean);
  if (!badges.length) return el("span", {});
  return el("ul", { class: "why", "aria-label": "Why it was found" }, badges.map(([kind, words, more]) => el("li", { class: `rank ${kind}`, title: more }, words)));
}

/** Thumbs up and down for an answer or a passage. target: the fields that identify it in the request. */
export function feedbackButtons(target, what) {
  const group = el("div", { class: "thumbs", role: "group", "aria-label": `Was ${what} helpful?` });
  const button = (verdict, label, sign) =>
    el("button", { type: "button", class: "icon small", "aria-pressed": "false", "aria-label": `${label}: ${what}`, title: label, onclick: (event) => send(event.currentTarget, verdict) }, sign);
  const up = button("up", "Helpful", thumbIcon(false));
  const down = button("down", "Not helpful", thumbIcon(true));
  async function send(pressed, verdict) {
    for (const thumb of [up, down]) thumb.setAttribute("aria-pressed", String(thumb === pressed));
    try {
      await post("v1/feedback", { ...target, verdict });
      announce("Thank you for the feedback.");
    } catch (error) {
      pressed.setAttribute("aria-pressed", "false");
      pressed.title = error.message;
      announce(`The feedback could not be stored: ${error.message}`);
    }
  }
  group.append(up, down);
  return group;
}

const THUMB_PATH = "M7 11v9H4v-9zm0 0 4.2-7.2c1.6 0 2.4 1.2 2 2.8L12.4 10H18c1.5 0 2.4 1.2 2.1 2.6l-1.3 5.6c-.3 1.1-1.1 1.8-2.2 1.8H7";

const thumbIcon = (down) => svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true", class: down && "turned" }, svg("path", { d: THUMB_PATH }));
