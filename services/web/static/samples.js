// Samples: the list of a step, and one sample with its tokens coloured by log-prob or by mismatch. On a phone, prompts and
// completions come first.

import { get } from "./api.js";
import { $, h, number, options, table } from "./dom.js";
import { mark, tint } from "./look.js";

const NUMBERS = new Set(["reward", "advantage", "tokens", "step"]);
const HEADS = ["reward", "advantage", "tokens", "end", "state", "prompt", "completion", "task, sample", "step"];

let found = null;
let open = null;
let coloring = "log-prob";

export function setUp() {
  $("sample-run").addEventListener("change", () => refresh(true));
  $("split").addEventListener("change", () => leaveTask(true));
  $("step").addEventListener("change", () => leaveTask(false));
  $("order").addEventListener("change", () => refresh(false));
  $("task").addEventListener("change", () => refresh(false));
}

export function takeHead(head) {
  options($("sample-run"), [head.run, ...head.runs], $("sample-run").value || head.run);
}

function leaveTask(newest) {
  $("task").value = "";
  return refresh(newest);
}

export async function refresh(newest) {
  const query = { run: $("sample-run").value, split: $("split").value, order: $("order").value, task: $("task").value.trim(),
    ...(newest ? {} : { step: $("step").value }) };
  found = await get("samples", query);
  options($("split"), found.splits, found.split);
  options($("step"), found.steps.map(String).reverse(), String(found.step ?? ""));
  list();
}

function list() {
  const rows = found.samples.map((each) => {
    const show = () => openSample(each);
    const cells = [
      number(each.reward), number(each.advantage), number(each.length), each.finish_reason,
      [each.state, each.reason, each.failure].filter(Boolean).join(": "),
      each.prompt, each.completion, `${each.task} ${each.sample}`, number(each.step),
    ];
    return h("tr", { class: "open", tabindex: "0", onclick: show, onkeydown: (event) => event.key === "Enter" && show() },
      ...cells.map((text, at) => {
        const wide = ["prompt", "completion"].includes(HEADS[at]);
        const kind = NUMBERS.has(HEADS[at]) ? "number" : wide ? "wide" : undefined;
        return h("td", { class: kind, "data-head": HEADS[at] }, wide ? h("bdi", {}, text) : text);
      }));
  });
  const heads = HEADS.map((head) => [head, NUMBERS.has(head) ? "number" : undefined]);
  const none = h("p", { class: "soft" }, "There are no samples here. The key monitor.samples says which are kept.");
  const left = found.total - rows.length;
  const more = h("p", { class: "warn" }, `The first ${rows.length} of ${found.total} samples; ${left} are not shown.`);
  $("sample-list").replaceChildren(rows.length ? table(heads, rows) : none, ...(left ? [more] : []));
}

async function openSample({ task, sample, step }) {
  open = await get("sample", { run: $("sample-run").value, split: found.split, step, task, sample });
  draw();
  $("sample").focus({ preventScroll: true });
  $("sample").scrollIntoView({ behavior: "smooth" });
}

function draw() {
  const facts = [
    ["task", open.task], ["sample", number(open.sample)], ["step", number(open.step)], ["state", open.reason || open.state],
    ["reward", number(open.reward)], ...Object.entries(open.rewards).map(([name, value]) => [`reward ${name}`, number(value)]),
    ...(open.failure ? [["failed", open.failure]] : []), ...Object.entries(open.info),
    ...Object.entries(open.group).map(([name, value]) => [name, number(value)]),
    ["advantage", number(open.advantage)], ["tokens", number(open.length)], ["end", open.finish_reason],
    ["versions", open.versions.join(", ")], ["turns", number(open.turns)], ["tool calls", number(open.tool_calls)],
  ];
  const texts = [["Prompt", open.prompt], ["Completion", open.completion], ["Answer of the row", open.answer], ["Conversation", open.conversation]];
  const cut = open.cut + Math.max(0, open.tokens - open.pieces.length);
  $("sample").hidden = false;
  $("sample").replaceChildren(
    h("div", { class: "facts" }, ...facts.map(([name, value]) => h("span", {},
      ...(name.startsWith("reward") ? [mark("reward"), " "] : []), `${name} `, h("b", {}, h("bdi", {}, value))))),
    ...(cut ? [h("p", { class: "warn" }, `${cut} characters and tokens are not shown; the files in samples/ may have more.`)] : []),
    ...texts.filter(([, text]) => text).flatMap(([name, text]) => {
      const first = ["Prompt", "Completion"].includes(name) ? "first" : "";
      return [h("h2", { class: first }, name), h("div", { class: `text ${first}`, dir: "auto" }, text)];
    }),
    ...tokens(),
  );
}

function tokens() {
  if (!open.pieces.length) return [];
  const detail = h("p", { class: "soft" }, "Point at a token to see its log-probs.");
  const choice = h("select", { onchange: () => { coloring = choice.value; draw(); } });
  options(choice, open.train_logprobs ? ["log-prob", "mismatch"] : ["log-prob"], open.train_logprobs ? coloring : "log-prob");
  const spans = open.pieces.map((piece, index) => {
    const given = open.sampled !== null && !open.sampled[index];
    const engine = open.logprobs[index];
    const trainer = open.train_logprobs?.[index];
    const span = h("span", { class: given ? "given" : undefined, "data-token": index }, piece);
    if (!given) span.style.backgroundColor = choice.value === "mismatch" ? mismatchColor(engine, trainer) : logprobColor(engine);
    const say = () => {
      const parts = [`token ${index}`, `log-prob ${number(engine)} (probability ${number(Math.exp(engine))})`];
      if (trainer !== undefined && trainer !== null) parts.push(`trainer ${number(trainer)}, difference ${number(engine - trainer)}`);
      detail.textContent = given ? `token ${index}: not sampled` : parts.join(", ");
    };
    span.addEventListener("pointerenter", say);
    span.addEventListener("click", say);
    return span;
  });
  const meaning = choice.value === "mismatch"
    ? [["generate", "more probable for the engine"], ["forward and backward", "more probable for the trainer"]]
    : [["generate", "improbable for the engine"]];
  const legend = h("div", { class: "facts soft" }, ...meaning.map(([kind, text]) => h("span", {}, mark(kind), ` ${text}`)));
  return [h("h2", {}, "Tokens by ", choice), legend, detail, h("div", { class: "text tokens", dir: "auto" }, ...spans)];
}

// Improbable tokens have the colour of generation: none at probability 1, full colour at e^-5.
const logprobColor = (logprob) => tint("generate", -logprob / 5);

// Tokens have the colour of generation where the engine's log-prob is above the trainer's, and that of training where it
// is below; full colour at a difference of 0.5.
function mismatchColor(engine, trainer) {
  const difference = engine - (trainer ?? engine);
  return tint(difference > 0 ? "generate" : "forward and backward", 2 * Math.abs(difference));
}
