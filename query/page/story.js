// One document: whether it can be found and why, what happened to it, its text.

import { get } from "./api.js";
import { $, ago, day, el, outward, place, plural, time, web } from "./dom.js";
import { typeName } from "./results.js";
import { marked } from "./words.js";

const OUTCOMES = {
  created: "new", updated: "its text changed", metadata: "title or details changed", access: "who may read it changed",
  unchanged: "nothing had changed", stale: "older than what was known", duplicate: "seen before", deleted: "taken away",
  recreated: "back again", stub: "only its access is known so far",
};
const STATES = { settled: "up to date", pending: "waiting", failed: "failed, will be tried again", partial: "partly indexed", withdrawn: "withdrawn" };
const TEXT_SHOWN = 60_000;

let asking = null;

/** Show a document in the drawer. passage: the text to point at in it; stems: the words to mark. */
export async function show(id, { passage, stems = [], closed }) {
  asking?.abort();
  const mine = (asking = new AbortController());
  const drawer = $("story");
  drawer.replaceChildren(head("Document", drawer), el("p", { class: "quiet-text" }, "Reading …"));
  drawer.onclose = () => {
    if (drawer.open) return; // it was closed and opened again before anybody could be told
    mine.abort();
    closed();
  };
  drawer.onclick = (event) => event.target === drawer && drawer.close();
  if (!drawer.open) drawer.showModal();
  const [document_, story] = await Promise.allSettled([get(`v1/documents/${encodeURIComponent(id)}`, mine.signal), get(`v1/documents/${encodeURIComponent(id)}/why`, mine.signal)]);
  if (mine.signal.aborted) return;
  if (document_.status === "rejected") {
    const gone = document_.reason.status === 404;
    drawer.replaceChildren(head(gone ? "Not here" : "Document", drawer),
      el("p", { class: "doubt" }, gone ? "The document does not exist, or you may not read it." : document_.reason.message));
    return;
  }
  const found = document_.value;
  drawer.replaceChildren(...[
    head(found.title || found.external_id, drawer),
    facts(found),
    story.status === "fulfilled" ? timeline(story.value) : el("p", { class: "doubt" }, `Its history cannot be read now: ${story.reason.message}`),
    reading(found, passage, stems),
  ].filter(Boolean));
  const here = drawer.querySelector(".here");
  if (here) here.parentElement.scrollTop = here.offsetTop - here.parentElement.offsetTop - 24;
}

function head(title, drawer) {
  return el("div", { class: "head" }, el("h2", { id: "story-title" }, title),
    el("button", { type: "button", class: "icon", "aria-label": "Close", title: "Close (Esc)", onclick: () => drawer.close() }, "×"));
}

function facts(found) {
  const url = web(found.source_url);
  const rows = [
    ["Source", found.source],
    [url ? "Leads to" : "Place", url ? outward(found.source_url, [url.host, " ↗"], "host") : place(found.source_url) || found.external_id],
    ["Author", found.author],
    ["Type", typeName(found.media_type)],
    ["Changed", found.source_modified_at && day(found.source_modified_at)],
  ].filter(([, value]) => value);
  return el("dl", { class: "facts" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function timeline(story) {
  const active = (story.generations ?? []).find((one) => one.active);
  const moments = [
    ...(story.events ?? []).map((event) => ({ at: event.at, what: happened(event), more: [event.version && `version ${event.version}`, event.lane === "backfill" && "first load"].filter(Boolean).join(", ") })),
    ...["vectors", "keywords"].flatMap((store) => stored(store, active)),
    ...(story.dead ?? []).map((letter) => ({ at: letter.at, bad: !letter.replayed_at, what: `Set aside: ${letter.message ?? letter.code}`, more: letter.replayed_at ? "sent again since" : letter.code })),
  ].sort((a, b) => (a.at ?? "").localeCompare(b.at ?? ""));
  return el("section", { class: "story", "aria-label": "Its story" },
    el("p", { class: story.searchable ? "verdict good" : "verdict bad" },
      el("strong", {}, story.searchable ? "It is searchable" : "It is not searchable now"), story.reason ? [": ", worded(story.reason), "."] : "."),
    story.next && el("p", { class: "next" }, el("strong", {}, "Next step"), ": ", story.next.startsWith("penstock ") && !story.next.includes("`") ? el("code", {}, story.next) : worded(story.next)),
    story.notes?.length > 0 && el("ul", { class: "notes", "aria-label": "Worth knowing" }, story.notes.map((note) => el("li", {}, worded(note)))),
    moments.length > 0 && el("ol", { class: "timeline" }, moments.map((one) => el("li", { class: one.bad ? "bad" : one.store ? "good" : "" }, el("p", {}, one.what), el("p", { class: "when" }, one.at ? [time(one.at), ` · ${ago(one.at)}`] : "not yet", one.more && ` · ${one.more}`)))),
    access(story.access));
}

/** Commands stand between backticks. */
function worded(text) {
  return text.split("`").map((part, n) => (n % 2 ? el("code", {}, part) : part));
}

const KINDS = { upserted: "Published", deleted: "Deleted", "access-changed": "Access changed" };

function happened(event) {
  const kind = KINDS[event.kind?.replace(/^document\.|\.v\d+$/g, "")] ?? event.kind;
  return `${kind}: ${OUTCOMES[event.outcome] ?? event.outcome?.replaceAll("_", " ")}`;
}

function stored(store, active) {
  const one = active?.[store];
  if (!one) return [];
  const title = store === "vectors" ? "By meaning" : "By words";
  const done = one.state === "settled" || one.state === "partial";
  return [{ at: done ? one.at : (one.pending_since ?? one.at), store, bad: one.state === "failed", what: `${title}: ${STATES[one.state] ?? one.state}${done && active.chunks ? `, ${plural(active.chunks, "passage")}` : ""}`, more: one.error }];
}

function access(rule) {
  if (!rule?.acl_tags?.length) return null;
  const tags = (list) => list.map((tag, n) => [n ? " " : null, el("code", {}, tag)]);
  return el("p", { class: "access" }, "Readable by ", tags(rule.acl_tags), rule.required_tags?.length ? [", and only with ", tags(rule.required_tags)] : null);
}

/** The text, with the passage it was opened for. What is longer than a screen can bear is cut, and said so. */
function reading(found, passage, stems) {
  const whole = found.text ?? "";
  if (!whole) return null;
  const at = passage ? whole.indexOf(passage) : -1;
  const from = at > TEXT_SHOWN / 2 ? at - TEXT_SHOWN / 2 : 0;
  const text = whole.slice(from, from + TEXT_SHOWN);
  const body = el("div", { class: "whole", tabindex: "0", role: "region", "aria-label": "Text" });
  if (from) body.append(el("p", { class: "quiet-text" }, "… the beginning is left out"));
  if (at >= 0) {
    body.append(marked(text.slice(0, at - from), stems), el("span", { class: "here" }, marked(text.slice(at - from, at - from + passage.length), stems)), marked(text.slice(at - from + passage.length), stems));
  } else body.append(marked(text, stems));
  if (from + TEXT_SHOWN < whole.length) body.append(el("p", { class: "quiet-text" }, `… ${(whole.length - from - TEXT_SHOWN).toLocaleString("en")} more characters`));
  return el("section", { "aria-label": "The document" }, el("h3", {}, "Text"), body);
}
