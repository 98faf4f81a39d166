// Keyboard shortcuts: / focuses the query, arrows or j and k move through the passages, Enter opens one, ? lists all.

import { $, el } from "./dom.js";

const KEYS = [
  ["/", "Go to the question"], ["Ctrl Enter", "Write an answer"], ["↓ ↑ or j k", "Move through the passages"],
  ["Enter", "Open the document"], ["o", "Open it at its source"], ["e", "Show the whole passage"],
  ["t", "Light, dark, or the system's setting"], ["Esc", "Close, or stop the answer"], ["?", "This list"],
];

export function showHelp() {
  const card = $("help");
  card.replaceChildren(
    el("div", { class: "head" }, el("h2", { id: "help-title" }, "Keyboard"),
      el("button", { type: "button", class: "icon", "aria-label": "Close", onclick: () => card.close() }, "×")),
    el("dl", { class: "keys" }, KEYS.map(([keys, what]) => el("div", {}, el("dt", {}, keys.split(" ").map((key, n) => [n ? " " : null, key === "or" ? "or" : el("kbd", {}, key)])), el("dd", {}, what)))),
  );
  card.onclick = (event) => void (event.target === card && card.close());
  card.showModal();
}

const cards = () => [...document.querySelectorAll("#results article")];

function moveFocus(by) {
  const all = cards();
  const at = all.indexOf(document.activeElement?.closest?.("#results article"));
  const next = all[at + by];
  if (next) {
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  } else if (at + by < 0) $("query").focus();
}

/** Listen for keys. actions: {answer, escape, theme, search, searching}. */
export function listenForKeys(actions) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.altKey || event.isComposing || document.querySelector("dialog[open]")) return;
    const typing = event.target.closest?.("input:not([type=radio]):not([type=checkbox]), textarea, select");
    if (event.ctrlKey || event.metaKey) {
      if (event.key === "Enter" && actions.searching()) handle(event, actions.answer);
      return;
    }
    if (event.key === "Escape") return void handle(event, actions.escape);
    if (typing) {
      if (event.target === $("query") && event.key === "ArrowDown") handle(event, () => moveFocus(1));
      return;
    }
    const card = event.target.closest?.("#results article");
    const onCard = card === event.target;
    const action = {
      "/": () => actions.search(), "?": showHelp, t: actions.theme, j: () => moveFocus(1), k: () => moveFocus(-1),
      ...(card || event.target === document.body ? { ArrowDown: () => moveFocus(1), ArrowUp: () => moveFocus(-1) } : {}),
      ...(onCard ? { Enter: () => card.open(), e: () => card.toggle(), o: () => card.source && window.open(card.source.href, "_blank", "noopener,noreferrer") } : {}),
    }[event.key];
    if (action) handle(event, action);
  });
}

function handle(event, action) {
  event.preventDefault();
  action();
}
