// Takes the place of api.js in a saved page: answers all requests from the data in the page.

import { $ } from "./dom.js";

const data = JSON.parse($("saved").textContent);
const ORDERS = { best: (each) => -(each.reward ?? -Infinity), worst: (each) => each.reward ?? -Infinity, longest: (each) => -each.length };
const LEVELS = ["debug", "info", "warning", "error", "critical"];

export const ask = async () => "";

export const operate = async () => ({ status: 409, text: "the run has ended" });

export async function get(path, query = {}) {
  return { metrics, samples, sample, log, timeline: () => data.timeline[query.seconds] }[path](query);
}

export async function follow(on) {
  on.contact(true);
  for (const part of ["look", "head", "services", "pipeline", "notices"]) on[part](data[part]);
}

function metrics({ run, name, after }) {
  const { last, points } = data.curves[run];
  const wanted = [name].flat().map((each) => [each, (points[each] ?? []).filter(([step]) => !(step <= after))]);
  return { epoch: 0, last, names: Object.keys(points), whole: after === undefined, points: Object.fromEntries(wanted) };
}

function samples({ run, split, order, task }) {
  if (run !== data.head.run) return { splits: [], split: "", steps: [], step: null, samples: [], total: 0 };
  const splits = Object.keys(data.samples);
  const chosen = task ? splits.find((each) => data.samples[each].records.some((record) => record.task === task)) : split;
  const key = chosen in data.samples ? chosen : splits[0] ?? "";
  const { step, total, records } = data.samples[key] ?? { step: null, total: 0, records: [] };
  const found = records.filter((each) => !task || each.task === task);
  if (order) found.sort((a, b) => ORDERS[order](a) - ORDERS[order](b));
  return { splits, split: key, steps: step === null ? [] : [step], step, samples: found, total: task ? found.length : total };
}

function sample({ split, task, sample: number }) {
  return data.samples[split].records.find((each) => each.task === task && each.sample === number);
}

function log({ level, text }) {
  const least = LEVELS.indexOf(level);
  const part = text.toLowerCase();
  return { lines: data.log.filter((each) => LEVELS.indexOf(each.level) >= least && `${each.service} ${each.text}`.toLowerCase().includes(part)) };
}
