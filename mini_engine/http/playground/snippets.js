// A question as a program: its request, with files by their names instead of their contents.

import { key } from "./api.js";
import { mediaType } from "./media.js";

const TOKENS = /"(?:[^"\\]|\\.)*"|\b(?:true|false|null)\b/g; // of JSON: strings and constants
const MARK = `file ${Math.random()} `; // in no text that a person or a model has written before

/** Stands for the `data:` URL of a file in a request that `curl` or `python` gets. */
export const placeholder = (item) => MARK + item.name + MARK + mediaType(item);

/** The text of a request as JSON, with `file(name, type)` for the placeholders and `other` for other tokens. */
function write(body, file, other) {
  return JSON.stringify(body, null, 2).replace(TOKENS, (token) => {
    return token.startsWith(`"${MARK}`) ? file(...JSON.parse(token).split(MARK).slice(1)) : other(token);
  });
}

/** A shell command. */
export function curl(body) {
  const escaped = (text) => text.replace(/[\\$`]/g, "\\$&");
  const quoted = (name) => `'${name.replaceAll("'", "'\\''")}'`;
  const file = (name, type) => `"data:${escaped(type)};base64,$(base64 < ${quoted(name)} | tr -d '\\n')"`;
  const text = write(body, file, escaped);
  const access = key ? ' -H "Authorization: Bearer $API_KEY"' : "";
  const url = new URL("v1/chat/completions", location.href);
  return `curl '${url}' -H 'Content-Type: application/json'${access} -d @- <<END\n${text}\nEND\n`;
}

/** A program with OpenAI's client. */
export function python({ model, messages, ...fields }) {
  const constants = { true: "True", false: "False", null: "None" };
  const file = (name, type) => `data_url(${JSON.stringify(name)}, ${JSON.stringify(type)})`;
  const literal = (value) => write(value, file, (token) => constants[token] ?? token);
  return `import base64
import os
from pathlib import Path

from openai import OpenAI


def data_url(path, media_type):
    return f"data:{media_type};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"


client = OpenAI(base_url="${new URL("v1", location.href)}", api_key=os.environ.get("API_KEY", "none"))
messages = ${literal(messages)}
fields = ${literal(fields)}
answer = client.chat.completions.create(model=${literal(model ?? null)}, messages=messages, extra_body=fields)
print(answer.choices[0].message.content)
`;
}
