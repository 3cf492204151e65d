// How work and metrics look. The server declares it, in shared/view/look.py.

import { h } from "./dom.js";

const OTHER = "other";
let look = { colors: {}, spans: {}, services: {}, metrics: {}, signed: [] };

export function take(value) {
  look = value;
}

export const ofSpan = (what, of) => (of ? "waiting" : look.spans[what] ?? OTHER);

export const ofService = (name) => look.services[name.split("/")[0]] ?? OTHER;

export function ofMetric(name) {
  const fitting = Object.keys(look.metrics).filter((part) => name.startsWith(part));
  return fitting.length ? look.metrics[fitting.sort((a, b) => b.length - a.length)[0]] : OTHER;
}

export const colorOf = (kind) => look.colors[kind];

// A translucent colour, from 0 (nothing) to 1, behind text.
export const tint = (kind, strength) => `color-mix(in srgb, ${colorOf(kind)} ${Math.round(60 * Math.min(1, strength))}%, transparent)`;

export function mark(kind) {
  const square = h("i", { class: "mark", title: kind });
  square.style.backgroundColor = colorOf(kind);
  return square;
}

// The ends of the vertical axis. A constant curve gets space around it: zeros get 0 to 1, or -1 to 1 if a metric can be negative.
export function limits(names, low, high) {
  if (low === null || (low === 0 && high === 0)) return [names.some((name) => look.signed.some((part) => name.startsWith(part))) ? -1 : 0, 1];
  return low === high ? [low - Math.abs(low) / 10, high + Math.abs(high) / 10] : uPlot.rangeNum(low, high, 0.1, true);
}
