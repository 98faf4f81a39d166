// Renders Markdown as elements: paragraphs, headings, lists, quotations, code, tables, emphasis and citations, but no links,
// images or HTML, because the text is untrusted. Offsets are kept, so that sentences can be marked by their offsets.

import { el } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})([^`]*)$/;
const QUOTE = /^\s{0,3}>\s?/;
const HEADING = /^\s{0,3}#{1,6}\s+/;
const ITEM = /^(\s*)(?:[-*+•]|(\d{1,9})[.)])(?:\s+|$)/;
const RULE = /^\s{0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const DELIMITER_ROW = /^\|?\s*:?-+:?(?:\s*\|\s*:?-+:?)*\s*\|?$/;
const MAX_DEPTH = 6;
/** Blocks that are nested deeper are shown as paragraphs. */
const MAX_MARKED = 2000;
/** Marks are found for so many characters: looking for each one's end in the whole text would take seconds in a hostile text. */
const INLINE = new RegExp(
  [
    `(?<ticks>(?<!\`)\`+)(?!\`)(?<code>[^\`](?:.{0,${MAX_MARKED}}?[^\`])??)\\k<ticks>(?!\`)`,
    `(?<strong>\\*\\*|__)(?=\\S)(?<bold>.{0,${MAX_MARKED}}?[^\\s*_])\\k<strong>`,
    "(?<![\\w*])\\*(?=[^\\s*])(?<starred>[^*]*?[^\\s*])\\*(?![\\w*])",
    "(?<![\\w_])_(?=[^\\s_])(?<scored>[^_]*?[^\\s_])_(?![\\w_])",
    "~~(?=[^\\s~])(?<struck>[^~]*?[^\\s~])~~",
    "\\[(?<numbers>\\d{1,3}(?:\\s*[,;]\\s*\\d{1,3})*)\\]",
    "\\\\(?<escaped>[!-/:-@[-`{-~])",
    "(?<hard>(?<! ) {2,}|\\\\)\\n",
  ].join("|"),
  "gs",
);

/** Render a text. context: {cite(n) → element or null, unsupported: [[start, end], …]}. Returns a fragment. */
export function renderText(text, context = {}) {
  const nodes = document.createDocumentFragment();
  nodes.append(...renderBlocks(text, [...lines(text)], context, 0));
  return nodes;
}

/** The lines of a text as [start, end]. */
function* lines(text) {
  let start = 0;
  while (start <= text.length) {
    const end = text.indexOf("\n", start);
    yield [start, end < 0 ? text.length : end];
    if (end < 0) return;
    start = end + 1;
  }
}

/** Render lines, given as [start, end] without the marks of the blocks that they are in. */
function renderBlocks(text, rows, context, depth) {
  const nodes = [];
  const line = (n) => text.slice(...rows[n]);
  const isTable = (n) => n + 1 < rows.length && line(n).includes("|") && line(n + 1).includes("|") && DELIMITER_ROW.test(line(n + 1).trim());
  const beginsBlock = (n) => FENCE.test(line(n)) || HEADING.test(line(n)) || RULE.test(line(n)) || isTable(n) || (depth < MAX_DEPTH && (QUOTE.test(line(n)) || ITEM.test(line(n))));
  let n = 0;
  /** Take lines while the condition holds, each without what the pattern matches. */
  const take = (condition, mark) => {
    const taken = [];
    for (; n < rows.length && condition(line(n)); n++) taken.push([rows[n][0] + (mark?.exec(line(n))?.[0].length ?? 0), rows[n][1]]);
    return taken;
  };
  while (n < rows.length) {
    const first = line(n);
    const fence = FENCE.exec(first);
    if (!first.trim()) {
      n++;
    } else if (fence) {
      n++;
      const indent = /^\s*/.exec(first)[0].length;
      const code = take((row) => !closesFence(row, fence[1]), new RegExp(`^\\s{0,${indent}}`));
      n++;
      nodes.push(el("pre", { tabindex: "0" }, el("code", {}, code.map((row) => text.slice(...row)).join("\n"))));
    } else if (HEADING.test(first)) {
      const start = rows[n][0] + HEADING.exec(first)[0].length;
      nodes.push(el("p", { class: "heading" }, renderInline(text, [[start, rows[n++][1]]], context)));
    } else if (RULE.test(first)) {
      n++;
      nodes.push(el("hr", {}));
    } else if (isTable(n)) {
      nodes.push(renderTable(text, take((row) => row.includes("|")), context));
    } else if (depth < MAX_DEPTH && QUOTE.test(first)) {
      nodes.push(el("blockquote", {}, renderBlocks(text, take((row) => QUOTE.test(row), QUOTE), context, depth + 1)));
    } else if (depth < MAX_DEPTH && ITEM.test(first)) {
      const list = takeList(text, rows, n);
      n = list.end;
      nodes.push(el(list.ordered ? "ol" : "ul", list.from > 1 ? { start: list.from } : {}, list.items.map((item) => el("li", {}, renderItem(text, item, context, depth + 1)))));
    } else {
      const paragraph = [rows[n++]];
      while (n < rows.length && line(n).trim() && !beginsBlock(n)) paragraph.push(rows[n++]);
      nodes.push(el("p", {}, renderInline(text, paragraph, context)));
    }
  }
  return nodes;
}

function closesFence(line, ticks) {
  const mark = line.trim();
  return mark.length >= ticks.length && [...mark].every((character) => character === ticks[0]);
}

/** The list that begins at a line: {items: [rows, …], ordered, from, end}. What is indented like an item's text belongs to it. */
function takeList(text, rows, begin) {
  const [, , number] = ITEM.exec(text.slice(...rows[begin]));
  const list = { items: [], ordered: number !== undefined, from: Number(number), end: begin };
  let indent = 0;
  let blank = 0;
  for (let n = begin; n < rows.length; n++) {
    const line = text.slice(...rows[n]);
    const depth = /^\s*/.exec(line)[0].length;
    const item = ITEM.exec(line);
    if (!line.trim()) {
      blank++;
      continue;
    }
    if (item && (!list.items.length || depth < indent)) {
      if ((item[2] !== undefined) !== list.ordered) break;
      indent = Math.min(item[0].length, depth + 4);
      list.items.push([[rows[n][0] + item[0].length, rows[n][1]]]);
    } else if (depth >= indent || (!blank && !item && !FENCE.test(line) && !QUOTE.test(line) && !HEADING.test(line))) {
      const rest = list.items.at(-1);
      for (; blank > 0; blank--) rest.push([rows[n][0], rows[n][0]]);
      rest.push([rows[n][0] + Math.min(depth, indent), rows[n][1]]);
    } else {
      break;
    }
    blank = 0;
    list.end = n + 1;
  }
  return list;
}

/** The blocks of an item; its first paragraph has no element of its own. */
function renderItem(text, rows, context, depth) {
  const [first, ...rest] = renderBlocks(text, rows, context, depth);
  return first?.tagName === "P" ? [...first.childNodes, ...rest] : [first, ...rest];
}

function renderTable(text, rows, context) {
  const [header, , ...body] = rows.map((row) => cells(text, row));
  const row = (tag, list) => el("tr", {}, list.slice(0, header.length).map((cell) => el(tag, {}, renderInline(text, [cell], context))));
  return el("div", { class: "table", tabindex: "0" }, el("table", {}, el("thead", {}, row("th", header)), el("tbody", {}, body.map((list) => row("td", list)))));
}

/** The cells of a row as [start, end]. A bar with a backslash before it does not end a cell. */
function cells(text, [start, end]) {
  const found = [];
  let from = start;
  for (let at = start; at <= end; at++) {
    if (at < end && (text[at] !== "|" || text[at - 1] === "\\")) continue;
    if (at < end || text.slice(from, end).trim()) found.push([from, at]);
    from = at + 1;
  }
  return text.slice(start, end).trimStart().startsWith("|") ? found.slice(1) : found;
}

/** Render lines as one text, split where an unsupported sentence begins or ends. */
function renderInline(text, rows, context) {
  const whole = rows.map((row) => text.slice(...row)).join("\n");
  const nodes = [];
  let at = 0;
  for (const [from, to] of unsupportedIn(rows, context.unsupported ?? [])) {
    nodes.push(...renderPieces(whole.slice(at, from), context));
    nodes.push(el("span", { class: "unsupported" }, renderPieces(whole.slice(from, to), context), el("span", { class: "visually-hidden" }, " (no passage supports this)")));
    at = to;
  }
  nodes.push(...renderPieces(whole.slice(at), context));
  return nodes;
}

/** Ranges of the text as ranges of the lines that are joined. */
function unsupportedIn(rows, ranges) {
  const result = [];
  for (const [from, to] of ranges) {
    let offset = 0;
    let range = null;
    for (const [start, end] of rows) {
      const a = Math.max(from, start) - start + offset;
      const b = Math.min(to, end) - start + offset;
      if (a < b) range = [range?.[0] ?? a, b];
      offset += end - start + 1;
    }
    if (range) result.push(range);
  }
  return result;
}

function renderPieces(text, context) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const { ticks, code, strong, bold, starred, scored, struck, numbers, escaped } = match.groups;
    nodes.push(text.slice(at, match.index));
    if (ticks !== undefined) nodes.push(el("code", {}, code.replace(/\n/g, " ")));
    else if (strong !== undefined) nodes.push(el("strong", {}, renderPieces(bold, context)));
    else if (starred ?? scored) nodes.push(el("em", {}, renderPieces(starred ?? scored, context)));
    else if (struck !== undefined) nodes.push(el("s", {}, renderPieces(struck, context)));
    else if (numbers !== undefined) nodes.push(...citationNodes(match[0], numbers, context));
    else if (escaped !== undefined) nodes.push(escaped);
    else nodes.push(el("br", {}));
    at = match.index + match[0].length;
  }
  nodes.push(text.slice(at));
  return nodes;
}

/** A citation of unknown passages stays plain text. */
function citationNodes(written, numbers, context) {
  const links = numbers.split(/[,;]/).map((n) => context.cite?.(Number(n.trim())));
  return links.every(Boolean) ? links : [written];
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
