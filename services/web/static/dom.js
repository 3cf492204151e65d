// Elements and numbers. Text from outside only becomes text nodes: nothing here parses HTML.

export const $ = (id) => document.getElementById(id);

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.map((child) => (typeof child === "string" ? clean(child) : child)));
  return element;
}

// Makes control and invisible characters visible, including those that colour a terminal or reverse the direction of text.
// They are the characters that `plain` in shared/samples/record.py escapes.
const HIDDEN = /(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu;

export function clean(text) {
  return text.replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : `⟨${code.toString(16)}⟩`;
  });
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  for (; value >= 1024 && unit < 4; unit += 1) value /= 1024;
  return `${+value.toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function table(heads, rows) {
  const head = h("tr", {}, ...heads.map(([text, kind]) => h("th", { class: kind }, text)));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
}

export function options(select, values, chosen) {
  const known = [...select.options].map((option) => option.value);
  if (known.join("\n") !== values.join("\n")) {
    select.replaceChildren(...values.map((value) => h("option", { value }, value)));
  }
  select.value = chosen ?? "";
}
