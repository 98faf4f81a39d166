// Filters by source, type, author and time. The service returns the values that occur in documents the caller may read.

import { get } from "./api.js";
import { $, el } from "./dom.js";
import { typeName } from "./results.js";
import { condition } from "./state.js";

const KINDS = [["source", "sources", "Source"], ["type", "media_types", "Type"], ["author", "authors", "Author"]];
const PERIODS = [["Any time", 0], ["Past week", 7], ["Past month", 31], ["Past year", 366]];
const MAX_CHOICES = 12;

let facets = {};

const values = (list) => (list ?? []).map((facet) => (typeof facet === "string" ? { value: facet } : { value: facet.value ?? facet.name, count: facet.count }));

/** Fetch the values to choose from. */
export async function loadFacets() {
  facets = await get("v1/facets");
  return facets;
}

/** Discard the values, because the caller has changed. */
export function clear() {
  facets = {};
}

export const sources = () => values(facets.sources);

/** Draw the panel and the chips of the chosen filters. change(changes) applies changes to the state. */
export function drawFilters(state, change) {
  const panel = $("filters");
  const focused = document.activeElement?.id;
  panel.replaceChildren(...KINDS.map(([name, from, title]) => choiceList(name, values(facets[from]), title, state, change)).filter(Boolean), ...metadata(state, change), period(state, change));
  if (focused && panel.contains($(focused))) $(focused).focus();
  const chips = [
    ...KINDS.flatMap(([name, , title]) => state[name].map((value) => chip(`${title}: ${label(name, value)}`, () => change({ [name]: state[name].filter((other) => other !== value) })))),
    ...state.meta.map((value) => chip(`${condition(value)[0]}: ${label("meta", value)}`, () => change({ meta: state.meta.filter((other) => other !== value) }))),
    state.since && chip(`Since ${state.since}`, () => change({ since: "" })),
    state.before && chip(`Before ${state.before}`, () => change({ before: "" })),
  ].filter(Boolean);
  $("chips").hidden = !chips.length;
  $("chips").replaceChildren(...chips);
  $("filters-open").dataset.count = chips.length || "";
}

const label = (name, value) => (name === "type" ? typeName(value) : name === "meta" ? String(condition(value)[1]) : value);

/** One list of check boxes for each declared key: its values and how many documents have them. */
function metadata(state, change) {
  const names = new Set([...Object.keys(facets.metadata ?? {}), ...state.meta.map((value) => condition(value)[0])]);
  return [...names].sort().map((name) => {
    const ours = (value) => condition(value)[0] === name;
    const offered = (facets.metadata?.[name]?.values ?? []).map(({ value, count }) => ({ value: `${name}=${JSON.stringify(value)}`, count }));
    const others = state.meta.filter((value) => !ours(value));
    return choiceList("meta", offered, name, { meta: state.meta.filter(ours) }, ({ meta }) => change({ meta: [...others, ...meta] }));
  }).filter(Boolean);
}

function chip(text, remove) {
  return el("li", {}, el("button", { type: "button", class: "chip", onclick: remove, "aria-label": `Remove the filter ${text}` }, text, el("span", { "aria-hidden": "true" }, " ×")));
}

function choiceList(name, offered, title, state, change) {
  const known = new Set(offered.map((choice) => choice.value));
  const all = [...offered, ...state[name].filter((value) => !known.has(value)).map((value) => ({ value }))];
  if (!all.length) return null;
  const box = ({ value, count }) => {
    const id = `filter-${name}-${value}`;
    const input = el("input", { type: "checkbox", id, checked: state[name].includes(value), onchange: () => change({ [name]: input.checked ? [...state[name], value] : state[name].filter((other) => other !== value) }) });
    return el("label", { for: id, title: value }, input, el("span", {}, label(name, value)), count !== undefined && el("small", {}, count.toLocaleString("en")));
  };
  const first = all.filter((choice, n) => n < MAX_CHOICES || state[name].includes(choice.value));
  const rest = all.filter((choice) => !first.includes(choice));
  return el("fieldset", {}, el("legend", {}, title), first.map(box), rest.length > 0 && el("details", {}, el("summary", {}, `${rest.length} more`), rest.map(box)));
}

function period(state, change) {
  const daysAgo = (days) => new Date(Date.now() - days * 86_400_000).toISOString().slice(0, 10);
  const chosen = PERIODS.find(([, days]) => (days ? state.since === daysAgo(days) : !state.since && !state.before));
  const input = (name, title) => el("label", { class: "date" }, el("span", {}, title), el("input", { type: "date", id: `filter-${name}`, value: state[name], onchange: (event) => change({ [name]: event.currentTarget.value }) }));
  return el("fieldset", {}, el("legend", {}, "Changed"),
    PERIODS.map(([title, days]) => {
      const id = `filter-period-${days}`;
      return el("label", { for: id }, el("input", { type: "radio", name: "period", id, checked: chosen?.[1] === days, onchange: () => change({ since: days ? daysAgo(days) : "", before: "" }) }), el("span", {}, title));
    }),
    input("since", "From"), input("before", "Before"));
}
