/** The transport on a real server that follows a script: retries, tokens, streams that end early. */

import assert from "node:assert/strict";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";
import { gzipSync } from "node:zlib";

import { Client, ClientError, InvalidResponse, ProblemError, Unreachable, type Options } from "penstock-client";

type Reply = (request: IncomingMessage, response: ServerResponse) => void;

/** Run with a client of a server that gives these replies, the last one for ever. */
async function replying(
  script: Reply[],
  options: Partial<Options>,
  run: (client: Client, requests: IncomingMessage[], url: string) => Promise<void>,
): Promise<void> {
  const requests: IncomingMessage[] = [];
  const server = createServer((request, response) => {
    request.resume().on("end", () => {
      requests.push(request);
      script[Math.min(requests.length, script.length) - 1]?.(request, response);
    });
  });
  await new Promise<void>((listening) => server.listen(0, "127.0.0.1", listening));
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  try {
    await run(new Client({ url, ...options }), requests, url);
  } finally {
    server.closeAllConnections();
    await new Promise((closed) => server.close(closed));
  }
}

function refusal(status: number, headers: Record<string, string> = {}): Reply {
  const body = { type: "urn:penstock:problem:busy", title: "Service busy", status, detail: "retry" };
  return (_, response) =>
    response.writeHead(status, { "Content-Type": "application/problem+json", ...headers }).end(JSON.stringify(body));
}

const ME = { tenant: "acme", principal: "ann", key: null, kind: "token", class: "standard", operator: false };
const caller: Reply = (_, response) => response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify(ME));
const hangUp: Reply = (request) => request.socket.destroy();

function stream(text: string, end = true): Reply {
  return (_, response) => {
    response.writeHead(200, { "Content-Type": "text/event-stream" }).write(text);
    if (end) response.end();
  };
}

/** A JSON Web Token, which nobody verifies. */
function jwt(seconds: number): string {
  const part = (value: object) => Buffer.from(JSON.stringify(value)).toString("base64url");
  return `${part({ alg: "none" })}.${part({ exp: Date.now() / 1000 + seconds, mark: seconds })}.x`;
}

const sent = (requests: IncomingMessage[]) => requests.map((r) => r.headers.authorization?.replace("Bearer ", ""));

test("a search is sent again after 503, 429 and a lost connection", async () => {
  await replying([refusal(503), hangUp, refusal(429), caller], {}, async (client, requests) => {
    assert.equal((await client.me()).principal, "ann");
    assert.equal(requests.length, 4);
  });
});

test("a question is sent again only if the service has not begun to work on it", async () => {
  for (const [reply, count] of [[refusal(503), 1], [hangUp, 1], [refusal(429), 2]] as const) {
    await replying([reply, refusal(404)], {}, async (client, requests) => {
      await assert.rejects(client.answer({ question: "q" }));
      assert.equal(requests.length, count);
    });
  }
});

test("a service that asks for too much patience is not waited for", async () => {
  await replying([refusal(429, { "Retry-After": "3600" })], {}, async (client, requests) => {
    await assert.rejects(client.me(), (error: ProblemError) => error.retryAfterSeconds === 3600 && error.kind === "busy");
    assert.equal(requests.length, 1);
  });
});

test("no more requests are under way at once than the service accepts", async () => {
  let now = 0;
  let most = 0;
  const slow: Reply = (request, response) => {
    most = Math.max(most, ++now);
    setTimeout(() => {
      now--;
      caller(request, response);
    }, 20);
  };
  await replying([slow], {}, async (client, requests) => {
    await Promise.all(Array.from({ length: 30 }, () => client.me()));
    assert.equal(requests.length, 30);
    assert.equal(most, 8);
  });
});

test("a server that does not listen is unreachable", async () => {
  let url = "";
  await replying([caller], {}, async (_, __, address) => void (url = address)); // which is closed then
  const client = new Client({ url, attempts: 2 });
  await assert.rejects(client.me(), (error: Unreachable) => /ECONNREFUSED/.test(error.message));
  assert.throws(() => new Client({ url: "127.0.0.1:9" }), /begins with http/);
});

