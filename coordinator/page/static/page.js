"use strict";
// The page works without this script. The script refreshes data, runs countdowns, draws charts, has keyboard shortcuts and switches light and dark.
const root = document.documentElement;
const theme = localStorage.getItem("fedcg-theme");
if (theme) root.dataset.theme = theme;
root.dataset.script = "yes"; // shows what only works with this script

const REFRESH_MS = 2000; // at most one refresh every two seconds, regardless of the number of events
const IDLE_MS = 15000; // for values that change without an event, such as free disk space
const KEPT_MS = 2000; // maximum age of an answer: the coordinator caches facts and rendered pages for a second each
let lastRefresh = Date.now(), lastEvent = 0, planned = 0, isLost = false;

function live() { return document.getElementById("live"); }

function refresh() {
  planned = 0;
  lastRefresh = Date.now();
  if (live() && window.htmx && !document.hidden) htmx.trigger(live(), "refresh");
}

function refreshSoon() {
  if (!planned) planned = setTimeout(refresh, Math.max(50, lastRefresh + REFRESH_MS - Date.now()));
}

function showLink(lost) {
  const note = document.getElementById("link-state");
  if (!note || lost === isLost) return;
  isLost = lost;
  if (lost) note.querySelector("b").textContent = new Date(lastRefresh).toLocaleTimeString();
  note.hidden = !lost;
}

function span(seconds) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (seconds >= size) return `${Math.round(seconds / size)} ${unit}`;
  return `${Math.round(seconds)} s`;
}

function countdown(seconds) {
  if (seconds < 1) return "now";
  if (seconds >= 3600) return `in ${span(seconds)}`;
  const minutes = Math.floor(seconds / 60), rest = Math.floor(seconds % 60);
  return minutes ? `in ${minutes} min ${rest} s` : `in ${rest} s`;
}

function tick() {
  const now = Date.now() / 1000;
  for (const each of document.querySelectorAll("time[data-until]")) each.textContent = countdown(each.dataset.until - now);
  for (const each of document.querySelectorAll("time[data-ago]")) each.textContent = `${span(Math.max(0, now - each.dataset.ago))} ago`;
  for (const each of document.querySelectorAll("time[data-at]")) each.textContent = new Date(each.dataset.at * 1000).toLocaleString([], {dateStyle: "medium", timeStyle: "long"});
  const since = Date.now() - KEPT_MS, isBehind = lastEvent < since && lastRefresh < lastEvent + KEPT_MS;
  if (isBehind || Date.now() - lastRefresh > IDLE_MS) refreshSoon();
}

function colour(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }

const addresses = document.currentScript.dataset; // URLs of the chart library, loaded only by pages with a chart
function loadPlot() {
  if (document.getElementById("plot")) return;
  document.head.append(
    Object.assign(document.createElement("link"), { rel: "stylesheet", href: addresses.plotStyle }),
    Object.assign(document.createElement("script"), { id: "plot", src: addresses.plot, onload: draw }),
  );
}

function addSaving(box, rows) { // buttons that save a chart's figures and picture
  const buttons = [], name = box.getAttribute("aria-label").split(";")[0];
  const ways = { CSV: () => URL.createObjectURL(new Blob([rows.map((row) => row.join(",")).join("\n") + "\n"], { type: "text/csv" })), PNG: () => box.querySelector("canvas").toDataURL() };
  for (const [kind, make] of Object.entries(ways)) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "quiet", textContent: kind, title: `Save as ${kind}` });
    button.addEventListener("click", () => Object.assign(document.createElement("a"), { href: make(), download: `${name}.${kind.toLowerCase()}` }).click());
    buttons.push(button);
  }
  box.nextElementSibling.replaceChildren(...buttons);
}

