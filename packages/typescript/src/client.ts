/**
 * A client of Penstock's query service, for Node and browsers. The types of requests and responses are generated from
 * the service's description (openapi.ts).
 */

import { EventSourceParserStream } from "eventsource-parser/stream";
import createApi, { type Client as Api } from "openapi-fetch";

import type { components, operations, paths } from "./openapi.js";

export type { components, operations, paths } from "./openapi.js";

type Schemas = components["schemas"];
export type SearchRequest = Schemas["SearchRequest"];
export type SearchResponse = Schemas["SearchResponse"];
export type SearchResult = Schemas["SearchResult"];
export type AnswerRequest = Schemas["AnswerRequest"];
export type Turn = Schemas["Turn"];
export type AnswerResponse = Schemas["AnswerResponse"];
export type StandingListResponse = Schemas["StandingListResponse"];
export type StandingResponse = Schemas["StandingResponse"];
export type StandingAnswerResponse = Schemas["StandingAnswerResponse"];
export type DocumentResponse = Schemas["DocumentResponse"];
export type StoryResponse = Schemas["StoryResponse"];
export type FacetsResponse = Schemas["FacetsResponse"];
export type PreviewRequest = Schemas["PreviewRequest"];
export type PreviewResponse = Schemas["PreviewResponse"];
export type FeedbackRequest = Schemas["FeedbackRequest"];
export type CallerResponse = Schemas["CallerResponse"];
export type ReviewResponse = Schemas["ReviewResponse"];
export type ConflictsResponse = Schemas["ConflictsResponse"];
export type ConflictsQuery = NonNullable<operations["conflicting"]["parameters"]["query"]>;
export type PipelineResponse = Schemas["PipelineResponse"];
export type Problem = Schemas["ProblemResponse"];
/** An event of a streamed answer. An error is thrown instead. */
export type AnswerEvent = Exclude<Schemas["AnswerEvent"], { event: "error" }>;

/**
 * A token or API key, or a function that returns one. The function is called again a minute before the token expires
 * (its claim `exp`), and after a response with 401. A header line, as `penstock up` writes it, is a token as well.
 */
export type Token = string | (() => string | Promise<string>);

export interface Options {
  /** The address of the service, such as `https://search.example.org`. */
  url: string;
  token?: Token;
  /** How often a request is sent if the service does not respond, or responds with 429 or 503. Default: 4. */
  attempts?: number;
  /** If the service asks for a longer wait, the error is thrown at once. Default: 60. */
  longestWaitSeconds?: number;
  /** The longest time for a response; for a streamed answer, the longest silence. Default: 60. */
  timeoutSeconds?: number;
  /** How many requests are under way at once; the service refuses more than 8 of one caller by default. Default: 8. */
  connections?: number;
  /** Further headers of each request. */
  headers?: Record<string, string>;
}

/** A request that has no usable response. */
export class ClientError extends Error {
  override name = "ClientError";
}

/** The service did not respond, or only with a part of a response. */
export class Unreachable extends ClientError {
  override name = "Unreachable";
}

/** The response is not Penstock's; usually that of a proxy. */
export class InvalidResponse extends ClientError {
  override name = "InvalidResponse";
}

/** The service responded with an error (RFC 9457). docs/http.md lists the kinds. */
export class ProblemError extends ClientError {
  override name = "ProblemError";
  readonly status: number;
  readonly type: string;
  readonly title: string;
  readonly detail: string;
  readonly errors: Schemas["FieldError"][];
  /** As in the audit trail. */
  readonly requestId: string | null;
  readonly retryAfterSeconds: number | null;

  constructor(problem: Partial<Problem>, status: number, headers: Headers) {
    const title = line(problem.title) || `HTTP status ${status}`;
    const detail = problem.type === undefined ? NOT_OURS : line(problem.detail);
    const requestId = headers.get("request-id");
    super(`${status} ${title}${detail && `: ${detail}`}${requestId === null ? "" : ` (request ${requestId})`}`);
    this.status = status;
    this.type = line(problem.type) || "about:blank";
    this.title = title;
    this.detail = detail;
    this.errors = Array.isArray(problem.errors) ? problem.errors : [];
    this.requestId = requestId;
    this.retryAfterSeconds = retryAfterSeconds(headers.get("retry-after"));
  }

