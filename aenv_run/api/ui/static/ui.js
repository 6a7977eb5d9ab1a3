// The dashboard's only script: parts of a page that renew themselves, times that count, and the terminal.
"use strict";

// <section data-live="URL" data-every="SECONDS">: its content is fetched again while the page is looked at.
function keepLive(section) {
  const every = Number(section.dataset.every) * 1000;
  async function renew() {
    if (document.hidden || section.contains(document.activeElement)) return again();
    try {
      const answer = await fetch(section.dataset.live, { headers: { "X-Fragment": "1" }, redirect: "error" });
      if (answer.ok) section.innerHTML = await answer.text();
      section.classList.toggle("stale", !answer.ok);
      if (answer.status === 401) return location.reload();
      if (answer.headers.get("X-Ended")) return;
    } catch {
      section.classList.add("stale");
    }
    again();
  }
  const again = () => setTimeout(renew, every);
  again();
}

// What a key sends, as xterm does; CSI cursor keys become SS3 in application mode.
const KEYS = {
  Enter: "\r", Backspace: "\x7f", Tab: "\t", Escape: "\x1b", Delete: "\x1b[3~", Insert: "\x1b[2~",
  PageUp: "\x1b[5~", PageDown: "\x1b[6~", F1: "\x1bOP", F2: "\x1bOQ", F3: "\x1bOR", F4: "\x1bOS",
  F5: "\x1b[15~", F6: "\x1b[17~", F7: "\x1b[18~", F8: "\x1b[19~", F9: "\x1b[20~", F10: "\x1b[21~",
};
const CURSOR = { ArrowUp: "A", ArrowDown: "B", ArrowRight: "C", ArrowLeft: "D", Home: "H", End: "F" };

function bytesOf(event, applicationKeys) {
  if (event.metaKey || event.isComposing) return null;
  if (event.key in CURSOR) return (applicationKeys ? "\x1bO" : "\x1b[") + CURSOR[event.key];
  if (event.key in KEYS) return KEYS[event.key];
  if (event.key.length !== 1) return null;
  if (event.ctrlKey && !event.altKey) {
    const code = event.key.toUpperCase().charCodeAt(0);
    if (event.key === " ") return "\0";
    return code >= 64 && code < 96 ? String.fromCharCode(code - 64) : null;
  }
  return (event.altKey && !event.ctrlKey ? "\x1b" : "") + event.key;
}

function runElement([text, foreground, background, styles]) {
  const span = document.createElement("span");
  span.textContent = text;
  if (styles) span.className = styles;
  const paint = (property, colour) => {
    if (/^[0-9a-f]{6}$/.test(colour)) span.style.setProperty(property, "#" + colour);
    else if (colour !== "default") span.style.setProperty(property, `var(--${colour})`);
  };
  paint("--ink", foreground);
  paint("--paper", background);
  return span;
}

function openTerminal(box) {
  const screen = box.querySelector(".screen");
  const status = box.querySelector(".status");
  const cursor = document.createElement("div");
  cursor.className = "cursor";
  const probe = document.createElement("span");
  probe.textContent = "m".repeat(100);
  screen.append(probe);
  const cell = { width: probe.getBoundingClientRect().width / 100, height: probe.getBoundingClientRect().height };
  probe.remove();
  screen.append(cursor);
  const size = () => ({
    columns: Math.max(20, Math.floor(screen.clientWidth / cell.width)),
    rows: Math.max(5, Math.floor(screen.clientHeight / cell.height)),
  });
  const { columns, rows } = size();
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const socket = new WebSocket(`${scheme}://${location.host}${box.dataset.terminal}?columns=${columns}&rows=${rows}`);
  const lines = [];
  let applicationKeys = false;
  const send = (message) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));

  socket.onopen = () => { status.textContent = "connected"; screen.focus(); };
  socket.onclose = (event) => { status.textContent = event.reason || "disconnected"; box.classList.add("ended"); };
  socket.onmessage = (event) => {
    const change = JSON.parse(event.data);
    applicationKeys = change.application_keys;
    while (lines.length < change.rows) {
      lines.push(document.createElement("div"));
      lines.at(-1).className = "line";
      screen.append(lines.at(-1));
    }
    while (lines.length > change.rows) lines.pop().remove();
    for (const [number, runs] of Object.entries(change.lines)) lines[number].replaceChildren(...runs.map(runElement));
    cursor.hidden = change.cursor === null;
    if (change.cursor) {
      cursor.style.left = change.cursor[0] * cell.width + "px";
      cursor.style.top = change.cursor[1] * cell.height + "px";
    }
  };
  screen.addEventListener("keydown", (event) => {
    if (event.ctrlKey && event.shiftKey) return; // the browser's own: copy, paste
    const keys = bytesOf(event, applicationKeys);
    if (keys === null) return;
    event.preventDefault();
    send({ keys });
  });
  screen.addEventListener("paste", (event) => {
    event.preventDefault();
    send({ keys: event.clipboardData.getData("text").replace(/\r?\n/g, "\r") });
  });
  let resizing;
  new ResizeObserver(() => {
    clearTimeout(resizing);
    resizing = setTimeout(() => send(size()), 150);
  }).observe(screen);
}

for (const form of document.querySelectorAll("form[data-confirm]")) {
  form.addEventListener("submit", (event) => confirm(form.dataset.confirm) || event.preventDefault());
}
document.querySelectorAll("[data-live]").forEach(keepLive);
document.querySelectorAll("[data-terminal]").forEach(openTerminal);
