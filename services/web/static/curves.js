// Curves of metrics, from one run or from several runs in the same charts. All charts share one zoom and one cursor.

import { get } from "./api.js";
import { $, clean, h, number } from "./dom.js";
import { colorOf, limits, ofMetric } from "./look.js";

const RUN_COLORS = ["#2f7ed8", "#e4572e", "#2ca02c", "#a855f7", "#d4a017", "#17a2b8", "#e83e8c", "#7a8699"];
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
const BORDERS = ["solid", "dashed", "dotted", "double"]; // of the marks in the legend
const HEIGHT = 190;
const MOST_CHARTS = 24;
const OTHERS_EVERY_MS = 5000;

const chosen = new Set(); // other runs that are shown in the same charts
const series = new Map(); // run -> { epoch, last, names, points: Map(name -> [[steps], [values]]) }
let own = "";
let panels = [];
let charts = [];
let zoom = null;
let loading = null;
let visible = () => true;

export function setUp(isVisible) {
  visible = isVisible;
  $("filter").addEventListener("input", () => refresh());
  $("smooth").addEventListener("input", () => draw());
  $("range").addEventListener("change", () => setZoom(lastSteps()));
  $("reset").addEventListener("click", () => { $("range").value = ""; setZoom(null); });
  for (const form of document.querySelectorAll("form.tools")) form.addEventListener("submit", (event) => event.preventDefault());
  new ResizeObserver(() => charts.forEach(fit)).observe($("charts"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
  setInterval(() => chosen.size && visible() && refresh(), OTHERS_EVERY_MS);
}

// Takes the head of the live stream: the panels, the other runs in the folder, and the last step that has metrics.
export function takeHead(head) {
  const known = series.get(own);
  own = head.run;
  panels = head.panels;
  for (const run of head.compared ?? []) chosen.add(run); // in a saved page
  showRuns(head.runs);
  const news = !known || known.epoch !== head.last[0] || known.last !== head.last[1];
  if (news && visible()) refresh();
}

export function rebuild() {
  for (const chart of charts) chart.plot?.destroy();
  charts = [];
  $("charts").replaceChildren();
  draw();
}

// Fetches the new points of the shown metrics, and draws. All calls during a refresh cause a single further refresh.
export function refresh() {
  if (loading) {
    loading.again = true;
    return loading.done;
  }
  const mine = { again: false, done: null };
  loading = mine;
  mine.done = (async () => {
    do {
      mine.again = false;
      await Promise.all([own, ...chosen].map(load));
      draw();
    } while (mine.again);
  })().catch(() => {}).finally(() => { loading = null; });
  return mine.done;
}

async function load(run) {
  const known = series.get(run) ?? { epoch: -1, last: -1, names: [], points: new Map() };
  const wanted = wantedNames(run, known);
  const fresh = wanted.filter((name) => !known.points.has(name));
  // Names that were not requested before need all their points; the other names need only the new points.
  const requests = fresh.length && fresh.length < wanted.length ? [fresh, wanted.filter((name) => known.points.has(name))] : [wanted];
  let reached = Infinity; // a step that arrives between two requests is requested again
  for (const names of requests) {
    const grows = names.every((name) => known.points.has(name));
    const query = { run, name: names, ...(grows ? { epoch: known.epoch, after: known.last } : {}) };
    const found = await get("metrics", query);
    if (grows && found.whole) known.points.clear(); // steps were rolled back
    known.names = found.names;
    for (const [name, points] of Object.entries(found.points)) {
      const columns = grows && !found.whole ? known.points.get(name) : [[], []];
      for (const [step, value] of points) {
        if (step <= columns[0].at(-1)) continue;
        columns[0].push(step);
        columns[1].push(value);
      }
      known.points.set(name, columns);
    }
    reached = Math.min(reached, found.last);
    if (requests.length === 1 || grows) known.epoch = found.epoch;
  }
  if (requests.length) known.last = reached;
  series.set(run, known);
  if (!wanted.length && known.names.length && run !== own) await load(run);
}

function wantedNames(run, known) {
  return [...new Set(wantedPanels().flatMap((panel) => panel.names))].slice(0, 64);
}

function wantedPanels() {
  const part = $("filter").value.trim().toLowerCase();
  if (!part) return panels.filter((panel) => panel.names.length);
  const names = new Set([own, ...chosen].flatMap((run) => series.get(run)?.names ?? []));
  const found = [...names].filter((name) => name.toLowerCase().includes(part)).sort().slice(0, MOST_CHARTS);
  return found.map((name) => ({ title: name, names: [name] }));
}

function draw() {
  const wanted = wantedPanels();
  const keys = wanted.map((panel) => JSON.stringify([panel.title, panel.names, own, [...chosen]]));
  if (keys.join() !== charts.map((chart) => chart.key).join()) {
    for (const chart of charts) chart.plot?.destroy();
    charts = wanted.map((panel, index) => makeChart(panel, keys[index]));
    $("charts").replaceChildren(...charts.map((chart) => chart.element));
    if (!wanted.length) $("charts").append(h("p", { class: "soft" }, "No metrics yet: they come with the first step."));
  }
  for (const chart of charts) update(chart);
}

function makeChart(panel, key) {
  const box = h("div");
  const kinds = panel.names.map(ofMetric);
  // With several runs, a colour is a run; otherwise, it is a kind of work. Curves of one colour differ in their dashes.
  const style = (i, j) => (chosen.size
    ? { color: RUN_COLORS[i % RUN_COLORS.length], dash: j % DASHES.length }
    : { color: colorOf(kinds[j]), dash: kinds.slice(0, j).filter((kind) => kind === kinds[j]).length % DASHES.length });
  const lines = [own, ...chosen].flatMap((run, i) => panel.names.map((name, j) => ({ run, name, ...style(i, j) })));
  return { key, panel, lines, box, plot: null, element: h("div", { class: "chart" }, h("h2", {}, h("bdi", {}, panel.title)), box) };
}

function update(chart) {
  const tables = chart.lines.map(({ run, name }) => series.get(run)?.points.get(name) ?? [[], []]);
  const weight = Number($("smooth").value);
  const shown = tables.map(([steps, values]) => [steps, weight ? smoothed(values, weight) : values]);
  const data = shown.length > 1 ? uPlot.join(shown) : shown[0];
  chart.element.dataset.points = shown.map(([steps]) => steps.length).join(" ");
  if (chart.plot) {
    chart.plot.setData(data, !zoom);
    if (zoom) {
      chart.plot.redraw();
      chart.plot.setLegend({});
    }
  } else if (data[0].length) {
    chart.plot = new uPlot(settings(chart), data, chart.box);
    if (zoom) chart.plot.setScale("x", { min: zoom[0], max: zoom[1] });
  }
}

function settings(chart) {
  const stroke = dark() ? "#9aa4b2" : "#5b6470";
  const grid = { stroke: dark() ? "#323843" : "#d8dde4", width: 1 };
  const several = chosen.size > 0;
  return {
    width: chart.box.clientWidth || 380,
    height: HEIGHT,
    cursor: { sync: { key: "steps" }, focus: { prox: 20 }, drag: { x: true, y: false, setScale: true } },
    scales: { x: { time: false }, y: { range: (_, low, high) => limits(chart.panel.names, low, high) } },
    legend: { markers: { width: 3, dash: (_, index) => BORDERS[chart.lines[index - 1].dash], fill: () => "transparent" } },
    axes: [{ stroke, grid, size: 30 }, { stroke, grid, size: 62, values: (_, ticks) => ticks.map(number) }],
    series: [
      { label: "step", value },
      ...chart.lines.map(({ run, name, color, dash }) => ({
        label: clean(several ? `${run} ${name}` : name).slice(0, 120),
        stroke: color,
        dash: DASHES[dash],
        width: 1.5,
        spanGaps: true,
        points: { show: (plot) => plot.data[0].length < 3 },
        value,
      })),
    ],
    hooks: { setScale: [onScale], ready: [addTouch] },
  };
}

// The text of a value in the legend: without a pointer, the newest value of the series.
function value(plot, pointed, series, index) {
  return number(index === null ? plot.data[series].findLast((each) => each !== null && each !== undefined) : pointed);
}

function dark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

let linking = false;

function onScale(plot, scale) {
  plot.root.dataset[scale === "x" ? "steps" : "values"] = `${plot.scales[scale].min} ${plot.scales[scale].max}`;
  if (scale !== "x") return;
  if (linking || !plot.data[0].length) return;
  const steps = plot.data[0];
  const { min, max } = plot.scales.x;
  const whole = min <= steps[0] && max >= steps[steps.length - 1];
  if (plot.status !== 1 || (whole && !zoom)) return;
  setZoom(whole ? null : [min, max], plot);
}

function setZoom(range, source = null) {
  zoom = range;
  $("reset").hidden = !zoom;
  linking = true;
  for (const { plot } of charts) {
    if (!plot || plot === source) continue;
    const steps = plot.data[0];
    plot.setScale("x", zoom ? { min: zoom[0], max: zoom[1] } : { min: steps[0], max: steps[steps.length - 1] });
  }
  // Scales are set in a microtask.
  queueMicrotask(() => queueMicrotask(() => { linking = false; }));
}

function lastSteps() {
  const count = Number($("range").value);
  const last = series.get(own)?.last ?? 0;
  return count ? [Math.max(0, last - count), last] : null;
}

// A finger that moves sideways selects steps, as a mouse does.
function addTouch(plot) {
  const pass = (kind, touch) => plot.over.dispatchEvent(new MouseEvent(kind, { bubbles: true, clientX: touch.clientX, clientY: touch.clientY, button: 0 }));
  for (const [from, to] of [["touchstart", "mousedown"], ["touchmove", "mousemove"], ["touchend", "mouseup"]]) {
    plot.over.addEventListener(from, (event) => {
      if (from === "touchstart") pass("mousemove", event.changedTouches[0]);
      pass(to, event.changedTouches[0]);
    }, { passive: true });
  }
}

function fit(chart) {
  const width = chart.box.clientWidth;
  if (chart.plot && width && width !== chart.plot.width) chart.plot.setSize({ width, height: HEIGHT });
}

// An exponential moving average without the bias of its start.
function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    mean = mean * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return mean / total;
  });
}

let listed = "";

function showRuns(runs) {
  if (runs.join("\n") === listed) return;
  listed = runs.join("\n");
  const boxes = runs.map((run) => {
    const box = h("input", { type: "checkbox", checked: chosen.has(run), onchange: () => {
      if (box.checked) chosen.add(run);
      else chosen.delete(run);
      refresh();
    } });
    return h("label", {}, box, " ", h("bdi", {}, run));
  });
  $("runs").replaceChildren(...(boxes.length ? boxes : [h("p", { class: "soft" }, "There are no other runs in this folder.")]));
}
