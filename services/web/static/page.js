// Assembles the views: tabs, theme, the live stream, and the data that is fetched while a tab is open.

import { follow, get } from "./api.js";
import * as curves from "./curves.js";
import { $, h } from "./dom.js";
import * as live from "./live.js";
import * as look from "./look.js";
import * as samples from "./samples.js";
import * as timeline from "./timeline.js";

const TABS = ["curves", "services", "timeline", "samples", "log", "warnings"];
const LEVELS = { warning: "warn", error: "bad", critical: "bad" };
let tab = "curves";
let head = null;
let contact = false;

function show(name) {
  tab = name;
  for (const each of TABS) {
    $(each).hidden = each !== name;
    document.querySelector(`[data-tab=${each}]`).setAttribute("aria-selected", each === name);
  }
  refresh();
}

function refresh() {
  const work = { curves: curves.refresh, timeline: timeline.refresh, samples: () => samples.refresh(true), log: showLog }[tab];
  return work && head ? work().catch((error) => { if (contact) console.warn(error.message); }) : undefined;
}

async function showLog() {
  const { lines } = await get("log", { level: $("level").value, text: $("text").value });
  const atEnd = innerHeight + scrollY >= document.body.scrollHeight - 40;
  $("lines").replaceChildren(...lines.map(({ at, level, service, text }) =>
    h("div", { class: LEVELS[level] }, `${at.slice(11, 23)} ${level.padEnd(7)} ${service.padEnd(24)} `, h("bdi", {}, text))));
  if (atEnd) scrollTo(0, document.body.scrollHeight);
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  curves.rebuild();
  timeline.draw();
}

for (const each of TABS) document.querySelector(`[data-tab=${each}]`).addEventListener("click", () => show(each));
$("theme").addEventListener("click", () => {
  const next = { "": "light", light: "dark", dark: "" }[document.documentElement.dataset.theme ?? ""];
  localStorage.setItem("rlbus-theme", next);
  setTheme(next);
});
for (const id of ["level", "text", "seconds"]) $(id).addEventListener("input", refresh);

curves.setUp(() => tab === "curves");
timeline.setUp();
samples.setUp();
setTheme(localStorage.getItem("rlbus-theme") ?? "");
setInterval(() => ["timeline", "log"].includes(tab) && head?.live && !document.hidden && refresh(), 1000);

follow({
  look: look.take,
  contact(is) {
    contact = is;
    live.showContact(contact, head);
  },
  head(value) {
    head = value;
    live.showHead(head);
    live.showContact(contact, head);
    samples.takeHead(head);
    timeline.takeHead(head);
    curves.takeHead(head);
  },
  services: live.showServices,
  pipeline: live.showPipeline,
  notices: live.showNotices,
});
