// For operators: is what changed at the sources searchable, how soon, and what stands in the way.

import { get } from "./api.js";
import { $, ago, duration, el, plural, time } from "./dom.js";
import * as review from "./review.js";
import { sparkline } from "./sparkline.js";

const EVERY_MS = 5_000;
const HIDDEN_MS = 60_000;

let running = null;
let timer = 0;

export function start() {
  if (running) return;
  running = new AbortController();
  if (!$("view-pipeline").childElementCount) $("view-pipeline").append(el("p", { class: "quiet-text" }, "Looking …"));
  turn(running);
}

export function stop() {
  running?.abort();
  running = null;
  clearTimeout(timer);
}

async function turn(mine) {
  const view = $("view-pipeline");
  try {
    const [found, answers] = await Promise.all([get("v1/pipeline", mine.signal), review.waiting(mine.signal)]);
    if (mine.signal.aborted) return;
    draw(view, { ...found, away: [...(found.away ?? []), ...answers.away] }, answers.waiting);
  } catch (error) {
    if (error.name === "AbortError") return;
    const why = error.status === 403 ? "This view is for operators only." : error.message;
    view.querySelector(":scope > .doubt")?.remove();
    view.prepend(el("p", { class: "doubt", role: "alert" }, why));
    view.querySelector(":scope > .quiet-text")?.remove();
    if (error.status === 403 || error.status === 401) return;
  }
  timer = setTimeout(() => turn(mine), document.hidden ? HIDDEN_MS : EVERY_MS);
}

/** Look again now. */
async function again() {
  clearTimeout(timer);
  if (running) await turn(running);
}

function draw(view, found, answers) {
  const focused = document.activeElement?.id;
  const open = new Set([...view.querySelectorAll("details[open]")].map((one) => one.id));
  view.replaceChildren(...[
    el("header", { class: "overview" }, el("h1", {}, "Pipeline"), el("p", { class: "quiet-text" }, "As of ", time(found.at, { timeStyle: "medium" }), ", looked at again every few seconds")),
    ...(found.away ?? []).map((why) => el("p", { class: "doubt" }, el("strong", {}, "Unavailable: "), why)),
    el("div", { class: "tiles" }, ...tiles(found)),
    freshness(found.freshness),
    el("div", { class: "pair" }, letters(found.dead_letters), divergence(found.divergence)),
    connectors(found.connectors),
    review.panel(answers, again),
    el("div", { class: "pair" }, stores(found.stores), lag(found.lag)),
  ].filter(Boolean));
  for (const one of view.querySelectorAll("details")) one.open = open.has(one.id);
  if (focused && view.contains($(focused))) $(focused).focus();
}

function tile(title, value, more, state) {
  return el("div", { class: `tile ${state ?? ""}` }, el("h2", {}, title), el("p", { class: "value" }, value), el("p", { class: "more" }, more));
}

function tiles(found) {
  const { freshness: fresh, pending, dead_letters: dead, divergence: differs } = found;
  const made = [];
  if (fresh) {
    const late = fresh.now.p99 !== null && fresh.now.p99 > fresh.objective_seconds;
    made.push(tile("Fresh within", duration(fresh.now.p50), fresh.now.documents ? `99 of 100 within ${duration(fresh.now.p99)}, last ${duration(fresh.now.window_seconds)}` : `nothing changed in the last ${duration(fresh.now.window_seconds)}`, late ? "bad" : fresh.now.documents ? "good" : ""));
  }
  if (pending) {
    const n = pending.vectors.documents + pending.keywords.documents;
    const least = pending.vectors.more || pending.keywords.more ? "more than " : "";
    const failing = pending.vectors.failing + pending.keywords.failing;
    made.push(tile("Oldest waiting", n ? `${least && "≥ "}${duration(pending.oldest_seconds)}` : "none", n ? `${least}${pending.vectors.documents.toLocaleString("en")} for meaning, ${pending.keywords.documents.toLocaleString("en")} for words${failing ? `; ${failing.toLocaleString("en")} failing` : ""}` : "both stores hold all there is", n && pending.oldest_seconds > (fresh?.objective_seconds ?? 300) ? "bad" : n ? "" : "good"));
  }
  if (found.lag) made.push(tile("Lag", found.lag.records.toLocaleString("en"), found.lag.records ? "events not taken yet" : "every event is taken", found.lag.records > 10_000 ? "bad" : found.lag.records ? "" : "good"));
  if (dead) made.push(tile("Dead letters", `${dead.waiting.toLocaleString("en")}${dead.more ? "+" : ""}`, dead.waiting ? "wait for somebody" : "none waits", dead.waiting ? "bad" : "good"));
  if (differs) made.push(tile("Divergent", differs.audited ? differs.documents.toLocaleString("en") : "–", differs.audited ? `last whole audit ${duration(differs.age_seconds)} ago` : "no audit has finished yet", differs.documents ? "bad" : differs.audited ? "good" : ""));
  return made;
}

