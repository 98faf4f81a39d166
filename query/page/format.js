// An answer's text as elements: paragraphs, lists, quotations, code, citations. Nothing else is read from it: no links, no images,
// no HTML. Places in the text are kept all the way, so that sentences can be marked by where they stand.

import { el } from "./dom.js";

const QUOTED = /^\s*>\s?(?:#{1,6}\s+)?/;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\[(\d{1,3}(?:\s*[,;]\s*\d{1,3})*)\]/g;
const ITEM = /^\s*(?:[-*•]|(\d{1,3})[.)])\s+/;

/** context: {cite(n) → element or null, unsupported: [[start, end], …]}. Returns a fragment. */
export function formatted(text, context) {
  const made = document.createDocumentFragment();
  for (const block of blocks(text)) made.append(block.kind === "code" ? code(text, block) : block.kind === "list" ? list(text, block, context) : block.kind === "quote" ? quote(text, block, context) : paragraph(text, block, context));
  return made;
}

/** Lines gathered into blocks: {kind, lines: [[start, end], …], ordered?}; of a quotation parts: [lines, …]. */
function blocks(text) {
  const found = [];
  let open = null;
  let fenced = false;
  for (const [start, end] of lines(text)) {
    const line = text.slice(start, end);
    if (/^\s*```/.test(line)) {
      fenced = !fenced;
      open = fenced ? { kind: "code", lines: [] } : null;
      if (open) found.push(open);
    } else if (fenced) {
      open.lines.push([start, end]);
    } else if (!line.trim()) {
      open = null;
    } else if (QUOTED.test(line)) {
      if (open?.kind !== "quote") found.push((open = { kind: "quote", parts: [[]] }));
      const from = start + QUOTED.exec(line)[0].length;
      if (text.slice(from, end).trim()) open.parts.at(-1).push([from, end]);
      else open.parts.push([]);
    } else if (ITEM.test(line)) {
      const ordered = ITEM.exec(line)[1] !== undefined;
      if (open?.kind !== "list" || open.ordered !== ordered) found.push((open = { kind: "list", ordered, lines: [] }));
      open.lines.push([start + ITEM.exec(line)[0].length, end]);
    } else if (open?.kind === "list") {
      open.lines[open.lines.length - 1][1] = end; // an item that goes on
    } else {
      if (!open) found.push((open = { kind: "paragraph", lines: [] }));
      open.lines.push([start + /^\s*(?:#{1,6}\s+)?/.exec(line)[0].length, end]);
    }
  }
  return found;
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

const code = (text, block) => el("pre", {}, el("code", {}, block.lines.map(([a, b]) => text.slice(a, b)).join("\n")));

const list = (text, block, context) =>
  el(block.ordered ? "ol" : "ul", {}, block.lines.map(([a, b]) => el("li", {}, inline(text, a, b, context))));

const paragraph = (text, block, context) =>
  el("p", {}, block.lines.map(([a, b], n) => [n ? " " : null, ...inline(text, a, b, context)]));

const quote = (text, block, context) =>
  el("blockquote", {}, block.parts.filter((part) => part.length).map((part) => paragraph(text, { lines: part }, context)));

/** Nodes of one stretch, cut where an unsupported sentence begins or ends. */
function inline(text, start, end, context) {
  const made = [];
  let at = start;
  for (const [from, to] of context.unsupported ?? []) {
    const a = Math.max(from, at);
    const b = Math.min(to, end);
    if (a >= b) continue;
    made.push(...pieces(text, at, a, context));
    made.push(el("span", { class: "unsupported" }, pieces(text, a, b, context), el("span", { class: "visually-hidden" }, " (no passage supports this)")));
    at = b;
  }
  made.push(...pieces(text, at, end, context));
  return made;
}

function pieces(text, start, end, context) {
  const made = [];
  const part = text.slice(start, end);
  let at = 0;
  for (const hit of part.matchAll(INLINE)) {
    made.push(part.slice(at, hit.index));
    if (hit[1] !== undefined) made.push(el("code", {}, hit[1]));
    else if (hit[2] !== undefined) made.push(el("strong", {}, hit[2]));
    else made.push(...cited(hit, context));
    at = hit.index + hit[0].length;
  }
  made.push(part.slice(at));
  return made;
}

/** A citation of what was not given stays the text that it is. */
function cited(hit, context) {
  const numbers = hit[3].split(/[,;]/).map((n) => Number(n.trim()));
  const links = numbers.map((n) => context.cite(n));
  return links.every(Boolean) ? links : [hit[0]];
}

const SIGNS = "(?:\\s*\\[[\\d\\s,;]*\\])*";
/** Citations, which sentences are given without and the text has. */

const literal = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

/** Where sentences stand in a text, sorted and without overlap, and those that do not stand there word for word. */
export function located(text, sentences) {
  const found = [];
  const missing = [];
  for (const sentence of sentences ?? []) {
    const words = sentence.replace(/\[[\d\s,;]*\]/g, "").trim().split(/\s+/).filter(Boolean);
    const parts = words.map((word) => /^(.*?)([.,;:!?]*)$/.exec(word)).map(([, core, end]) => literal(core) + (end ? `${SIGNS}\\s*${literal(end)}` : ""));
    const hit = parts.length ? new RegExp(parts.join(`${SIGNS}\\s+`)).exec(text) : null;
    if (hit) found.push([hit.index, hit.index + hit[0].length]);
    else missing.push(sentence);
  }
  found.sort((a, b) => a[0] - b[0]);
  const apart = found.filter(([from], n) => n === 0 || from >= found[n - 1][1]);
  return { ranges: apart, missing };
}
