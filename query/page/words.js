// Highlights the words of the query in a text, compared by rough stems as in `penstock search`.

import { visible } from "./dom.js";

const COMMON = new Set(
  ("and are but can does for from how into not that the this was what when where which who why with").split(" "),
);
const SNIPPET = 360;

/** The query's words as stems, longest first. */
export function queryStems(query) {
  const words = new Set((query.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? []).filter((w) => w.length > 2 && !COMMON.has(w)));
  const stems = new Set([...words].map((w) => (w.length > 4 ? w.replace(/(?:ing|ed|es|s|e)$/u, "") : w)));
  return [...stems].sort((a, b) => b.length - a.length || (a < b ? -1 : 1));
}

const escapeRegExp = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

function pattern(stems) {
  return stems.length ? new RegExp(`(?<![\\p{L}\\p{N}_])(?:${stems.map(escapeRegExp).join("|")})[\\p{L}\\p{N}_]*`, "giu") : null;
}

/** A text as nodes, with the query's words in <mark>. */
export function highlight(original, stems) {
  const text = visible(original);
  const words = pattern(stems);
  const nodes = document.createDocumentFragment();
  let at = 0;
  for (const match of words ? text.matchAll(words) : []) {
    nodes.append(text.slice(at, match.index));
    const mark = document.createElement("mark");
    mark.textContent = match[0];
    nodes.append(mark);
    at = match.index + match[0].length;
  }
  nodes.append(text.slice(at));
  return nodes;
}

/** Mark the query's words in an element that is rendered already. Returns the element. */
export function highlightWithin(node, stems) {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) text.replaceWith(highlight(text.data, stems));
  return node;
}

/** The part of a text, on one line, with the most different words of the query. whole: all of the text fits. */
export function snippet(text, stems) {
  const flat = stripMarkdown(text);
  if (flat.length <= SNIPPET) return { text: flat, whole: true };
  const words = pattern(stems);
  const hits = [...(words ? flat.matchAll(words) : [])].map((match) => ({
    at: match.index,
    stem: stems.find((stem) => match[0].toLowerCase().startsWith(stem)),
  }));
  let best = { start: 0, words: 0 };
  for (const start of [0, ...hits.map((match) => Math.max(0, match.at - 60))]) {
    const held = new Set(hits.filter((match) => match.at >= start && match.at < start + SNIPPET).map((match) => match.stem)).size;
    if (held > best.words) best = { start, words: held };
  }
  const start = best.start ? flat.lastIndexOf(" ", best.start) + 1 : 0;
  let end = start + SNIPPET;
  if (end < flat.length) end = Math.max(flat.lastIndexOf(" ", end), start + SNIPPET / 2);
  return { text: (start ? "… " : "") + flat.slice(start, end) + (end < flat.length ? " …" : ""), whole: false };
}

/** Whether a line consists of the marks between a table's header and its rows. */
const isDelimiterRow = (row) => row.includes("-") && row.lastIndexOf("|") > row.indexOf("-");

/**
 * A passage on one line, without Markdown's marks for headings, emphasis, code and tables. Each pattern is found in time
 * proportional to the text: within a line, and without parts that could match the same characters.
 */
export function stripMarkdown(text) {
  return text
    .replace(/^\s{0,3}#{1,6}\s+(.*)$/gm, "$1 —")
    .replace(/^[^\S\n]*(?:```|~~~).*$/gm, "")
    .replace(/^(?:[^\S\n]|[:|-])+$/gm, (row) => (isDelimiterRow(row) ? "" : row))
    .replace(/^[^\S\n]*\|(.*)\|[^\S\n]*$/gm, "$1")
    .replace(/\*\*|`/g, "")
    .replace(/(?<![\w*])\*(?=[^\s*])([^*\n]*[^\s*])\*(?![\w*])/g, "$1")
    .replace(/(?<![\w_])_(?=[^\s_])([^_\n]*[^\s_])_(?![\w_])/g, "$1")
    .replace(/\s+/g, " ")
    .replace(/ —$/, "")
    .trim();
}
