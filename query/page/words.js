// Which words of a text are those of the query: cut to roughly their stem, as `penstock search` does.

const COMMON = new Set(
  ("and are but can does for from how into not that the this was what when where which who why with").split(" "),
);
const SNIPPET = 360;

/** The query's words as stems, longest first. */
export function wanted(query) {
  const words = new Set((query.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? []).filter((w) => w.length > 2 && !COMMON.has(w)));
  const stems = new Set([...words].map((w) => (w.length > 4 ? w.replace(/(?:ing|ed|es|s|e)$/u, "") : w)));
  return [...stems].sort((a, b) => b.length - a.length || (a < b ? -1 : 1));
}

const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

function pattern(stems) {
  return stems.length ? new RegExp(`(?<![\\p{L}\\p{N}_])(?:${stems.map(escaped).join("|")})[\\p{L}\\p{N}_]*`, "giu") : null;
}

/** A text as nodes, the query's words in <mark>. */
export function marked(text, stems) {
  const words = pattern(stems);
  const nodes = document.createDocumentFragment();
  let at = 0;
  for (const hit of words ? text.matchAll(words) : []) {
    nodes.append(text.slice(at, hit.index));
    const mark = document.createElement("mark");
    mark.textContent = hit[0];
    nodes.append(mark);
    at = hit.index + hit[0].length;
  }
  nodes.append(text.slice(at));
  return nodes;
}

/** The stretch of a text, on one line, that holds most different words of the query; null: all of it fits. */
export function snippet(text, stems) {
  const flat = plain(text);
  if (flat.length <= SNIPPET) return { text: flat, whole: true };
  const words = pattern(stems);
  const hits = [...(words ? flat.matchAll(words) : [])].map((hit) => ({
    at: hit.index,
    stem: stems.find((stem) => hit[0].toLowerCase().startsWith(stem)),
  }));
  let best = { start: 0, words: 0 };
  for (const start of [0, ...hits.map((hit) => Math.max(0, hit.at - 60))]) {
    const held = new Set(hits.filter((hit) => hit.at >= start && hit.at < start + SNIPPET).map((hit) => hit.stem)).size;
    if (held > best.words) best = { start, words: held };
  }
  const start = best.start ? flat.lastIndexOf(" ", best.start) + 1 : 0;
  let end = start + SNIPPET;
  if (end < flat.length) end = Math.max(flat.lastIndexOf(" ", end), start + SNIPPET / 2);
  return { text: (start ? "… " : "") + flat.slice(start, end) + (end < flat.length ? " …" : ""), whole: false };
}

/** A passage on one line, without the signs that Markdown puts before headings, lists and code. */
export function plain(text) {
  return text
    .replace(/^\s{0,3}#{1,6}\s+(.*)$/gm, "$1 —")
    .replace(/^\s*```.*$/gm, "")
    .replace(/\*\*|`/g, "")
    .replace(/\s+/g, " ")
    .replace(/ —$/, "")
    .trim();
}
