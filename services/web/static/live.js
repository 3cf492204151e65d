// The state of a live run, or the last state of an ended one: progress, processes, pipeline, warnings.

import { operate, ask } from "./api.js";
import { $, bytes, clean, duration, h, number, table } from "./dom.js";
import { mark, ofService } from "./look.js";

let operatorToken = "";
let operable = false;
let live = false;

export function showHead(head) {
  ({ operable, live } = head);
  const { step, steps, eta_s, step_s, values } = head.progress;
  $("run").textContent = head.run;
  $("bar").max = steps ?? Math.max(step ?? 0, 1);
  $("bar").value = step ?? 0;
  $("bar").hidden = !live;
  const facts = [step !== null && `step ${step}${steps === null ? "" : ` / ${steps}`}`];
  if (live) facts.push(eta_s !== null && `${duration(eta_s)} left`, step_s !== null && `${duration(step_s)} per step`);
  if ("reward/mean" in values) facts.push(`reward ${number(values["reward/mean"])}`);
  else if ("loss/policy" in values) facts.push(`loss ${number(values["loss/policy"])}`);
  $("progress").textContent = facts.filter(Boolean).join(" · ");
  const last = () => `The last states, reported at ${new Date(1000 * head.ended_at).toLocaleString()}.`;
  $("reported").hidden = live;
  $("reported").textContent = whyNothing(head) ?? (live ? "" : last());
  document.title = `${step ?? 0}${steps ? `/${steps}` : ""} ${head.run}`;
}

// Why nothing is known about the processes of a run that is not live.
export function whyNothing({ live: isLive, ended_at }) {
  if (isLive || ended_at) return null;
  return "The file last.jsonl is missing, so nothing is known about the processes. The monitor and the launcher write it "
    + "when they end: this run has not begun, or all its processes were killed at the same moment.";
}

export function showContact(contact, head) {
  const chip = $("contact");
  const [text, kind] = !contact ? ["no contact with the page's server", "bad"]
    : !head?.live ? [clean(head?.ended || "ended").slice(0, 300), "soft"]
    : head.progress.reachable ? ["live", "good"] : ["live, scheduler silent", "warn"];
  chip.textContent = text;
  chip.className = `chip ${kind}`;
}

export function showServices(services) {
  const heads = [["process"], ["state"], ["restarts", "number"], ["memory", "number"], ["CPU", "number"], ["GPU memory", "number"],
    ["progress", "number"], ["host"], ["pid", "number"], ["incarnation"], ["cause"], ...(operable ? [["operator"]] : [])];
  const rows = services.map((each) => h("tr", { "data-process": each.name },
    h("td", {}, mark(ofService(each.name)), ` ${each.name}`),
    h("td", {}, h("span", { class: `chip ${healthOf(each)}` }, each.state)),
    h("td", { class: "number" }, number(each.restarts)),
    h("td", { class: "number" }, bytes(each.rss_bytes)),
    h("td", { class: "number" }, each.cpu_share === null ? "–" : `${Math.round(each.cpu_share * 100)} %`),
    h("td", { class: "number" }, bytes(each.gpu_bytes)),
    h("td", { class: "number" }, each.progress_age_s === null ? "–" : `${duration(each.progress_age_s)} ago`),
    h("td", {}, each.host || "–"),
    h("td", { class: "number" }, number(each.pid)),
    h("td", { title: each.incarnation }, each.incarnation.slice(0, 8) || "–"),
    h("td", { class: "wide", title: each.cause }, each.cause),
    ...(operable ? [h("td", {}, ...buttons(each.name))] : []),
  ));
  const nobody = h("p", { class: "soft" }, live ? "Nothing has reported yet." : "");
  $("processes").replaceChildren(services.length ? table(heads, rows) : nobody);
}

// A process that starts because its predecessor died counts as dead until it is READY.
function healthOf({ state, health, restarts, cause }) {
  const died = state === "STARTING" && restarts && cause && !cause.includes("by the operator");
  return died ? "wrong" : health;
}

function buttons(name) {
  const drains = /^(rollout|reference)\//.test(name) ? ["drain"] : [];
  return ["restart", ...drains].map((action) => h("button", { onclick: () => order(action, name) }, action));
}

