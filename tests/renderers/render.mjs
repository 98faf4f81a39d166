// Reads one answer a line (a JSON string) and prints, for each, what a browser would load, run or link to: a JSON list
// of [renderer, address or element].
import readline from "node:readline";

import { HtmlRenderer, Parser } from "commonmark";
import MarkdownIt from "markdown-it";
import { marked } from "marked";
import { parse } from "parse5";
import { createElement } from "react";
import { renderToStaticMarkup } from "react-dom/server";
import ReactMarkdown from "react-markdown";
import rehypeRaw from "rehype-raw";
import remarkBreaks from "remark-breaks";
import remarkGfm from "remark-gfm";
import remarkMath from "remark-math";

const react = (remarkPlugins, rehypePlugins) => (text) =>
  renderToStaticMarkup(createElement(ReactMarkdown, { remarkPlugins, rehypePlugins }, text));
const linkify = new MarkdownIt({ html: true, linkify: true });
const linkifyWithBreaks = new MarkdownIt({ linkify: true, breaks: true });
const commonmark = [new Parser(), new HtmlRenderer()];

const renderers = {
  "react-markdown": react([], []),
  "react-markdown, GFM": react([remarkGfm], []),
  "react-markdown, GFM and HTML": react([remarkGfm, remarkBreaks], [rehypeRaw]),
  "react-markdown, formulas": react([remarkGfm, remarkMath], [rehypeRaw]),
  marked: (text) => marked.parse(text),
  "marked, breaks": (text) => marked.parse(text, { breaks: true }),
  "markdown-it, linkify": (text) => linkify.render(text),
  "markdown-it, linkify and breaks": (text) => linkifyWithBreaks.render(text),
  commonmark: (text) => commonmark[1].render(commonmark[0].parse(text)),
  "no renderer": (text) => `<p>${text}</p>`,
};

const HARMLESS = new Set(["align", "checked", "class", "dir", "disabled", "id", "start", "title", "type"]);
const ACTIVE = new Set("audio base embed form iframe img link math meta object script style svg video".split(" "));

function* effects(node) {
  if (ACTIVE.has(node.tagName)) yield `<${node.tagName}>`;
  for (const { name, value } of node.attrs ?? []) {
    if (node.tagName === "a" && name === "href") yield value;
    else if (name === "style" && /^text-align:\s*(left|right|center);?$/.test(value)) continue;
    else if (value !== "" && !HARMLESS.has(name)) yield `${node.tagName} ${name}=${value}`;
  }
  if (node.content) yield* effects(node.content);
  for (const child of node.childNodes ?? []) yield* effects(child);
}

console.error = () => {}; // React complains about the attributes of invalid elements
for await (const line of readline.createInterface({ input: process.stdin })) {
  const found = [];
  for (const [name, render] of Object.entries(renderers))
    for (const effect of effects(parse(render(JSON.parse(line))))) found.push([name, effect]);
  console.log(JSON.stringify(found));
}
