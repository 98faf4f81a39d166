// For operators: freshness, backlog, dead letters, differences, connectors and stores.

import { get } from "./api.js";
import * as conflicts from "./conflicts.js";
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
  if (!$("view-pipeline").childElementCount) $("view-pipeline").append(el("p", { class: "quiet-text" }, "Loading …"));
  poll(running);
}

export function stop() {
  running?.abort();
  running = null;
  clearTimeout(timer);
}

/** Stop, and discard what is shown, because the caller has changed. */
export function clear() {
  stop();
  conflicts.forget();
  $("view-pipeline").replaceChildren();
}

async function poll(controller) {
  const view = $("view-pipeline");
  try {
    const { signal } = controller;
    const [report, answers, conflicting] = await Promise.all([get("v1/pipeline", signal), review.loadReviews(signal), conflicts.loadConflicts(signal)]);
    if (controller.signal.aborted) return;
    draw(view, { ...report, away: [...(report.away ?? []), ...answers.away, ...conflicting.away] }, answers.waiting, conflicting.conflicts);
  } catch (error) {
    if (error.name === "AbortError") return;
    const why = error.status === 403 ? "This view is for operators only." : error.message;
    view.querySelector(":scope > .doubt")?.remove();
    view.prepend(el("p", { class: "doubt", role: "alert" }, why));
    view.querySelector(":scope > .quiet-text")?.remove();
    if (error.status === 403 || error.status === 401) return;
  }
  timer = setTimeout(() => poll(controller), document.hidden ? HIDDEN_MS : EVERY_MS);
}

/** Refresh now. */
async function refresh() {
  clearTimeout(timer);
  if (running) await poll(running);
}

function draw(view, report, answers, conflicting) {
  const focused = document.activeElement?.id;
  const open = new Set([...view.querySelectorAll("details[open]")].map((item) => item.id));
  view.replaceChildren(...[
    el("header", { class: "overview" }, el("h1", {}, "Pipeline"), el("p", { class: "quiet-text" }, "As of ", time(report.at, { timeStyle: "medium" }), ", refreshed every few seconds")),
    ...(report.away ?? []).map((why) => el("p", { class: "doubt" }, el("strong", {}, "Unavailable: "), why)),
    el("div", { class: "tiles" }, ...tiles(report)),
    freshnessPanel(report.freshness),
    el("div", { class: "pair" }, deadLettersPanel(report.dead_letters), divergencePanel(report.divergence)),
    connectorsPanel(report.connectors),
    review.panel(answers, refresh),
    conflicts.panel(conflicting, refresh),
    el("div", { class: "pair" }, storesPanel(report.stores), lagPanel(report.lag)),
  ].filter(Boolean));
  for (const item of view.querySelectorAll("details")) item.open = open.has(item.id);
  if (focused && view.contains($(focused))) $(focused).focus();
}

function tile(title, value, more, state) {
  return el("div", { class: `tile ${state ?? ""}` }, el("h2", {}, title), el("p", { class: "value" }, value), el("p", { class: "more" }, more));
}

function tiles(report) {
  const { freshness: fresh, pending, dead_letters: dead, divergence: audit } = report;
  const list = [];
  if (fresh) {
    const late = fresh.now.p99 !== null && fresh.now.p99 > fresh.objective_seconds;
    list.push(tile("Fresh within", duration(fresh.now.p50), fresh.now.documents ? `99 of 100 within ${duration(fresh.now.p99)}, last ${duration(fresh.now.window_seconds)}` : `nothing changed in the last ${duration(fresh.now.window_seconds)}`, late ? "bad" : fresh.now.documents ? "good" : ""));
  }
  if (pending) {
    const n = pending.vectors.documents + pending.keywords.documents;
    const least = pending.vectors.more || pending.keywords.more ? "more than " : "";
    const failing = pending.vectors.failing + pending.keywords.failing;
    list.push(tile("Oldest waiting", n ? `${least && "≥ "}${duration(pending.oldest_seconds)}` : "none", n ? `${least}${pending.vectors.documents.toLocaleString("en")} for meaning, ${pending.keywords.documents.toLocaleString("en")} for words${failing ? `; ${failing.toLocaleString("en")} failing` : ""}` : "both stores are complete", n && pending.oldest_seconds > (fresh?.objective_seconds ?? 300) ? "bad" : n ? "" : "good"));
  }
  if (report.lag) list.push(tile("Lag", report.lag.records.toLocaleString("en"), report.lag.records ? "records not read yet" : "all records are read", report.lag.records > 10_000 ? "bad" : report.lag.records ? "" : "good"));
  if (dead) list.push(tile("Dead letters", `${dead.waiting.toLocaleString("en")}${dead.more ? "+" : ""}`, dead.waiting ? "wait for an operator" : "none waits", dead.waiting ? "bad" : "good"));
  if (audit) list.push(tile("Divergent", audit.audited ? audit.documents.toLocaleString("en") : "–", audit.audited ? `last complete audit ${duration(audit.age_seconds)} ago` : "no audit has finished yet", audit.documents ? "bad" : audit.audited ? "good" : ""));
  return list;
}