test("a silent service is late, and is not asked again", async () => {
  await replying([() => undefined], { timeoutSeconds: 0.2 }, async (client, requests) => {
    await assert.rejects(client.me(), /did not respond in time/);
    assert.equal(requests.length, 1);
  });
});

test("a refused token is renewed once, by all requests together", async () => {
  const tokens = ["old", "Authorization: Bearer new\n"];
  let read = 0;
  const guarded: Reply = (request, response) =>
    (request.headers.authorization === "Bearer new" ? caller : refusal(401))(request, response);
  await replying([guarded], { token: () => tokens[read++] ?? "none" }, async (client, requests) => {
    await Promise.all([client.me(), client.me(), client.me()]);
    assert.equal(read, 2);
    assert.deepEqual(new Set(sent(requests)), new Set(["old", "new"]));
  });
});

test("a token is renewed before it expires, and a fixed one never", async () => {
  const tokens = [jwt(30), jwt(600), jwt(601)];
  let read = 0;
  await replying([caller], { token: async () => tokens[read++] ?? "" }, async (client, requests) => {
    await client.me();
    await client.me();
    assert.deepEqual(sent(requests), [tokens[1], tokens[1]]);
  });
  await replying([refusal(401)], { token: "fixed" }, async (client, requests) => {
    await assert.rejects(client.me(), ProblemError);
    assert.deepEqual(sent(requests), ["fixed"]);
  });
});

test("a function that fails to return a token is asked again by the next request", async () => {
  let read = 0;
  const token = () => {
    if (read++ === 0) throw new Error("the issuer is down");
    return "t";
  };
  await replying([caller], { token }, async (client) => {
    await assert.rejects(client.me(), /the issuer is down/);
    assert.equal((await client.me()).kind, "token");
  });
});

test("events of a later service are passed over, and a stream without its end throws", async () => {
  const text = ': comment\n\nevent: progress\ndata: {}\n\nevent: delta\ndata: {"text": "a"}\n\n';
  await replying([stream(text)], {}, async (client) => {
    const received: unknown[] = [];
    await assert.rejects(async () => {
      for await (const event of client.streamAnswer({ question: "q" })) received.push(event);
    }, /ended before the answer was complete/);
    assert.deepEqual(received, [{ event: "delta", data: { text: "a" } }]);
  });
});

test("an error in a stream is thrown, and silence as well", async () => {
  const problem = { type: "urn:penstock:problem:too-slow", title: "Request timed out", status: 504, detail: "" };
  await replying([stream(`event: error\ndata: ${JSON.stringify(problem)}\n\n`)], {}, async (client) => {
    await assert.rejects(client.streamAnswer({ question: "q" }).next(), (e: ProblemError) => e.kind === "too-slow");
  });
  await replying([stream(": comment\n\n", false)], { timeoutSeconds: 0.2 }, async (client) => {
    await assert.rejects(client.streamAnswer({ question: "q" }).next(), /silent for too long/);
  });
});

test("leaving a stream closes its connection", async () => {
  let closed: () => void;
  const closing = new Promise<void>((resolve) => (closed = resolve));
  const endless: Reply = (request, response) => {
    request.socket.on("close", () => closed());
    stream('event: delta\ndata: {"text": "a"}\n\n', false)(request, response);
  };
  await replying([endless], {}, async (client) => {
    for await (const event of client.streamAnswer({ question: "q" })) {
      assert.equal(event.event, "delta");
      break;
    }
    await closing;
  });
});

