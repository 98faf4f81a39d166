// The drawer of one document: whether it is searchable and why, what contradicts it, its history and its text.

import { get } from "./api.js";
import * as conflicts from "./conflicts.js";
import { $, ago, day, el, externalLink, shortLocation, plural, time, webUrl } from "./dom.js";
import * as preview from "./preview.js";
import { typeName } from "./results.js";
import { highlight } from "./words.js";

const OUTCOMES = {
  created: "new", updated: "text changed", metadata: "title or details changed", access: "access changed",
  unchanged: "unchanged", stale: "older than the accepted version", duplicate: "seen before", deleted: "removed",
  recreated: "created again", stub: "only its access is known so far",
};
const STATES = { settled: "up to date", pending: "waiting", failed: "failed, will be retried", partial: "partly indexed", withdrawn: "withdrawn" };
const TEXT_SHOWN = 60_000;

let running = null;

/** Show a document in the drawer. passage: text to highlight and scroll to; stems: words to mark. */
export async function show(id, { passage, stems = [], onClosed }) {
  running?.abort();
  const controller = (running = new AbortController());
  const drawer = $("story");
  drawer.replaceChildren(drawerHeader("Document", drawer), el("p", { class: "quiet-text" }, "Reading …"));
  drawer.onclose = () => {
    if (drawer.open) return; // it was closed and opened again before this event arrived
    controller.abort();
    onClosed();
  };
  drawer.onclick = (event) => void (event.target === drawer && drawer.close()); // false would disable links
  if (!drawer.open) drawer.showModal();
  const [document_, story, conflicting] = await Promise.allSettled([
    get(`v1/documents/${encodeURIComponent(id)}`, controller.signal),
    get(`v1/documents/${encodeURIComponent(id)}/why`, controller.signal),
    conflicts.ofDocument(id, controller.signal),
  ]);
  if (controller.signal.aborted) return;
  if (document_.status === "rejected") {
    const gone = document_.reason.status === 404;
    drawer.replaceChildren(drawerHeader(gone ? "Not here" : "Document", drawer),
      el("p", { class: "doubt" }, gone ? "The document does not exist, or you may not read it." : document_.reason.message));
    return;
  }
  const doc = document_.value;
  drawer.replaceChildren(...[
    drawerHeader(doc.title || doc.external_id, drawer),
    facts(doc),
    story.status === "fulfilled" ? timeline(story.value) : el("p", { class: "doubt" }, `The history cannot be loaded: ${story.reason.message}`),
    conflicting.status === "fulfilled"
      ? conflicts.panel(conflicting.value, () => show(id, { passage, stems, onClosed }), "h3")
      : el("p", { class: "doubt" }, `Contradictions cannot be loaded: ${conflicting.reason.message}`),
    documentText(doc, passage, stems),
    preview.section(doc, controller.signal),
  ].filter(Boolean));
  const here = drawer.querySelector(".here");
  if (here) here.parentElement.scrollTop = here.offsetTop - here.parentElement.offsetTop - 24;
}

/** Close the drawer and discard what it shows, because the caller has changed. onClosed is not called. */
export function clear() {
  running?.abort();
  preview.forget();
  const drawer = $("story");
  drawer.onclose = null;
  drawer.close();
  drawer.replaceChildren();
}

function drawerHeader(title, drawer) {
  return el("div", { class: "head" }, el("h2", { id: "story-title" }, title),
    el("button", { type: "button", class: "icon", "aria-label": "Close", title: "Close (Esc)", onclick: () => drawer.close() }, "×"));
}

