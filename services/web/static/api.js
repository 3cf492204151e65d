// Requests to the page's own server. Tokens are sent in headers that no other site can make a browser send.

import { $ } from "./dom.js";

const KEY = "rlbus-token";

const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem(KEY, given);
  history.replaceState(null, "", location.pathname);
}

let asking = null;

export function ask(text) {
  asking ??= new Promise((resolve) => {
    const dialog = $("ask");
    $("ask-text").textContent = text;
    $("ask-token").value = "";
    dialog.addEventListener("close", () => {
      asking = null;
      resolve(dialog.returnValue ? $("ask-token").value.trim() : "");
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

async function request(path, init = {}) {
  for (;;) {
    const token = sessionStorage.getItem(KEY);
    const headers = { ...init.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
    const answer = await fetch(`/api/${path}`, { ...init, headers });
    if (answer.status !== 401) return answer;
    const entered = await ask("This page needs its token (the content of the file in monitor.web.token).");
    if (!entered) throw new Error("no token");
    sessionStorage.setItem(KEY, entered);
  }
}

export async function get(path, query = {}) {
  const pairs = Object.entries(query).flatMap(([name, value]) => [value].flat().map((each) => [name, each]));
  const answer = await request(`${path}?${new URLSearchParams(pairs)}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

export async function operate(token, action, name) {
  const answer = await request("operate", {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Operator-Token": token },
    body: JSON.stringify({ action, name }),
  });
  return { status: answer.status, text: await answer.text() };
}

// Calls on[event](data) for each event, and on.contact(connected) whenever the connection is made or lost. Never ends.
export async function follow(on) {
  for (;;) {
    try {
      const answer = await request("stream");
      if (!answer.ok) throw new Error(await answer.text());
      on.contact(true);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = "", part = await reader.read(); !part.done; part = await reader.read()) {
        const events = (rest + part.value).split("\n\n");
        rest = events.pop();
        for (const event of events) {
          const [, name, data] = /^event: (\w+)\ndata: (.*)$/s.exec(event) ?? [];
          if (name) on[name]?.(JSON.parse(data));
        }
      }
    } catch (error) {
      on.contact(false, error.message);
    }
    on.contact(false);
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}
