// A small line over time. For the eye; the numbers stand beside it and in its label.

import { el, svg } from "./dom.js";

const WIDTH = 640;
const HEIGHT = 96;
const PAD = 6;

/** points: [{at, value|null, label}] evenly spaced. limit: a line to stay under. Gaps stay gaps. */
export function sparkline(points, { limit, label, unit }) {
  const known = points.map((one) => one.value).filter((value) => value !== null && value !== undefined);
  if (!known.length) return el("p", { class: "quiet-text" }, "Nothing yet.");
  // Logarithmic: what matters lies between a second and an hour.
  const scale = (value) => Math.log10(Math.max(0.1, value) + 1);
  const top = Math.max(scale(limit ?? 0), ...known.map(scale)) * 1.08;
  const x = (n) => PAD + (n * (WIDTH - 2 * PAD)) / Math.max(1, points.length - 1);
  const y = (value) => HEIGHT - PAD - (scale(value) / top) * (HEIGHT - 2 * PAD);
  const drawn = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label, preserveAspectRatio: "none" });
  if (limit) drawn.append(svg("line", { class: "limit", x1: PAD, x2: WIDTH - PAD, y1: y(limit), y2: y(limit) }));
  for (const run of runs(points)) {
    const path = run.map(([n, value], at) => `${at ? "L" : "M"}${x(n).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    if (run.length > 1) {
      drawn.append(svg("path", { class: "area", d: `${path}L${x(run.at(-1)[0]).toFixed(1)} ${HEIGHT - PAD}L${x(run[0][0]).toFixed(1)} ${HEIGHT - PAD}Z` }));
    }
    drawn.append(svg("path", { class: "line", d: run.length > 1 ? path : `${path}h0.01` }));
  }
  points.forEach((point, n) => {
    if (point.value === null || point.value === undefined) return;
    const hit = svg("rect", { class: "hit", x: x(n) - WIDTH / points.length / 2, y: 0, width: WIDTH / points.length, height: HEIGHT });
    hit.append(svg("title", {}, `${point.label}: ${unit(point.value)}`));
    drawn.append(hit);
  });
  return drawn;
}

/** Neighbouring known points. */
function runs(points) {
  const found = [];
  let open = null;
  points.forEach((point, n) => {
    if (point.value === null || point.value === undefined) open = null;
    else {
      if (!open) found.push((open = []));
      open.push([n, point.value]);
    }
  });
  return found;
}