function draw() {
  for (const box of document.querySelectorAll(".plot[data-chart]")) {
    const key = box.dataset.chart + root.dataset.theme + box.clientWidth;
    if (box.dataset.drawn === key && box.firstChild) continue;
    const { x, series } = JSON.parse(box.dataset.chart);
    const shown = series.filter((each) => each.values.some((value) => value !== null));
    const isEmpty = !x.length || !shown.length;
    if (!isEmpty && !window.uPlot) {
      loadPlot();
      return;
    }
    box.dataset.drawn = key;
    box.replaceChildren();
    if (isEmpty) {
      box.append(Object.assign(document.createElement("p"), { className: "empty-line", textContent: "No device has reported this yet." }));
      continue;
    }
    const ink = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") }, font: "12px system-ui" };
    const percent = (_, value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
    new uPlot({
      width: box.clientWidth, height: 220, scales: { x: { time: false }, y: { range: (_, low, high) => [Math.max(0, low - 0.03), Math.min(1, high + 0.03)] } }, cursor: { y: false },
      axes: [{ ...ink, label: "round", labelSize: 18, labelFont: ink.font, values: (_, values) => values.map((value) => (Number.isInteger(value) ? value : "")) }, { ...ink, size: 56, values: (_, values) => values.map((value) => `${Math.round(100 * value)} %`) }],
      series: [{ label: "round" }, ...shown.map((each, index) => ({ label: each.label, stroke: colour(["--main", "--soft", "--good"][index]), width: 2, dash: [[], [6, 4], [2, 3]][index], points: { show: x.length < 30, size: 6 }, value: percent }))],
    }, [x, ...shown.map((each) => each.values)], box);
    addSaving(box, [["round", ...shown.map((each) => each.label)], ...x.map((at, row) => [at, ...shown.map((each) => each.values[row] ?? "")])]);
  }
}

// A stream uses one of the six connections that a browser opens to a host. So one visible tab reads the events for all tabs.
// The lock passes to another tab when that one is hidden, closed or killed. Without locks (plain HTTP) each visible tab reads its own stream.
const tabs = new BroadcastChannel("fedcg-events");
const REOPEN_MS = 5000; // after an answer that is not a stream, which browsers do not retry
let reading = null;

function hear(kind) {
  if (kind !== "error") { // also for "open": nothing was read before it
    lastEvent = Date.now();
    refreshSoon();
  }
  showLink(kind === "error");
}

function read(signal, done) {
  if (signal.aborted) { done(); return; }
  const source = new EventSource("/api/v1/events/stream");
  for (const kind of ["log", "open", "error"]) source.addEventListener(kind, () => { hear(kind); tabs.postMessage(kind); });
  source.addEventListener("error", () => { if (source.readyState === 2) setTimeout(() => read(signal, done), REOPEN_MS); });
  signal.addEventListener("abort", () => { source.close(); done(); });
}

function follow() {
  if (document.hidden === (reading === null)) return;
  if (document.hidden) {
    reading.abort();
    reading = null;
    return;
  }
  reading = new AbortController();
  const { signal } = reading, begin = () => new Promise((done) => read(signal, done));
  if (navigator.locks) navigator.locks.request("fedcg-events", { signal }, begin).catch(() => {});
  else begin();
  refreshSoon();
}

// Fields for date and time are in the browser's time zone; their form sends UTC. Without this script they are in UTC.
const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone;
function showZone() {
  for (const each of document.querySelectorAll("[data-zone]")) each.textContent = ZONE;
  for (const each of document.querySelectorAll("input[data-at]")) {
    const at = new Date(each.dataset.at * 1000);
    each.value = new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 16);
    each.removeAttribute("data-at");
  }
}
document.addEventListener("formdata", (event) => {
  for (const each of event.target.querySelectorAll("input[type=datetime-local]")) if (each.value) event.formData.set(each.name, new Date(each.value).toISOString());
});