async function order(action, name) {
  operatorToken ||= await ask(`To ${action} ${name}, enter the operator token.`);
  if (!operatorToken) return;
  const answer = await operate(operatorToken, action, name);
  if (answer.status === 403) operatorToken = "";
  const kind = answer.status === 200 ? "good" : "bad";
  const line = h("p", { class: `notice ${kind}`, id: "answer" }, answer.text);
  $("answer")?.remove();
  $("services").prepend(line);
}

export function showPipeline(pipeline) {
  if (!Object.keys(pipeline.tasks).length && !pipeline.stores.length) {
    $("pipeline").replaceChildren();
    return;
  }
  const facts = [
    ["leases", number(pipeline.leases)],
    ["workers waiting for a lease", number(pipeline.waiting)],
    ["clears pending", number(pipeline.clears_pending)],
    ...Object.entries(pipeline.leases_by_stage).map(([stage, count]) => [`leased for ${stage}`, number(count)]),
    ...Object.entries(pipeline.dropped).map(([why, count]) => [`dropped: ${why}`, number(count)]),
    ...Object.entries(pipeline.lost).map(([why, count]) => [`lost: ${why}`, number(count)]),
  ];
  const stores = pipeline.stores.map((store) => h("tr", {},
    h("td", {}, store.name),
    h("td", { class: "number" }, bytes(store.bytes)),
    h("td", { class: "number" }, bytes(store.limit_bytes)),
    h("td", { class: "number" }, bytes(store.spilled_bytes)),
    h("td", { class: "number" }, number(store.shards)),
    h("td", { class: "number" }, number(store.busy)),
  ));
  const staleness = Object.entries(pipeline.staleness);
  $("pipeline").replaceChildren(
    h("h2", {}, "Tasks"), bars(Object.entries(pipeline.tasks)),
    h("div", { class: "facts" }, ...facts.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, value)))),
    ...(staleness.length ? [h("h2", {}, `Staleness of the samples of step ${number(pipeline.staleness_step)}, in versions`), bars(staleness)] : []),
    h("h2", {}, "Stores"),
    table([["store"], ["held", "number"], ["limit", "number"], ["on disk", "number"], ["shards", "number"], ["BUSY", "number"]], stores),
  );
}

function bars(pairs) {
  const most = Math.max(1, ...pairs.map(([, count]) => count));
  return h("div", { class: "bars" }, ...pairs.flatMap(([name, count]) => {
    const bar = h("i");
    bar.style.width = `${(100 * count) / most}%`;
    return [h("span", {}, name), bar, h("span", {}, number(count))];
  }));
}

const NEWEST = 5;

// The newest warnings are shown above every tab, all of them under Warnings.
export function showNotices({ warnings, left_out, troubles, rewinds }) {
  const bad = troubles.map((each) => ["bad", `${each.service}: ${each.text}`]);
  const warned = warnings.map((each) => [each.at, "warn", `step ${each.step}: ${each.text} → ${each.remedy} (${each.kind})`]);
  const back = rewinds.map((each) => [each.at, "soft", `Back to step ${each.step}: the steps up to ${each.committed} are trained again.`]);
  const newest = (lines, count) => lines.slice(-count).reverse().map(([, kind, text]) => [kind, text]);
  const count = warnings.length + left_out;
  const more = count > NEWEST ? [["soft", `${count - NEWEST} earlier warnings are listed under Warnings.`]] : [];
  $("notices").replaceChildren(...[...bad, ...newest(warned, NEWEST), ...more, ...newest(back, 2)].map(notice));

  $("warnings-tab").textContent = count ? `Warnings (${count})` : "Warnings";
  const head = `${count} warnings${left_out ? `; the first ${left_out} are only in warnings.jsonl` : ""}`;
  const all = [...warned, ...back].sort((a, b) => b[0] - a[0])
    .map(([at, kind, text]) => notice([kind, `${new Date(1000 * at).toLocaleString()}, ${text}`]));
  $("warnings").replaceChildren(h("p", { class: "soft" }, head), ...bad.map(notice), ...all);
}

function notice([kind, text]) {
  return h("p", { class: `notice ${kind}` }, h("bdi", {}, text));
}
