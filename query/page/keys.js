// The keyboard: / to the question, arrows or j and k through the passages, Enter opens, ? tells.

import { $, el } from "./dom.js";

const KEYS = [
  ["/", "Go to the question"], ["Ctrl Enter", "Write an answer"], ["↓ ↑ or j k", "Move through the passages"],
  ["Enter", "Open the document"], ["o", "Open it at its source"], ["e", "Show the whole passage"],
  ["t", "Light, dark, or the system's setting"], ["Esc", "Close, or stop the answer"], ["?", "This list"],
];

export function help() {
  const card = $("help");
  card.replaceChildren(
    el("div", { class: "head" }, el("h2", { id: "help-title" }, "Keyboard"),
      el("button", { type: "button", class: "icon", "aria-label": "Close", onclick: () => card.close() }, "×")),
    el("dl", { class: "keys" }, KEYS.map(([keys, what]) => el("div", {}, el("dt", {}, keys.split(" ").map((key, n) => [n ? " " : null, key === "or" ? "or" : el("kbd", {}, key)])), el("dd", {}, what)))),
  );
  card.onclick = (event) => event.target === card && card.close();
  card.showModal();
}

const cards = () => [...document.querySelectorAll("#results article")];

function move(by) {
  const all = cards();
  const at = all.indexOf(document.activeElement?.closest?.("#results article"));
  const next = all[at + by];
  if (next) {
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  } else if (at + by < 0) $("query").focus();
}

/** do: {answer, escape, theme, search} are what keys stand for. */
export function listen(act) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.altKey || event.isComposing || document.querySelector("dialog[open]")) return;
    const typing = event.target.closest?.("input:not([type=radio]):not([type=checkbox]), textarea, select");
    if (event.ctrlKey || event.metaKey) {
      if (event.key === "Enter" && act.searching()) taken(event, act.answer);
      return;
    }
    if (event.key === "Escape") return void taken(event, act.escape);
    if (typing) {
      if (event.target === $("query") && event.key === "ArrowDown") taken(event, () => move(1));
      return;
    }
    const card = event.target.closest?.("#results article");
    const onCard = card === event.target;
    const meant = {
      "/": () => act.search(), "?": help, t: act.theme, j: () => move(1), k: () => move(-1),
      ...(card || event.target === document.body ? { ArrowDown: () => move(1), ArrowUp: () => move(-1) } : {}),
      ...(onCard ? { Enter: () => card.open(), e: () => card.toggle(), o: () => card.source && window.open(card.source.href, "_blank", "noopener,noreferrer") } : {}),
    }[event.key];
    if (meant) taken(event, meant);
  });
}

function taken(event, meant) {
  event.preventDefault();
  meant();
}
