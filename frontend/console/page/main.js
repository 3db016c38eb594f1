// Main loop: loads the state once a second, shows it in the open view, and warns if it is outdated.
import * as api from "./api.js";
import { byId, h, setAttribute, setText } from "./dom.js";
import { askKey } from "./dialogs.js";
import { clock, duration } from "./format.js";
import { Nodes } from "./nodes.js";
import { Objectives } from "./objectives.js";
import { Overview } from "./overview.js";
import { Pool } from "./pool.js";
import { Requests } from "./requests.js";
import { Sessions } from "./sessions.js";

const EVERY_MS = 1000;
const LONGEST_MS = 8000;
const STALE_S = 5;
const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

const session = { refresh: () => look() };
const views = { overview: new Overview(), nodes: new Nodes(session), pool: new Pool(), objectives: new Objectives(session), requests: new Requests(), sessions: new Sessions() };

let state = null;
let heardAt = 0; // performance.now() of the last answer
let trouble = null;
let current = "overview";
let pause = EVERY_MS;
let timer = 0;
let asking = false;
let missed = false;

async function look() {
  clearTimeout(timer);
  if (asking) {
    missed = true;
    return;
  }
  asking = true;
  try {
    // If a required key is missing, only its presence is checked.
    if (!state && !api.hasKey()) mayRead(await api.about());
    state = await api.state();
    heardAt = performance.now();
    trouble = null;
    pause = EVERY_MS;
    show();
  } catch (error) {
    trouble = error;
    pause = Math.min(LONGEST_MS, 2 * pause);
    if (error.status === 401 || error.status === 403) {
      // Without the right to read, all data read before and the key are removed.
      if (state) location.reload();
      pause = LONGEST_MS;
    }
    if (!(error instanceof api.Problem)) console.error(error);
  } finally {
    asking = false;
    standing();
    timer = setTimeout(look, missed ? 0 : document.hidden ? LONGEST_MS : pause);
    missed = false;
  }
}

function mayRead({ needs_key: needsKey, has_admin: hasAdmin }) {
  if (!needsKey) return;
  if (hasAdmin) throw new api.Problem("an admin key is required", 401, "");
  throw new api.Problem("API keys are required here, but none has admin scope. Create one with `moonpool keys new --admin`.", 403, "no_admin_key");
}

function show() {
  byId("loading").hidden = true;
  byId("view").hidden = false;
  setText(byId("where"), state.front_door.node_id);
  pills();
  views[current].update(state);
}

function pills() {
  const nodes = state.nodes;
  const count = (wanted) => nodes.filter((node) => node.state === wanted).length;
  const answering = state.conductors.filter((each) => !each.problem).length;
  const told = [
    state.front_door.not_ready === null ? ["✓ serving", "good"] : [`✕ ${state.front_door.not_ready === "draining" ? "draining" : "not ready"}`, "bad", state.front_door.not_ready],
    [`${answering === state.conductors.length ? "✓" : "✕"} ${answering} of ${state.conductors.length} conductors`, answering === state.conductors.length ? "good" : answering ? "warn" : "bad"],
    [`${nodes.length} nodes`, ""],
  ];
  if (state.pool.directory && !state.problem) told.push([state.pool.directory === "EXACT" ? "✓ directory exact" : "! directory degraded", state.pool.directory === "EXACT" ? "good" : "warn"]);
  for (const [wanted, kind] of [["suspect", "bad"], ["draining", "warn"], ["switching", "warn"]]) if (count(wanted)) told.push([`${count(wanted)} ${wanted}`, kind]);
  const list = byId("pills");
  const key = JSON.stringify(told);
  if (list.dataset.told === key) return;
  list.dataset.told = key;
  list.replaceChildren(...told.map(([text, kind, title]) => h("li", { class: `pill ${kind}`, title }, text)));
}

// Age of the shown data, and the reason if it is outdated.
function standing() {
  const sinceS = (performance.now() - heardAt) / 1000;
  const closed = trouble && (trouble.status === 401 || trouble.status === 403);
  let text = "";
  let isStale = false;
  if (closed) {
    text = api.hasKey() ? `This key has no access to the console: ${trouble.message}` : trouble.status === 403 ? trouble.message : "The console requires an admin key here: it shows requests of all tenants.";
    byId("loading").hidden = true;
  } else if (trouble) {
    isStale = state !== null;
    text = `${trouble.message}. ${state ? `The data shown is ${duration(sinceS)} old.` : "There is no data yet."}`;
  } else if (state?.problem) {
    isStale = true;
    text = state.age_s === null ? `No conductor has answered yet: ${state.problem}` : `The node data shown is ${duration(state.age_s + sinceS)} old: ${state.problem}.`;
  } else if (state && (state.age_s ?? 0) + sinceS > STALE_S) {
    isStale = true;
    text = `The data shown is ${duration(state.age_s + sinceS)} old.`;
  }
  byId("locked").hidden = !closed;
  document.body.classList.toggle("is-stale", isStale);
  const banner = byId("banner");
  banner.hidden = text === "";
  banner.classList.toggle("mild", closed ? !api.hasKey() : !trouble && !state?.problem);
  // The age changes each second, so it is announced only when the reason changes.
  const reason = text.replace(/\d+/g, "");
  if (banner.dataset.reason !== reason) {
    banner.dataset.reason = reason;
    banner.setAttribute("role", "alert");
  } else banner.setAttribute("role", "none");
  setText(banner, text.charAt(0).toUpperCase() + text.slice(1));
  setText(byId("age"), state ? `As of ${clock(state.at_s)}${isStale ? ", outdated" : ", updated every second"}. Times are in this browser's time zone.` : "");
  setText(byId("key"), api.hasKey() ? "Admin key set" : "Admin key…");
}

function route() {
  const [, view, ...rest] = location.hash.split("/");
  if (location.hash && !location.hash.startsWith("#/")) return;
  current = Object.hasOwn(views, view ?? "") ? view : "overview";
  for (const link of document.querySelectorAll(".tabs a")) setAttribute(link, "aria-current", link.dataset.view === current ? "page" : null);
  document.querySelector(".tabs a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  byId("view").replaceChildren(views[current].node);
  document.title = `${document.querySelector(`.tabs a[data-view="${current}"]`).textContent} · Moonpool console`;
  if (state) views[current].update(state);
  views[current].open?.(decoded(rest.join("/")));
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function theme(chosen) {
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  try {
    if (chosen === "auto") localStorage.removeItem("moonpool-theme");
    else localStorage.setItem("moonpool-theme", chosen);
  } catch {
    // Storage is unavailable: the choice lasts until the page is closed.
  }
  setText(byId("theme"), THEMES[chosen]);
}

byId("theme").addEventListener("click", () => {
  const order = Object.keys(THEMES);
  theme(order[(order.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % order.length]);
});
const giveKey = async () => {
  if (await askKey(state?.front_door.has_admin ?? trouble?.code !== "no_admin_key")) {
    pause = EVERY_MS;
    byId("main").focus();
    look();
  }
};
byId("key").addEventListener("click", giveKey);
byId("unlock").addEventListener("click", giveKey);
addEventListener("hashchange", () => {
  route();
  byId("main").focus({ preventScroll: true });
});
document.addEventListener("visibilitychange", () => !document.hidden && look());
setInterval(standing, 1000);

theme(document.documentElement.dataset.theme ?? "auto");
route();
look();