function facts(doc) {
  const url = webUrl(doc.source_url);
  const rows = [
    ["Source", doc.source],
    [url ? "Leads to" : "Place", url ? externalLink(doc.source_url, [url.host, " ↗"], "host") : shortLocation(doc.source_url) || doc.external_id],
    ["Author", doc.author],
    ["Type", typeName(doc.media_type)],
    ["Changed", doc.source_modified_at && day(doc.source_modified_at)],
  ].filter(([, value]) => value);
  return el("dl", { class: "facts" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function timeline(story) {
  const active = (story.generations ?? []).find((generation) => generation.active);
  const entries = [
    ...(story.events ?? []).map((event) => ({ at: event.at, what: describeEvent(event), more: [event.version && `version ${event.version}`, event.lane === "backfill" && "first load"].filter(Boolean).join(", ") })),
    ...["vectors", "keywords"].flatMap((store) => storeEntries(store, active)),
    ...(story.dead ?? []).map((letter) => ({ at: letter.at, bad: !letter.replayed_at, what: `Dead letter: ${letter.message ?? letter.code}`, more: letter.replayed_at ? "replayed since" : letter.code })),
  ].sort((a, b) => (a.at ?? "").localeCompare(b.at ?? ""));
  return el("section", { class: "story", "aria-label": "History" },
    el("p", { class: story.searchable ? "verdict good" : "verdict bad" },
      el("strong", {}, story.searchable ? "It is searchable" : "It is not searchable now"), story.reason ? [": ", withCode(story.reason), "."] : "."),
    story.next && el("p", { class: "next" }, el("strong", {}, "Next step"), ": ", story.next.startsWith("penstock ") && !story.next.includes("`") ? el("code", {}, story.next) : withCode(story.next)),
    story.notes?.length > 0 && el("ul", { class: "notes", "aria-label": "Worth knowing" }, story.notes.map((note) => el("li", {}, withCode(note)))),
    entries.length > 0 && el("ol", { class: "timeline" }, entries.map((entry) => el("li", { class: entry.bad ? "bad" : entry.store ? "good" : "" }, el("p", {}, entry.what), el("p", { class: "when" }, entry.at ? [time(entry.at), ` · ${ago(entry.at)}`] : "not yet", entry.more && ` · ${entry.more}`)))),
    access(story.access));
}

/** Render text between backticks as code. */
function withCode(text) {
  return text.split("`").map((part, n) => (n % 2 ? el("code", {}, part) : part));
}

const KINDS = { upserted: "Published", deleted: "Deleted", "access-changed": "Access changed" };

function describeEvent(event) {
  const kind = KINDS[event.kind?.replace(/^document\.|\.v\d+$/g, "")] ?? event.kind;
  return `${kind}: ${OUTCOMES[event.outcome] ?? event.outcome?.replaceAll("_", " ")}`;
}

function storeEntries(store, active) {
  const progress = active?.[store];
  if (!progress) return [];
  const title = store === "vectors" ? "By meaning" : "By words";
  const done = progress.state === "settled" || progress.state === "partial";
  return [{ at: done ? progress.at : (progress.pending_since ?? progress.at), store, bad: progress.state === "failed", what: `${title}: ${STATES[progress.state] ?? progress.state}${done && active.chunks ? `, ${plural(active.chunks, "passage")}` : ""}`, more: progress.error }];
}

function access(rule) {
  if (!rule?.acl_tags?.length) return null;
  const tags = (list) => list.map((tag, n) => [n ? " " : null, el("code", {}, tag)]);
  return el("p", { class: "access" }, "Readable by ", tags(rule.acl_tags), rule.required_tags?.length ? [", and only with ", tags(rule.required_tags)] : null);
}

/** The document's text with the passage highlighted. A very long text is cut, which is stated. */
function documentText(doc, passage, stems) {
  const whole = doc.text ?? "";
  if (!whole) return null;
  const at = passage ? whole.indexOf(passage) : -1;
  const from = at > TEXT_SHOWN / 2 ? at - TEXT_SHOWN / 2 : 0;
  const text = whole.slice(from, from + TEXT_SHOWN);
  const body = el("div", { class: "whole", tabindex: "0", role: "region", "aria-label": "Text" });
  if (from) body.append(el("p", { class: "quiet-text" }, "… the beginning is not shown"));
  if (at >= 0) {
    body.append(highlight(text.slice(0, at - from), stems), el("span", { class: "here" }, highlight(text.slice(at - from, at - from + passage.length), stems)), highlight(text.slice(at - from + passage.length), stems));
  } else body.append(highlight(text, stems));
  if (from + TEXT_SHOWN < whole.length) body.append(el("p", { class: "quiet-text" }, `… ${(whole.length - from - TEXT_SHOWN).toLocaleString("en")} more characters`));
  return el("section", { "aria-label": "The document" }, el("h3", {}, "Text"), body);
}