  /** The last part of Penstock's type, such as `rate-limited`; empty for other types. */
  get kind(): string {
    const prefix = "urn:penstock:problem:";
    return this.type.startsWith(prefix) ? this.type.slice(prefix.length) : "";
  }
}

/**
 * The query service. All methods reject with ProblemError (the service responded with an error), Unreachable (it did
 * not respond) and InvalidResponse (the response is not Penstock's).
 */
export class Client {
  readonly #api: Api<paths>;
  readonly #transport: Transport;

  /** Throws TypeError if the address is not one of HTTP. Connects at the first request. */
  constructor(options: Options) {
    if (!/^https?:\/\/[^/]/.test(options.url)) {
      throw new TypeError("the address of the service begins with http:// or https://, such as https://search.example");
    }
    if (/^[^/]*\/\/[^/?#]*@/.test(options.url)) throw new TypeError("the address of the service has no user");
    for (const [name, value] of Object.entries(options.headers ?? {})) {
      if (!SENDABLE.test(value)) throw new TypeError(`the header ${JSON.stringify(name)} cannot be sent`);
    }
    this.#transport = new Transport(options);
    this.#api = createApi<paths>({
      baseUrl: options.url,
      headers: options.headers ?? {},
      fetch: (request) => this.#transport.send(request),
    });
  }

  /** The most relevant passages that the caller may read, the best first. */
  async search(body: SearchRequest): Promise<SearchResponse> {
    return data(await this.#api.POST("/v1/search", { body }));
  }

  /** An answer from passages that the caller may read, with a citation for each claim. */
  async answer(body: Omit<AnswerRequest, "stream">): Promise<AnswerResponse> {
    return data(await this.#api.POST("/v1/answers", { body })) as AnswerResponse;
  }

  /**
   * An answer while it is written: `sources`, then `delta` and `citation`, and at last `done` with the whole answer,
   * which alone was checked. Leaving the loop closes the connection, which stops the model.
   */
  async *streamAnswer(body: Omit<AnswerRequest, "stream">): AsyncGenerator<AnswerEvent, void, undefined> {
    const leaving = new AbortController();
    const { response } = await this.#api.POST("/v1/answers", {
      body: { ...body, stream: true },
      headers: { Accept: EVENT_STREAM },
      parseAs: "stream",
      signal: leaving.signal,
    });
    if (!response.body || !response.headers.get("content-type")?.startsWith(EVENT_STREAM)) {
      leaving.abort();
      throw new InvalidResponse("the service did not respond with a stream of events");
    }
    const bytes = this.#transport.watched(response.body, leaving);
    const events = bytes.pipeThrough(decoder()).pipeThrough(new EventSourceParserStream()).getReader();
    try {
      for (;;) {
        const { done, value } = await events.read().catch(fail);
        if (done) throw new Unreachable("the stream ended before the answer was complete");
        if (value.event === "error") {
          const problem = problemIn(value.data);
          if (typeof problem.status !== "number") throw new InvalidResponse("the error of the stream has no status");
          throw new ProblemError(problem, problem.status, response.headers);
        }
        if (value.event === undefined || !KNOWN_EVENTS.has(value.event)) continue; // of a later service
        const event = { event: value.event, data: parsed(value.data) } as AnswerEvent;
        yield event;
        if (event.event === "done") return;
      }
    } finally {
      leaving.abort();
    }
  }

