// The timeline of the last steps: one lane per process. Filled spans are work; hatched spans are waits for another process;
// vertical lines are the ends of steps. The timeline of an ended run ends with its last span.

import { get } from "./api.js";
import { $, clean, duration, h, table } from "./dom.js";
import { whyNothing } from "./live.js";
import { colorOf, mark, ofSpan } from "./look.js";

const LANE = 26;
const LEFT = 150;
const MIN_WAIT_S = 0.05;
let picture = null;
let head = null;

export function setUp() {
  $("lanes").addEventListener("pointermove", point);
  $("lanes").addEventListener("pointerdown", point);
}

export function takeHead(value) {
  head = value;
}

export async function refresh() {
  picture = await get("timeline", { seconds: $("seconds").value });
  draw();
}

export function draw() {
  if (!picture) return;
  const canvas = $("lanes");
  canvas.hidden = !picture.lanes.length;
  if (canvas.hidden) {
    const idle = `No process has reported work or waits in the last ${duration(picture.seconds)}.`;
    $("lane-names").replaceChildren(h("p", { class: "soft" }, whyNothing(head) ?? idle));
    $("waits").replaceChildren();
    return;
  }
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const bottom = picture.lanes.length * LANE;
  const height = bottom + 2 * LANE;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.body);
  context.scale(ratio, ratio);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  picture.lanes.forEach((lane, row) => {
    const top = row * LANE;
    context.fillStyle = style.color;
    context.fillText(clean(lane.name).slice(0, 24), 0, top + LANE / 2, LEFT - 8);
    for (const [begin, end, what, of] of lane.spans) {
      const x = place(begin, width);
      const wide = Math.max(1, place(end, width) - x);
      const color = colorOf(ofSpan(what, of));
      context.fillStyle = of ? hatched(context, color) : color;
      context.fillRect(x, top + (of ? 8 : 4), wide, LANE - (of ? 16 : 8));
    }
  });
  context.fillStyle = style.color;
  context.fillText("ends of steps", 0, bottom + LANE / 2, LEFT - 8);
  let room = Infinity;
  for (const [at, step] of [...picture.steps].reverse()) {
    const x = place(at, width);
    context.fillRect(x, 0, 1, bottom + LANE);
    const label = step === null ? "" : String(step);
    if (x + context.measureText(label).width + 8 <= Math.min(room, width)) context.fillText(label, x + 4, bottom + LANE / 2);
    room = x;
  }
  for (let tick = 0; tick <= 4; tick += 1) {
    const seconds = (-picture.seconds * tick) / 4;
    context.textAlign = tick === 0 ? "right" : "center";
    context.fillText(tick ? `−${duration(-seconds)}` : head.live ? "now" : "end", place(seconds, width), height - LANE / 2);
  }
  context.textAlign = "left";
  canvas.setAttribute("aria-label", `timeline of ${picture.lanes.length} processes and ${picture.steps.length} steps`);
  const shares = picture.lanes.map((lane) => h("span", {}, `${lane.name} `, h("b", {}, share(lane))));
  const kinds = new Map(); // what was done, by kind of work
  for (const [, , what, of] of picture.lanes.flatMap((lane) => lane.spans)) {
    const kind = ofSpan(what, of);
    kinds.set(kind, (kinds.get(kind) ?? new Set()).add(what));
  }
  const legend = [...kinds].map(([kind, whats]) => h("span", {}, mark(kind), ` ${kind}: ${[...whats].join(", ")}`));
  const until = h("p", { class: "soft" }, `The last span ended at ${new Date(1000 * picture.now).toLocaleString()}.`);
  const parts = [h("div", { class: "facts" }, ...shares), h("div", { class: "facts soft" }, ...legend)];
  $("lane-names").replaceChildren(...(head.live ? [] : [until]), ...parts);
  $("waits").replaceChildren(...waits());
}

// Which process waited for which, longest first. Time in which the process also worked does not count.
function waits() {
  const rows = picture.lanes.flatMap((lane) => lane.waits.map(([what, of, seconds]) => ({ lane, what, of, seconds })))
    .filter(({ seconds }) => seconds >= MIN_WAIT_S)
    .sort((a, b) => b.seconds - a.seconds)
    .map(({ lane, what, of, seconds }) => h("tr", {},
      h("td", {}, lane.name),
      h("td", {}, of),
      h("td", {}, what),
      h("td", { class: "number" }, `${duration(seconds)} of ${duration(lane.known_s)}`),
    ));
  const heads = [["process"], ["waited for"], ["what"], ["time", "number"]];
  return rows.length ? [h("h2", {}, "Which process waited for which"), table(heads, rows)] : [];
}

function share(lane) {
  const percent = (seconds) => `${Math.round((100 * seconds) / lane.known_s)} %`;
  return `works ${percent(lane.working_s)}, waits ${percent(lane.waiting_s)}`;
}

function place(seconds, width) {
  return LEFT + ((width - LEFT) * (seconds + picture.seconds)) / picture.seconds;
}

function hatched(context, color) {
  const tile = new OffscreenCanvas(6, 6);
  const pen = tile.getContext("2d");
  pen.strokeStyle = color;
  pen.moveTo(0, 6);
  pen.lineTo(6, 0);
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

function point(event) {
  if (!picture) return;
  const lane = picture.lanes[Math.floor(event.offsetY / LANE)];
  const width = $("lanes").clientWidth;
  const hit = lane?.spans.findLast(([begin, end]) => place(begin, width) - 2 <= event.offsetX && event.offsetX <= place(end, width) + 2);
  if (hit) {
    const [begin, end, what, of, count] = hit;
    const many = count > 1 ? `${count} times within ` : "";
    $("span").textContent = clean(`${lane.name}: ${what}${of ? `, waiting for ${of}` : ""}, ${many}${duration(end - begin)}`);
  }
}
