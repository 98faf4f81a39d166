// A small line chart over time. Its numbers are also in the text around it and in its label.

import { el, svg } from "./dom.js";

const WIDTH = 640;
const HEIGHT = 96;
const PAD = 6;

/** Draw points [{at, value|null, label}], evenly spaced, with gaps for null. limit: the value of a horizontal line. */
export function sparkline(points, { limit, label, unit }) {
  const known = points.map((point) => point.value).filter((value) => value !== null && value !== undefined);
  if (!known.length) return el("p", { class: "quiet-text" }, "Nothing yet.");
  // Logarithmic, because values lie between a second and an hour.
  const scale = (value) => Math.log10(Math.max(0.1, value) + 1);
  const top = Math.max(scale(limit ?? 0), ...known.map(scale)) * 1.08;
  const x = (n) => PAD + (n * (WIDTH - 2 * PAD)) / Math.max(1, points.length - 1);
  const y = (value) => HEIGHT - PAD - (scale(value) / top) * (HEIGHT - 2 * PAD);
  const drawn = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label, preserveAspectRatio: "none" });
  if (limit) drawn.append(svg("line", { class: "limit", x1: PAD, x2: WIDTH - PAD, y1: y(limit), y2: y(limit) }));
  for (const run of segmentsOf(points)) {
    const path = run.map(([n, value], at) => `${at ? "L" : "M"}${x(n).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    if (run.length > 1) {
      drawn.append(svg("path", { class: "area", d: `${path}L${x(run.at(-1)[0]).toFixed(1)} ${HEIGHT - PAD}L${x(run[0][0]).toFixed(1)} ${HEIGHT - PAD}Z` }));
    }
    drawn.append(svg("path", { class: "line", d: run.length > 1 ? path : `${path}h0.01` }));
  }
  points.forEach((point, n) => {
    if (point.value === null || point.value === undefined) return;
    const target = svg("rect", { class: "hit", x: x(n) - WIDTH / points.length / 2, y: 0, width: WIDTH / points.length, height: HEIGHT });
    target.append(svg("title", {}, `${point.label}: ${unit(point.value)}`));
    drawn.append(target);
  });
  return drawn;
}

/** Runs of neighbouring points that have a value. */
function segmentsOf(points) {
  const segments = [];
  let open = null;
  points.forEach((point, n) => {
    if (point.value === null || point.value === undefined) open = null;
    else {
      if (!open) segments.push((open = []));
      open.push([n, point.value]);
    }
  });
  return segments;
}
