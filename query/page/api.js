// Client of the service's HTTP interface. URLs are relative, so that the page works under any prefix.

const KEY = "penstock-access";
/** Credentials: {token} and, in development mode, {as, tenant}. Stored for this tab only: a cookie would be sent to every
    other server on this machine, because cookies do not distinguish ports. */
let stored = JSON.parse(sessionStorage.getItem(KEY) ?? "{}");
// The URL that `penstock status` prints has the development token in its fragment, which browsers do not send. It is
// accepted on this machine only: elsewhere a link could make its reader search as another person.
const tokenInAddress = location.hash.match(/^#token=([\w-]+)$/)?.[1];
if (tokenInAddress && ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname)) {
  setCredentials({ ...stored, token: tokenInAddress });
  history.replaceState(history.state, "", location.pathname + location.search);
}

addEventListener("hashchange", () => location.hash.startsWith("#token=") && location.reload());

export const credentials = () => stored;

export function setCredentials(next) {
  stored = next;
  sessionStorage.setItem(KEY, JSON.stringify(next));
}

/** An error to show to people. `status` 0: the service cannot be reached. */
export class Problem extends Error {
  constructor(status, title, detail, retryAfter) {
    super(detail || title);
    this.status = status;
    this.title = title;
    this.retryAfter = retryAfter;
  }
}

function headers() {
  const result = {};
  if (stored.token) result["Authorization"] = `Bearer ${stored.token}`;
  if (stored.as) result["X-Penstock-As"] = utf8(stored.as);
  if (stored.tenant) result["X-Penstock-Tenant"] = utf8(stored.tenant);
  return result;
}

/** Encode text for a header: one character for each byte of its UTF-8. */
const utf8 = (text) => String.fromCharCode(...new TextEncoder().encode(text));

async function request(path, { method = "GET", body, signal, accept = "application/json" } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      headers: { Accept: accept, ...headers(), ...(body ? { "Content-Type": "application/json" } : {}) },
      body: body ? JSON.stringify(body) : undefined,
      cache: "no-store",
      credentials: "same-origin",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The service cannot be reached", "The service cannot be reached. Check that it is running and that you are online.");
  }
  if (response.status === 401) document.dispatchEvent(new Event("unauthenticated"));
  if (!response.ok) throw await problemFrom(response);
  return response;
}

async function problemFrom(response) {
  let fields = {};
  try {
    fields = await response.json();
  } catch {
    // Not a problem document, for example a proxy's page: the status is enough.
  }
  const title = fields.title ?? `The service responded with status ${response.status}`;
  return new Problem(response.status, title, fields.detail ?? title, Number(response.headers.get("Retry-After")) || undefined);
}

export const get = async (path, signal) => (await request(path, { signal })).json();

export async function post(path, body, signal) {
  const response = await request(path, { method: "POST", body, signal });
  return response.status === 204 ? null : response.json();
}

export const remove = async (path) => void (await request(path, { method: "DELETE" }));

/** Yield the server-sent events of a POST as {event, data}, with parsed data, until the stream ends. */
export async function* events(path, body, signal) {
  const response = await request(path, { method: "POST", body, signal, accept: "text/event-stream" });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(connectionLost);
      if (done) return;
      buffer = (buffer + value).replace(/\r\n/g, "\n");
      for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
        const parsed = parseEvent(buffer.slice(0, end));
        buffer = buffer.slice(end + 2);
        if (parsed) yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be lost already
  }
}

function connectionLost(error) {
  if (error.name === "AbortError") throw error;
  throw new Problem(0, "The connection ended", "The answer is incomplete: the connection ended early.");
}

/** Parse the lines of one event; null for comments, which keep the connection open. */
function parseEvent(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { event, data: JSON.parse(data.join("\n")) } : null;
}