test("what is no query service is named", async () => {
  const page: Reply = (_, response) => response.writeHead(200, { "Content-Type": "text/html" }).end("<p>Sign in</p>");
  const moved: Reply = (_, response) => response.writeHead(302, { Location: "https://login.example" }).end();
  for (const reply of [page, moved]) {
    await replying([reply], {}, async (client) => {
      await assert.rejects(client.me(), InvalidResponse);
      await assert.rejects(client.streamAnswer({ question: "q" }).next(), InvalidResponse);
    });
  }
});

test("no error quotes a token, a header or a login", async () => {
  for (const token of ["secret\nX-Other: 1", "secret\0", "secret€"]) {
    await replying([caller], { token: () => token }, async (client, requests) => {
      await assert.rejects(client.me(), (e) => e instanceof ClientError && !String(e.stack).includes("secret"));
      assert.equal(requests.length, 0);
    });
  }
  for (const options of [{ url: "http://u:secret@a" }, { url: "http://a", headers: { "X-A": "secret\n" } }]) {
    assert.throws(() => new Client(options), (e) => e instanceof TypeError && !String(e.stack).includes("secret"));
  }
});

test("any error of another server is one short line, and any other body is named", async () => {
  const json = { "Content-Type": "application/json" };
  for (const text of ['{"type":1,"errors":5}', "null", '{"type":"x","title":"\\u001b[2J\\n","detail":{}}']) {
    await replying([(_, response) => response.writeHead(500, json).end(text)], {}, async (client) => {
      await assert.rejects(client.me(), (e: ProblemError) => !/\p{C}/u.test(e.message + e.kind) && !e.errors[0]);
    });
    await replying([stream(`event: error\ndata: ${text}\n\n`)], {}, async (client) => {
      await assert.rejects(client.streamAnswer({ question: "q" }).next(), InvalidResponse);
    });
  }
  const bomb = gzipSync(Buffer.alloc(64 * 2 ** 20 + 1), { level: 1 });
  const packed: Reply = (_, response) => response.writeHead(200, { ...json, "Content-Encoding": "gzip" }).end(bomb);
  await replying([packed], {}, async (client) => assert.rejects(client.me(), /larger than/));
  const page: Reply = (_, response) => response.writeHead(200, json).end("secret <p>");
  await replying([page], {}, async (client) => {
    await assert.rejects(client.me(), (e) => e instanceof InvalidResponse && !String(e.stack).includes("secret"));
  });
});

test("the types are those of the description", () => {
  // @ts-expect-error: a misspelt field does not compile.
  const misspelt = (client: Client) => client.search({ querry: "x" });
  assert.ok(misspelt);
  // @ts-expect-error: an order that does not exist does not compile.
  const disordered = (client: Client) => client.search({ query: "x", sort: "best" });
  assert.ok(disordered);
});

test("a search asks for metadata, facets, an order and the next page", async () => {
  const bodies: unknown[] = [];
  const server = createServer((request, response) => {
    let text = "";
    request.on("data", (part) => (text += part)).on("end", () => {
      bodies.push(JSON.parse(text));
      const facet = { type: "keyword", complete: true, values: [{ value: "policy", count: 2 }] };
      const found = { results: [], cursor: "next", facets: { labels: facet } };
      response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify(found));
    });
  });
  await new Promise<void>((listening) => server.listen(0, "127.0.0.1", listening));
  try {
    const client = new Client({ url: `http://127.0.0.1:${(server.address() as AddressInfo).port}` });
    const filters = { metadata: { labels: ["policy"], priority: { gte: 2 } } };
    const first = await client.search({ query: "x", filters, facets: ["labels"], sort: "newest" });
    assert.equal(first.facets["labels"]?.values[0]?.count, 2);
    const cursor: string | null = first.cursor;
    await client.search({ query: "x", filters, sort: "newest", cursor });
    assert.deepEqual(bodies, [
      { query: "x", filters, facets: ["labels"], sort: "newest" },
      { query: "x", filters, sort: "newest", cursor: "next" },
    ]);
  } finally {
    server.closeAllConnections();
    await new Promise((closed) => server.close(closed));
  }
});
