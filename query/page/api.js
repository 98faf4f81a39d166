// The service's HTTP interface. Addresses are relative: the page works under any prefix.

const KEY = "penstock-access";
/** Who asks: {token} and, in development mode, {as, tenant}. Kept for this tab only: a cookie would go to whatever else
    listens on this machine, for cookies know no ports. */
let access = JSON.parse(sessionStorage.getItem(KEY) ?? "{}");
// The address that `penstock status` shows brings the token of development mode behind "#", which is sent to nobody. Such
// addresses count on this machine alone: elsewhere a link could make its reader ask as somebody else.
const brought = location.hash.match(/^#token=([\w-]+)$/)?.[1];
if (brought && ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname)) {
  become({ ...access, token: brought });
  history.replaceState(history.state, "", location.pathname + location.search);
}

addEventListener("hashchange", () => location.hash.startsWith("#token=") && location.reload());

export const who = () => access;

export function become(next) {
  access = next;
  sessionStorage.setItem(KEY, JSON.stringify(next));
}

/** What went wrong, for people. `status` 0: the service cannot be reached. */
export class Problem extends Error {
  constructor(status, title, detail, retryAfter) {
    super(detail || title);
    this.status = status;
    this.title = title;
    this.retryAfter = retryAfter;
  }
}

function headers() {
  const found = {};
  if (access.token) found["Authorization"] = `Bearer ${access.token}`;
  if (access.as) found["X-Penstock-As"] = utf8(access.as);
  if (access.tenant) found["X-Penstock-Tenant"] = utf8(access.tenant);
  return found;
}

/** A header carries bytes: each as the character of its number. */
const utf8 = (text) => String.fromCharCode(...new TextEncoder().encode(text));

async function ask(path, { method = "GET", body, signal, accept = "application/json" } = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      signal,
      headers: { Accept: accept, ...headers(), ...(body ? { "Content-Type": "application/json" } : {}) },
      body: body ? JSON.stringify(body) : undefined,
      cache: "no-store",
      credentials: "same-origin",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The service cannot be reached", "The service cannot be reached. Is it running, and are you online?");
  }
  if (answer.status === 401) document.dispatchEvent(new Event("stranger"));
  if (!answer.ok) throw await problem(answer);
  return answer;
}

async function problem(answer) {
  let told = {};
  try {
    told = await answer.json();
  } catch {
    // Not ours: a proxy's page. The status says enough.
  }
  const title = told.title ?? `The service answered ${answer.status}`;
  return new Problem(answer.status, title, told.detail ?? title, Number(answer.headers.get("Retry-After")) || undefined);
}

export const get = async (path, signal) => (await ask(path, { signal })).json();

export async function post(path, body, signal) {
  const answer = await ask(path, { method: "POST", body, signal });
  return answer.status === 204 ? null : answer.json();
}

/** Server-sent events of a POST, one {event, data} each, data already parsed. Ends with the stream. */
export async function* events(path, body, signal) {
  const answer = await ask(path, { method: "POST", body, signal, accept: "text/event-stream" });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(broken);
      if (done) return;
      buffer = (buffer + value).replace(/\r\n/g, "\n");
      for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
        const found = parsed(buffer.slice(0, end));
        buffer = buffer.slice(end + 2);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may be broken already: then there is nothing to give up
  }
}

function broken(error) {
  if (error.name === "AbortError") throw error;
  throw new Problem(0, "The connection ended", "The answer is incomplete: the connection ended early.");
}

/** One event's lines. Comments (a server's way to keep the line open) make none. */
function parsed(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { event, data: JSON.parse(data.join("\n")) } : null;
}
