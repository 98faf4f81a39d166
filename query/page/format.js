// Renders an answer's text: paragraphs, lists, quotations, code and citations, but no links, images or HTML. Every step keeps
// the offsets in the text, so that sentences can be marked by offset.

import { el } from "./dom.js";

const QUOTE = /^\s*>\s?(?:#{1,6}\s+)?/;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\[(\d{1,3}(?:\s*[,;]\s*\d{1,3})*)\]/g;
const ITEM = /^\s*(?:[-*•]|(\d{1,3})[.)])\s+/;

/** Render a text. context: {cite(n) → element or null, unsupported: [[start, end], …]}. Returns a fragment. */
export function renderText(text, context) {
  const nodes = document.createDocumentFragment();
  for (const block of blocks(text)) nodes.append(block.kind === "code" ? renderCode(text, block) : block.kind === "list" ? renderList(text, block, context) : block.kind === "quote" ? renderQuote(text, block, context) : renderParagraph(text, block, context));
  return nodes;
}

/** Group lines into blocks {kind, lines: [[start, end], …], ordered?}; a quotation has parts: [lines, …] instead of lines. */
function blocks(text) {
  const result = [];
  let open = null;
  let fenced = false;
  for (const [start, end] of lines(text)) {
    const line = text.slice(start, end);
    if (/^\s*```/.test(line)) {
      fenced = !fenced;
      open = fenced ? { kind: "code", lines: [] } : null;
      if (open) result.push(open);
    } else if (fenced) {
      open.lines.push([start, end]);
    } else if (!line.trim()) {
      open = null;
    } else if (QUOTE.test(line)) {
      if (open?.kind !== "quote") result.push((open = { kind: "quote", parts: [[]] }));
      const from = start + QUOTE.exec(line)[0].length;
      if (text.slice(from, end).trim()) open.parts.at(-1).push([from, end]);
      else open.parts.push([]);
    } else if (ITEM.test(line)) {
      const ordered = ITEM.exec(line)[1] !== undefined;
      if (open?.kind !== "list" || open.ordered !== ordered) result.push((open = { kind: "list", ordered, lines: [] }));
      open.lines.push([start + ITEM.exec(line)[0].length, end]);
    } else if (open?.kind === "list") {
      open.lines[open.lines.length - 1][1] = end; // the item continues
    } else {
      if (!open) result.push((open = { kind: "paragraph", lines: [] }));
      open.lines.push([start + /^\s*(?:#{1,6}\s+)?/.exec(line)[0].length, end]);
    }
  }
  return result;
}

function* lines(text) {
  let start = 0;
  while (start <= text.length) {
    const end = text.indexOf("\n", start);
    yield [start, end < 0 ? text.length : end];
    if (end < 0) return;
    start = end + 1;
  }
}

const renderCode = (text, block) => el("pre", {}, el("code", {}, block.lines.map(([a, b]) => text.slice(a, b)).join("\n")));

const renderList = (text, block, context) =>
  el(block.ordered ? "ol" : "ul", {}, block.lines.map(([a, b]) => el("li", {}, renderInline(text, a, b, context))));

const renderParagraph = (text, block, context) =>
  el("p", {}, block.lines.map(([a, b], n) => [n ? " " : null, ...renderInline(text, a, b, context)]));

const renderQuote = (text, block, context) =>
  el("blockquote", {}, block.parts.filter((part) => part.length).map((part) => renderParagraph(text, { lines: part }, context)));

/** Render a range of the text, split where an unsupported sentence begins or ends. */
function renderInline(text, start, end, context) {
  const nodes = [];
  let at = start;
  for (const [from, to] of context.unsupported ?? []) {
    const a = Math.max(from, at);
    const b = Math.min(to, end);
    if (a >= b) continue;
    nodes.push(...renderPieces(text, at, a, context));
    nodes.push(el("span", { class: "unsupported" }, renderPieces(text, a, b, context), el("span", { class: "visually-hidden" }, " (no passage supports this)")));
    at = b;
  }
  nodes.push(...renderPieces(text, at, end, context));
  return nodes;
}

function renderPieces(text, start, end, context) {
  const nodes = [];
  const part = text.slice(start, end);
  let at = 0;
  for (const match of part.matchAll(INLINE)) {
    nodes.push(part.slice(at, match.index));
    if (match[1] !== undefined) nodes.push(el("code", {}, match[1]));
    else if (match[2] !== undefined) nodes.push(el("strong", {}, match[2]));
    else nodes.push(...citationNodes(match, context));
    at = match.index + match[0].length;
  }
  nodes.push(part.slice(at));
  return nodes;
}

/** A citation of unknown passages stays plain text. */
function citationNodes(match, context) {
  const numbers = match[3].split(/[,;]/).map((n) => Number(n.trim()));
  const links = numbers.map((n) => context.cite(n));
  return links.every(Boolean) ? links : [match[0]];
}

const CITATIONS = "(?:\\s*\\[[\\d\\s,;]*\\])*";
/** Matches citations between words: the text has them, the unsupported sentences do not. */

const escapeRegExp = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

/** Find sentences in a text. Returns their ranges, sorted and without overlap, and the sentences that are missing. */
export function locateSentences(text, sentences) {
  const result = [];
  const missing = [];
  for (const sentence of sentences ?? []) {
    const words = sentence.replace(/\[[\d\s,;]*\]/g, "").trim().split(/\s+/).filter(Boolean);
    const parts = words.map((word) => /^(.*?)([.,;:!?]*)$/.exec(word)).map(([, core, end]) => escapeRegExp(core) + (end ? `${CITATIONS}\\s*${escapeRegExp(end)}` : ""));
    const match = parts.length ? new RegExp(parts.join(`${CITATIONS}\\s+`)).exec(text) : null;
    if (match) result.push([match.index, match.index + match[0].length]);
    else missing.push(sentence);
  }
  result.sort((a, b) => a[0] - b[0]);
  const disjoint = result.filter(([from], n) => n === 0 || from >= result[n - 1][1]);
  return { ranges: disjoint, missing };
}
