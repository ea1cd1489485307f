// A server's stream in place of fetch: `mock.text` in steps of `mock.step` characters, of which the last five of each
// step are the target's own. `mock.bodies` has what was asked.
const realFetch = window.fetch;
window.mock = { text: "", step: 24, delay: 1, bodies: [], reasoning: "", fails: "" };
window.fetch = async (url, options) => {
  if (String(url).includes("model_info") && window.mock.readsMedia) return Response.json({ has_image_understanding: true });
  if (!String(url).includes("chat/completions")) return realFetch(url, options);
  const { text, step, reasoning, fails } = window.mock, encoder = new TextEncoder();
  window.mock.bodies.push(JSON.parse(options.body));
  if (fails) return new Response(JSON.stringify({ error: { message: fails } }), { status: 400 });
  let at = 0, tokens = 0, isFirst = true;
  const send = (controller, value) => controller.enqueue(encoder.encode(`data: ${JSON.stringify(value)}\n\n`));
  return new Response(new ReadableStream({
    async pull(controller) {
      await new Promise((resolve) => setTimeout(resolve, window.mock.delay));
      if (options.signal.aborted) return controller.error(new DOMException("", "AbortError"));
      const part = text.slice(at, at + step), delta = { content: part }, thought = isFirst ? reasoning : "";
      if (thought) delta.reasoning_content = thought;
      if (isFirst) controller.enqueue(encoder.encode(": keep-alive\n\n"));
      isFirst = false;
      at += step;
      tokens += 5;
      const choice = { index: 0, delta, finish_reason: at >= text.length ? "stop" : null,
        drafts: [[thought && `<think>\n${thought}\n</think>\n\n`, true], [part.slice(0, -5), true], [part.slice(-5), false]] };
      if (window.mock.bodies.at(-1).return_proposals) {
        const proposed = window.mock.proposed ?? [" one", " two", "\n"];
        choice.proposals = [{ proposed, accepted: Math.min(1, proposed.length), token: " own" }];
      }
      send(controller, { choices: [choice],
        usage: { completion_tokens: tokens, completion_tokens_details: { accepted_prediction_tokens: 0.6 * tokens, draft_rounds: tokens / 5 } },
        timings: { decode_s: 1, tokens_per_s: 120, speedup: window.mock.speedup ?? null } });
      if (at < text.length) return;
      controller.enqueue(encoder.encode("data: [DONE]\n\n"));
      controller.close();
    },
  }));
};