function panel(title, ...content) {
  return el("section", { class: "panel" }, el("h2", {}, title), content);
}

function freshnessPanel(fresh) {
  if (!fresh) return null;
  const points = fresh.over_time.map((point) => ({ ...point, value: point.p99, label: new Date(point.at).toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit" }) }));
  const known = points.filter((item) => item.value !== null);
  const worst = known.reduce((a, b) => (a && a.value >= b.value ? a : b), null);
  const label = worst ? `Freshness over ${duration(fresh.over_time_seconds)}: at worst 99 of 100 documents within ${duration(worst.value)}, at ${worst.label}` : "Freshness over time: nothing yet";
  return panel("Freshness over time",
    el("figure", {}, sparkline(points, { limit: fresh.objective_seconds, label, unit: duration }),
      el("figcaption", {}, el("span", {}, `${duration(fresh.over_time_seconds)} ago`), el("span", { class: "legend" }, "99 of 100 searchable within · dashes: the objective, ", duration(fresh.objective_seconds), fresh.sampled && " · from samples"), el("span", {}, "now"))));
}

function table(head, rows, empty) {
  if (!rows.length) return el("p", { class: "quiet-text" }, empty);
  return el("div", { class: "scroll", id: `table-${head[0]}-${head[1]}`, tabindex: "0", role: "region", "aria-label": head.join(", ") },
    el("table", {}, el("thead", {}, el("tr", {}, head.map((item) => el("th", { scope: "col" }, item)))), el("tbody", {}, rows)));
}

const row = (...cells) => el("tr", {}, cells.map((cell) => el("td", {}, cell)));
const dot = (state, text) => el("span", { class: `dot ${state}` }, text);

function deadLettersPanel(dead) {
  if (!dead) return null;
  return panel("Dead letters",
    table(["Stage", "Reason", "Waiting", "Newest"], dead.by_code.map((item) => row(item.stage, el("code", {}, item.code), item.letters.toLocaleString("en"), ago(item.newest_at))), "There are no dead letters."),
    dead.waiting > 0 && el("p", { class: "quiet-text" }, el("code", {}, "penstock dead list"), " lists them, ", el("code", {}, "penstock dead replay"), " sends them again."));
}

function divergencePanel(audit) {
  if (!audit) return null;
  return panel("Divergence from the ledger",
    table(["Store", "What", "Documents"], audit.by.map((item) => row(item.store, item.kind.replaceAll("_", " "), item.documents.toLocaleString("en"))), audit.audited ? "Both stores agree with the ledger." : "The first audit is running."),
    audit.round && el("p", { class: "quiet-text" }, `The running audit has compared ${plural(audit.round.documents, "document")}.`));
}

const CONDITIONS = { following: "good", "first load": "busy", paused: "idle", waiting: "idle", "needs attention": "bad", "not running": "bad" };

function connectorsPanel(all) {
  if (!all) return null;
  return panel("Connectors",
    table(["Source", "Kind", "State", "Last success", "Last sweep", "Published", "Error"], all.map((item) => row(
      el("strong", {}, item.source), item.kind, dot(CONDITIONS[item.state] ?? "idle", item.state), ago(item.last_success_at), ago(item.last_sweep_at), item.published.toLocaleString("en"), el("span", { class: "reason" }, item.reason ?? ""))),
    "No connector has run yet."));
}

function storesPanel(all) {
  if (!all) return null;
  return panel("Stores", table(["Store", "State", "Holds"], all.map((item) => row(item.name, dot(item.up ? "good" : item.up === null ? "idle" : "bad", item.up ? "up" : item.up === null ? "not known" : "down"), item.holds ?? "")), "None."));
}

function lagPanel(report) {
  if (!report) return null;
  return panel("Lag in Kafka", table(["Consumer group", "Topic", "Records"], report.groups.filter((item) => item.records).map((item) => row(item.group, item.topic, item.records.toLocaleString("en"))), "All records have been read."));
}
