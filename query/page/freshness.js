// Freshness certificates: up to when the sources of a response are complete.

import { el, plural, time, visible } from "./dom.js";

/** The oldest of their times, with all of them on hover; null if none is known. */
export function freshnessLine(certificates) {
  const known = certificates.filter((source) => source.complete_until).map((source) => source.complete_until);
  if (!known.length) return null;
  const oldest = known.reduce((a, b) => (Date.parse(a) < Date.parse(b) ? a : b));
  const unknown = certificates.length - known.length;
  const all = certificates.map((source) => `${visible(source.source)}: ${source.complete_until ?? (source.lags.includes("unlisted") ? "no connector lists it" : "unknown")}`).join("\n");
  return el("span", { title: all }, "complete until ", time(oldest), unknown ? `, unknown for ${plural(unknown, "source")}` : "");
}