  /** A document with its whole text. Status 404: it does not exist, or the caller may not read it. */
  async document(documentId: string): Promise<DocumentResponse> {
    return data(await this.#api.GET("/v1/documents/{document_id}", of({ document_id: documentId })));
  }

  /** The processing history of a document, and whether it can be found. */
  async story(documentId: string): Promise<StoryResponse> {
    return data(await this.#api.GET("/v1/documents/{document_id}/why", of({ document_id: documentId })));
  }

  /** Values for filters, from the documents that the caller may read. */
  async facets(): Promise<FacetsResponse> {
    return data(await this.#api.GET("/v1/facets"));
  }

  /** The answers that a proposed edit of a source would change. It takes up to two minutes. */
  async preview(body: PreviewRequest): Promise<PreviewResponse> {
    return data(await this.#api.POST("/v1/previews", { body }));
  }

  /** Passages that contradict or repeat each other, the newest first: those of which the caller may read both. */
  async conflicts(query: ConflictsQuery = {}): Promise<ConflictsResponse> {
    return data(await this.#api.GET("/v1/conflicts", { params: { query } }));
  }

  /** Dismiss or accept a conflict, or open it again, for everybody. */
  async decideConflict(conflictId: string, decision: "dismissed" | "accepted" | "open"): Promise<void> {
    await this.#api.POST("/v1/conflicts/{conflict_id}", { ...of({ conflict_id: conflictId }), body: { decision } });
  }

  /** The authenticated caller. */
  async me(): Promise<CallerResponse> {
    return data(await this.#api.GET("/v1/me"));
  }

  /** The caller's standing questions, the newest first, each with what has changed since its answer. */
  async standing(): Promise<StandingListResponse> {
    return data(await this.#api.GET("/v1/standing"));
  }

  /** A standing question with its stored answer, without the sentences that the caller may no longer see. */
  async standingQuestion(questionId: string): Promise<StandingResponse> {
    return data(await this.#api.GET("/v1/standing/{question_id}", of({ question_id: questionId })));
  }

  /** Ask a standing question again. The answer replaces the stored one; `difference` compares them. */
  async askStanding(questionId: string): Promise<StandingAnswerResponse> {
    const path = of({ question_id: questionId });
    return data(await this.#api.POST("/v1/standing/{question_id}/answer", path)) as StandingAnswerResponse;
  }

  /** Remove a standing question. */
  async removeStanding(questionId: string): Promise<void> {
    await this.#api.DELETE("/v1/standing/{question_id}", of({ question_id: questionId }));
  }

  /** Rate an answer (`answer_id`), or a passage (`chunk_id`) with its `query`. A later verdict replaces an earlier one. */
  async feedback(body: FeedbackRequest): Promise<void> {
    await this.#api.POST("/v1/feedback", { body });
  }

  /** For operators: answers that a person should review, the newest first. */
  async review(query: { limit?: number; before?: string } = {}): Promise<ReviewResponse> {
    return data(await this.#api.GET("/v1/review", { params: { query } }));
  }

  /** For operators: remove a reviewed answer from the queue. */
  async resolve(answerId: string, verdict: "right" | "wrong"): Promise<void> {
    await this.#api.POST("/v1/review/{answer_id}", { ...of({ answer_id: answerId }), body: { verdict } });
  }

  /** For operators: the state of the pipeline, for all tenants. */
  async pipeline(): Promise<PipelineResponse> {
    return data(await this.#api.GET("/v1/pipeline"));
  }
}

const NOT_OURS = "this is not a response of Penstock: check the address of the service, and the proxy before it";
const EVENT_STREAM = "text/event-stream";
const KNOWN_EVENTS: ReadonlySet<string> = new Set<AnswerEvent["event"]>(["sources", "delta", "citation", "done"]);
/** The first wait before sending again is at most this long; each further one may be twice as long. */
const BASE_SECONDS = 0.5;
const RENEW_BEFORE_SECONDS = 60;
const HEADER = "Authorization: Bearer ";
/** The values that a header can have. Node quotes any other in its error. */
const SENDABLE = /^(?:[!-~](?:[ \t!-~]*[!-~])?)?$/;
/** The largest response, when it is decompressed. */
const MAX_RESPONSE_BYTES = 64 * 2 ** 20;
/** Node's codes of errors before a request is sent. */
const NEVER_SENT = new Set(["ECONNREFUSED", "ENOTFOUND", "EAI_AGAIN", "UND_ERR_CONNECT_TIMEOUT"]);

/** Sends requests: authentication, time limits, errors and retries. */
class Transport {
  readonly #options: Options;
  readonly #attempts: number;
  readonly #longestWaitSeconds: number;
  readonly #timeoutMilliseconds: number;
  readonly #waiting: (() => void)[] = [];
  #free: number;
  #token: Promise<string | undefined> | undefined; // of all requests

  constructor(options: Options) {
    this.#options = options;
    this.#attempts = options.attempts ?? 4;
    this.#longestWaitSeconds = options.longestWaitSeconds ?? 60;
    this.#timeoutMilliseconds = (options.timeoutSeconds ?? 60) * 1000;
    this.#free = options.connections ?? 8;
  }

  /** A successful response. What is not idempotent is sent again only if the service has not begun to work on it. */
  async send(request: Request): Promise<Response> {
    for (let attempt = 0; ; attempt++) {
      try {
        return await this.#inTurn(() => this.#once(request));
      } catch (error) {
        const asked = error instanceof ProblemError ? (error.retryAfterSeconds ?? 0) : 0;
        const isLast = attempt + 1 >= this.#attempts || asked > this.#longestWaitSeconds;
        if (isLast || !mayRepeat(error, isIdempotent(request))) throw error;
        const grown = Math.min(this.#longestWaitSeconds, BASE_SECONDS * 2 ** attempt);
        const seconds = asked > 0 ? asked + Math.random() * BASE_SECONDS : Math.random() * grown;
        await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
      }
    }
  }

  /** The bytes of a stream, which is aborted when nothing arrives for the time limit. */
  watched(body: ReadableStream<Uint8Array>, controller: AbortController): ReadableStream<Uint8Array> {
    const late = () => controller.abort(new Unreachable("the service was silent for too long"));
    let timer = setTimeout(late, this.#timeoutMilliseconds);
    controller.signal.addEventListener("abort", () => clearTimeout(timer));
    return body.pipeThrough(
      new TransformStream<Uint8Array, Uint8Array>({
        transform: (chunk, stream) => {
          clearTimeout(timer);
          timer = setTimeout(late, this.#timeoutMilliseconds);
          stream.enqueue(chunk);
        },
        flush: () => clearTimeout(timer),
      }),
    );
  }

  async #inTurn<T>(work: () => Promise<T>): Promise<T> {
    if (this.#free > 0) this.#free--;
    else await new Promise<void>((turn) => this.#waiting.push(turn));
    try {
      return await work();
    } finally {
      const next = this.#waiting.shift();
      if (next) next();
      else this.#free++;
    }
  }

  async #once(request: Request): Promise<Response> {
    let held = (this.#token ??= this.#read());
    if (isExpiring(await held)) held = this.#renew(held);
    const token = await held;
    let response = await this.#fetch(request, token);
    if (response.status === 401) {
      const renewed = await this.#renew(held);
      if (renewed !== token) response = await this.#fetch(request, renewed);
    }
    if (response.ok) return response;
    if (response.status < 400) throw new InvalidResponse(`the service responded with status ${response.status}`);
    throw new ProblemError(problemIn(await response.text()), response.status, response.headers);
  }

  async #fetch(request: Request, token: string | undefined): Promise<Response> {
    const headers = new Headers(request.headers);
    if (token !== undefined) {
      if (!/^[!-~]*$/.test(token)) throw new ClientError("the token holds a space, a line end or a letter beyond ASCII");
      headers.set("Authorization", `Bearer ${token}`);
    }
    const limit = new AbortController();
    const late = new Unreachable("the service did not respond in time");
    const timer = setTimeout(() => limit.abort(late), this.#timeoutMilliseconds);
    try {
      const signal = AbortSignal.any([request.signal, limit.signal]);
      const response = await fetch(request.clone(), { headers, signal, redirect: "manual" });
      const { status, headers: received } = response;
      if (response.ok && received.get("content-type")?.startsWith(EVENT_STREAM)) return response;
      // Read within the time limit, so that the caller never waits for a body.
      const body = await bytesOf(response);
      if (status < 200 || status > 599) throw new InvalidResponse("the service responded with a redirection");
      if (response.ok && status !== 204 && !received.get("content-type")?.startsWith("application/json")) {
        throw new InvalidResponse("this is not the response of a Penstock service");
      }
      if (response.ok && body.size > 0) parsed(await body.text());
      return new Response(body.size > 0 ? body : null, { status, headers: received });
    } catch (error) {
      return fail(error);
    } finally {
      clearTimeout(timer);
    }
  }

  /** A newer token than a refused one. Requests that run at the same time renew it together. */
  #renew(refused: Promise<string | undefined>): Promise<string | undefined> {
    if (this.#token === refused || this.#token === undefined) this.#token = this.#read();
    return this.#token;
  }

  #read(): Promise<string | undefined> {
    const source = this.#options.token;
    const reading = Promise.resolve()
      .then(() => (typeof source === "function" ? source() : source))
      .then(bare);
    reading.catch(() => (this.#token = undefined)); // the next request tries again
    return reading;
  }
}

function data<T>(result: { data?: T }): T {
  if (result.data === undefined) throw new InvalidResponse("the response of the service has no content");
  return result.data;
}

function of<T>(path: T): { params: { path: T } } {
  return { params: { path } };
}

function isIdempotent(request: Request): boolean {
  const { pathname } = new URL(request.url);
  return request.method === "GET" || pathname.endsWith("/v1/search") || pathname.endsWith("/v1/feedback");
}

function mayRepeat(error: unknown, isIdempotent: boolean): boolean {
  if (error instanceof ProblemError) return error.status === 429 || (isIdempotent && error.status === 503);
  if (!(error instanceof Unreachable) || error.cause === undefined) return false; // late: its time is used up
  const cause = error.cause instanceof Error ? (error.cause.cause as { code?: string } | undefined) : undefined;
  return isIdempotent || NEVER_SENT.has(cause?.code ?? "");
}

function fail(error: unknown): never {
  if (error instanceof ClientError) throw error;
  if (error instanceof Error && error.name === "AbortError") throw error; // the caller's own
  const reason = error instanceof Error && error.cause instanceof Error ? error.cause : error;
  throw new Unreachable(`no complete response from the service: ${String(reason)}`, { cause: error });
}

/** Rejects with InvalidResponse if there are too many. */
async function bytesOf(response: Response): Promise<Blob> {
  const parts: BlobPart[] = [];
  const reader = response.body?.getReader();
  for (let size = 0; reader; ) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.byteLength;
    if (size > MAX_RESPONSE_BYTES) {
      await reader.cancel();
      throw new InvalidResponse(`the response is larger than ${MAX_RESPONSE_BYTES} bytes`);
    }
    parts.push(value);
  }
  return new Blob(parts);
}

/** A value of another server as one line without control characters. */
function line(value: unknown): string {
  return typeof value === "string" ? value.slice(0, 2000).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, " ") : "";
}

function problemIn(body: string): Partial<Problem> {
  try {
    const read: unknown = JSON.parse(body);
    return typeof read === "object" && read !== null && "type" in read ? (read as Partial<Problem>) : {};
  } catch {
    return {};
  }
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    throw new InvalidResponse("the response of the service is not JSON"); // the cause would quote it
  }
}

function decoder(): ReadableWritablePair<string, Uint8Array> {
  return new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>; // whose types accept more kinds of bytes
}

function bare(token: string | undefined): string | undefined {
  const trimmed = token?.trim();
  return trimmed?.startsWith(HEADER) ? trimmed.slice(HEADER.length) : trimmed;
}

function isExpiring(token: string | undefined): boolean {
  const expires = token === undefined ? null : expiry(token);
  return expires !== null && expires - RENEW_BEFORE_SECONDS <= Date.now() / 1000;
}

/** The time in the claim `exp` in seconds since 1970, not verified; null: there is none. */
function expiry(token: string): number | null {
  try {
    const claims: unknown = JSON.parse(atob((token.split(".")[1] ?? "").replaceAll("-", "+").replaceAll("_", "/")));
    const { exp } = claims as { exp?: unknown };
    return typeof exp === "number" ? exp : null;
  } catch {
    return null;
  }
}

function retryAfterSeconds(value: string | null): number | null {
  if (value === null) return null;
  const seconds = Number(value);
  if (Number.isFinite(seconds)) return Math.max(0, seconds);
  const time = Date.parse(value);
  return Number.isNaN(time) ? null : Math.max(0, (time - Date.now()) / 1000);
}
