/**
 * Search and ask with the TypeScript client: `node ask.js URL TOKEN_FILE QUESTION`.
 *
 * docs/clients.md says how to install the package. Node 22.18 and later run this file as it is (`node ask.ts …`).
 */

import { readFile } from "node:fs/promises";

import { Client, ProblemError } from "penstock-client";

const [url = "", tokenFile = "", question = ""] = process.argv.slice(2);

// The file is read again when its token is refused. A function that asks your identity provider works as well.
const client = new Client({ url, token: () => readFile(tokenFile, "utf8") });

const { results } = await client.search({ query: question, top: 3 });
for (const result of results) console.log(`${result.score.toFixed(3)}  ${result.title} (${result.source_url})`);

for await (const event of client.streamAnswer({ question })) {
  switch (event.event) {
    case "delta": // a piece, as the model writes it
      process.stdout.write(event.data.text);
      break;
    case "done": // the last event: the same answer, with its citations checked
      console.log();
      for (const citation of event.data.citations) console.log(`[${citation.n}] ${citation.title}, ${citation.source_url}`);
      await client.feedback({ answer_id: event.data.answer_id, verdict: "up" });
  }
}

try {
  await client.document("00000000-0000-0000-0000-000000000000");
} catch (error) {
  if (!(error instanceof ProblemError)) throw error;
  console.log(`${error.kind}: ${error.detail}`); // docs/http.md explains each kind
}
