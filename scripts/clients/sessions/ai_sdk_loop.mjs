// A tool loop of the Vercel AI SDK: node ai_sdk.mjs responses|chat URL MODEL KEY TASK
import { execSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [kind, url, name, apiKey, prompt] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const model =
  kind === "responses"
    ? createOpenAI({ baseURL, apiKey }).responses(name)
    : createOpenAICompatible({ name: "dflash", baseURL, apiKey, includeUsage: true })(name);

const run = (command) => {
  try {
    return execSync(command, { encoding: "utf8", stdio: "pipe" });
  } catch (error) {
    return `exit code ${error.status}\n${error.stderr}`;
  }
};
const result = streamText({
  model,
  system: "You repair files.",
  prompt,
  tools: {
    read_file: tool({
      description: "Reads a file.",
      inputSchema: z.object({ path: z.string() }),
      execute: ({ path }) => readFileSync(path, "utf8"),
    }),
    edit_file: tool({
      description: "Replaces a text of a file.",
      inputSchema: z.object({ path: z.string(), old: z.string(), new: z.string() }),
      execute: ({ path, old, new: text }) => {
        writeFileSync(path, readFileSync(path, "utf8").replace(old, () => text));
        return { edited: path };
      },
    }),
    run_command: tool({
      description: "Runs a command.",
      inputSchema: z.object({ command: z.string() }),
      execute: ({ command }) => run(command),
    }),
  },
  stopWhen: stepCountIs(20),
  onError: ({ error }) => {
    console.error(error);
    process.exitCode = 1;
  },
});
for await (const text of result.textStream) process.stdout.write(text);
console.log();