function panel(title, ...content) {
  return el("section", { class: "panel" }, el("h2", {}, title), content);
}

function freshness(fresh) {
  if (!fresh) return null;
  const points = fresh.over_time.map((one) => ({ ...one, value: one.p99, label: new Date(one.at).toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit" }) }));
  const known = points.filter((one) => one.value !== null);
  const worst = known.reduce((a, b) => (a && a.value >= b.value ? a : b), null);
  const said = worst ? `Freshness over ${duration(fresh.over_time_seconds)}: at worst 99 of 100 documents within ${duration(worst.value)}, at ${worst.label}` : "Freshness over time: nothing yet";
  return panel("Freshness over time",
    el("figure", {}, sparkline(points, { limit: fresh.objective_seconds, label: said, unit: duration }),
      el("figcaption", {}, el("span", {}, `${duration(fresh.over_time_seconds)} ago`), el("span", { class: "legend" }, "99 of 100 searchable within · dashes: the objective, ", duration(fresh.objective_seconds), fresh.sampled && " · from samples"), el("span", {}, "now"))));
}

function table(head, rows, empty) {
  if (!rows.length) return el("p", { class: "quiet-text" }, empty);
  return el("div", { class: "scroll", id: `table-${head[0]}-${head[1]}`, tabindex: "0", role: "region", "aria-label": head.join(", ") },
    el("table", {}, el("thead", {}, el("tr", {}, head.map((one) => el("th", { scope: "col" }, one)))), el("tbody", {}, rows)));
}

const row = (...cells) => el("tr", {}, cells.map((cell) => el("td", {}, cell)));
const dot = (state, text) => el("span", { class: `dot ${state}` }, text);

function letters(dead) {
  if (!dead) return null;
  return panel("Dead letters",
    table(["Stage", "Reason", "Waiting", "Newest"], dead.by_code.map((one) => row(one.stage, el("code", {}, one.code), one.letters.toLocaleString("en"), ago(one.newest_at))), "No event was set aside."),
    dead.waiting > 0 && el("p", { class: "quiet-text" }, el("code", {}, "penstock dead list"), " names them, ", el("code", {}, "penstock dead replay"), " sends them again."));
}

function divergence(differs) {
  if (!differs) return null;
  return panel("Divergence from the ledger",
    table(["Store", "What", "Documents"], differs.by.map((one) => row(one.store, one.kind.replaceAll("_", " "), one.documents.toLocaleString("en"))), differs.audited ? "Both stores equal the ledger." : "The first audit is under way."),
    differs.round && el("p", { class: "quiet-text" }, `The round under way has compared ${plural(differs.round.documents, "document")}.`));
}

const CONDITIONS = { following: "good", "first load": "busy", paused: "idle", waiting: "idle", "needs attention": "bad", "not running": "bad" };

function connectors(all) {
  if (!all) return null;
  return panel("Connectors",
    table(["Source", "Kind", "State", "Last success", "Last sweep", "Published", "Error"], all.map((one) => row(
      el("strong", {}, one.source), one.kind, dot(CONDITIONS[one.state] ?? "idle", one.state), ago(one.last_success_at), ago(one.last_sweep_at), one.published.toLocaleString("en"), el("span", { class: "reason" }, one.reason ?? ""))),
    "No connector has run here."));
}

function stores(all) {
  if (!all) return null;
  return panel("Stores", table(["Store", "State", "Holds"], all.map((one) => row(one.name, dot(one.up ? "good" : one.up === null ? "idle" : "bad", one.up ? "up" : one.up === null ? "not known" : "away"), one.holds ?? "")), "None."));
}

function lag(found) {
  if (!found) return null;
  return panel("Waiting in Kafka", table(["Consumers", "Topic", "Events"], found.groups.filter((one) => one.records).map((one) => row(one.group, one.topic, one.records.toLocaleString("en"))), "Every event has been taken."));
}
