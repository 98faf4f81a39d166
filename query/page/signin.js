// Signing in: with a token or API key, or in development mode with the service's token and any name.

import { setCredentials, get, credentials } from "./api.js";
import { $, el } from "./dom.js";

let me = null;

export const isOperator = () => me?.operator === true;

/** Ask the service who the caller is; null: not signed in. */
export async function identify() {
  try {
    me = await get("v1/me");
  } catch (error) {
    if (error.status !== 401) throw error;
    me = null;
  }
  const name = me && (me.principal ?? me.key ?? "service");
  $("who").textContent = name ? `${name} · ${me.tenant}` : "Sign in";
  $("who").title = name ? `You read as ${name} in ${me.tenant}` : "Sign in";
  return me;
}

/** Open the dialog. onDone is called after signing in. problem: an error to show. */
export function open(onDone, problem = "") {
  const card = $("signin");
  const token = el("input", { id: "signin-token", type: "password", autocomplete: "off", spellcheck: "false", value: credentials().token ?? "" });
  const name = el("input", { id: "signin-as", type: "text", autocomplete: "username", spellcheck: "false", value: credentials().as ?? "" });
  const tenant = el("input", { id: "signin-tenant", type: "text", autocomplete: "organization", spellcheck: "false", placeholder: "default", value: credentials().tenant ?? "" });
  const submit = async (event) => {
    event.preventDefault();
    setCredentials({ token: token.value.trim(), as: name.value.trim(), tenant: tenant.value.trim() });
    card.close();
    await onDone();
  };
  card.replaceChildren(
    el("form", { method: "dialog", onsubmit: submit },
      el("div", { class: "head" }, el("h2", { id: "signin-title" }, "Sign in"),
        el("button", { type: "button", class: "icon", "aria-label": "Close", onclick: () => card.close() }, "×")),
      el("p", { class: "quiet-text" }, "You see what you may read, and nothing else. What you enter is stored in this tab only."),
      problem && el("p", { class: "doubt", role: "alert" }, problem),
      el("label", { for: "signin-token" }, "Access token or key"), token,
      el("details", { open: Boolean(credentials().as) || me?.kind === "development" }, el("summary", {}, "This service runs in development mode"),
        el("p", { class: "quiet-text" }, "Open the page by the address that penstock status shows on a terminal: it brings the token. You may then choose any identity:"),
        el("label", { for: "signin-as" }, "Your name"), name, el("label", { for: "signin-tenant" }, "Tenant"), tenant),
      el("div", { class: "buttons" },
        el("button", { type: "button", class: "quiet", onclick: async () => (setCredentials({}), card.close(), await onDone()) }, "Sign out"),
        el("button", { type: "submit", class: "primary" }, "Continue")),
    ),
  );
  card.showModal();
  token.focus();
}