// Keyboard shortcuts. They can be switched off, because single keys disturb speech input.
const SCREENS = { h: ["Home", "/"], d: ["Devices", "/devices"], r: ["Repairs", "/repairs"], e: ["Events", "/events"] };
const OFF = "fedcg-keys-off", SEQUENCE_MS = 1500;
let pressedG = 0;
function showKeys() {
  const box = Object.assign(document.createElement("dialog"), { id: "keys", className: "card" });
  const screens = Object.entries(SCREENS).map(([key, [name]]) => `<dt><kbd>g</kbd> then <kbd>${key}</kbd></dt><dd>${name}</dd>`).join("");
  box.setAttribute("aria-labelledby", "keys-title");
  box.innerHTML = `<h2 id="keys-title">Keyboard shortcuts</h2><dl><dt><kbd>?</kbd></dt><dd>This list</dd><dt><kbd>/</kbd></dt><dd>Search</dd>${screens}</dl><form class="stack" method="dialog"><label class="check"><input type="checkbox"> Use these shortcuts</label><button autofocus>Close</button></form>`;
  const use = box.querySelector("input");
  use.checked = !localStorage.getItem(OFF);
  use.addEventListener("change", () => (use.checked ? localStorage.removeItem(OFF) : localStorage.setItem(OFF, "1")));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
}
document.addEventListener("keydown", (event) => {
  if (!live() || event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, textarea, dialog") || localStorage.getItem(OFF)) return;
  const screen = Date.now() - pressedG < SEQUENCE_MS && SCREENS[event.key];
  pressedG = event.key === "g" ? Date.now() : 0;
  if (event.key === "?") showKeys();
  else if (event.key === "/") {
    event.preventDefault();
    document.getElementById("find").focus();
    document.getElementById("find").select();
  } else if (screen) location.href = screen[1];
});

// The sizes of networks take seconds: a process with torch computes them. They follow the plan.
let sized = "";
function showSizes() {
  const url = document.getElementById("sizing")?.dataset.url;
  if (!url || url === sized) return;
  sized = url;
  fetch(url).then((answer) => (answer.ok ? answer.json() : (sized = "", []))).then((found) => {
    for (const each of url === sized ? found : []) {
      const row = document.querySelector(`[data-network="${CSS.escape(each.split)}"]`), show = (name, text) => { row.querySelector(`[data-size=${name}]`).textContent = text; };
      if (!row) continue;
      show("parameters", each.problem ? "–" : each.parameters.toLocaleString("en").replaceAll(",", "\u202f"));
      show("update", each.problem ? each.problem.replace(`${each.split} `, "").split(": choose")[0] : each.update_bytes < 1e6 ? `${(each.update_bytes / 1e3).toFixed(1)} kB` : `${(each.update_bytes / 1e6).toFixed(1)} MB`);
    }
  });
}

document.addEventListener("DOMContentLoaded", () => {
  showSizes();
  tick();
  showZone();
  setInterval(tick, 1000);
  if (!live()) return;
  document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  tabs.addEventListener("message", (event) => hear(event.data));
  document.addEventListener("visibilitychange", follow);
  follow();
});
addEventListener("load", draw);
addEventListener("resize", draw);
document.addEventListener("htmx:after:swap", (event) => {
  tick();
  showZone();
  draw();
  showSizes();
  if (event.detail?.ctx?.sourceElement?.id !== "plan") return; // choices follow the plan, even if the reader has changed them before
  for (const each of document.querySelectorAll("#plan option")) each.selected = each.hasAttribute("selected");
  for (const each of document.querySelectorAll("#plan [type=radio]")) each.checked = each.hasAttribute("checked");
});
document.addEventListener("htmx:response:error", (event) => { if (event.detail?.ctx?.response?.status === 401) location.href = "/login?to=" + encodeURIComponent(location.pathname + location.search); });
document.addEventListener("change", (event) => {
  const { all: name, into } = event.target.dataset ?? {};
  if (into) event.target.files[0]?.text().then((text) => { event.target.form.elements[into].value = text; });
  if (name) for (const each of document.querySelectorAll(`input[name="${name}"]`)) each.checked = event.target.checked;
});
document.addEventListener("click", (event) => {
  const copy = event.target.closest("[data-copy]");
  if (copy) navigator.clipboard?.writeText(document.querySelector(copy.dataset.copy).textContent).then(() => { copy.textContent = "Copied"; });
  if (event.target.closest("[data-keys]")) showKeys();
  if (!event.target.closest("[data-theme-switch]")) return;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("fedcg-theme", root.dataset.theme);
  draw();
});
