// Creates elements. Text is inserted as text only: documents are untrusted, and nothing here parses markup.

export const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";
const OVERRIDES = /[\u202d\u202e]/g;

/** A text without the characters that reverse what follows them: "exe.fdp" would be shown for a name that ends in "pdf.exe". */
export const visible = (text) => (typeof text === "string" ? text.replace(OVERRIDES, "\ufffd") : text);

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : visible(String(value)));
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false && child !== "").map(visible));
  return node;
}

/** Create an element. Properties `on…` are listeners, `data` is its dataset, and strings among the children are text. */
export const el = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
export const svg = (tag, properties = {}, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

/** Parse an http or https URL. Returns null for other schemes (javascript:, data:, file:) and for anything else. */
export function webUrl(address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  return url.protocol === "https:" || url.protocol === "http:" ? url : null;
}

/** A link that opens in a new tab without a referrer; plain text if the address is not an http or https URL. */
export function externalLink(address, text, className = "") {
  const url = webUrl(address);
  if (!url) return el("span", { class: className }, text);
  return el("a", { class: className, href: url.href, target: "_blank", rel: "noopener noreferrer" }, text);
}

/** A short form of a document's address: the host, or the last two parts of a path. */
export function shortLocation(address) {
  const url = webUrl(address);
  if (url) return url.host;
  if (!address) return "";
  const parts = decoded(address).split("/").filter(Boolean);
  return parts.slice(-2).join("/");
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Announce a text to screen readers. */
export function announce(text) {
  $("said").textContent = text;
}

export const plural = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

const UNITS = [["d", 86400], ["h", 3600], ["min", 60]];

/** Seconds in the largest unit of which there are at least two: "90 s", "4 min", "3 d". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  for (const [unit, size] of UNITS) if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${unit}`;
  return seconds < 10 ? `${Math.max(0, Math.round(seconds * 10) / 10)} s` : `${Math.round(seconds)} s`;
}

export function ago(moment) {
  if (!moment) return "never";
  return `${duration(Math.max(0, (Date.now() - Date.parse(moment)) / 1000))} ago`;
}

/** A time as an element: short text, with the exact time on hover and for machines. */
export function time(moment, options = { dateStyle: "medium", timeStyle: "medium" }) {
  if (!moment) return el("span", {}, "–");
  const date = new Date(moment);
  return el("time", { datetime: moment, title: date.toISOString() }, new Intl.DateTimeFormat("en", options).format(date));
}

export const day = (moment) => time(moment, { dateStyle: "medium" });
