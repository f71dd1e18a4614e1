#!/bin/sh
# @ai-sdk/openai 3.0.141 with ai 6.0.326 (the Vercel AI SDK): the second request of a tool loop, by its default API, /v1/responses
# Guess: the history is in it as it was received: the text, the call, and the tool's result
# Seen: the call and the result are; the text before the call is only named (item_reference), so a server that stores nothing does not have it. With providerOptions.openai.store = false it is sent
# Source: convertToOpenAIResponsesInput in dist/index.mjs of that version: store is true unless it is set
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
echo '{"private": true, "type": "module"}' > package.json
npm install --silent --no-audit --no-fund ai@6.0.326 @ai-sdk/openai@3.0.141 zod@4.6.7
cat > seen.js <<'JAVASCRIPT'
import { readFileSync } from 'node:fs';
import { generateText, stepCountIs, tool } from 'ai';
import { createOpenAI } from '@ai-sdk/openai';
import { z } from 'zod';

const usage = { input_tokens: 1, output_tokens: 1 };
const said = (id, text) => ({
  type: 'message', id, role: 'assistant', status: 'completed',
  content: [{ type: 'output_text', text, annotations: [] }],
});
const call = {
  type: 'function_call', id: 'fc_1', call_id: 'call_1', status: 'completed',
  name: 'weather', arguments: '{"city": "Bern"}',
};

async function secondInput(options) {
  const requests = [];
  const openai = createOpenAI({
    apiKey: 'none',
    fetch: async (url, init) => {
      requests.push(JSON.parse(init.body));
      const output = requests.length === 1 ? [said('msg_1', 'I look.'), call] : [said('msg_2', 'Rain.')];
      const body = { id: 'resp_1', object: 'response', created_at: 1, model: 'm', status: 'completed', output, usage };
      return new Response(JSON.stringify(body), { headers: { 'content-type': 'application/json' } });
    },
  });
  const weather = tool({ inputSchema: z.object({ city: z.string() }), execute: async () => 'rain' });
  await generateText({
    model: openai('m'), tools: { weather }, prompt: 'Weather?', stopWhen: stepCountIs(2), ...options,
  });
  return requests[1].input.map((item) => item.type ?? item.role);
}

const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
const seen = [await secondInput({}), await secondInput({ providerOptions: { openai: { store: false } } })];
console.log('ai', version('ai'), '@ai-sdk/openai', version('@ai-sdk/openai'));
console.log('by default:', seen[0].join(', '));
console.log('store false:', seen[1].join(', '));
const rest = ['function_call', 'function_call_output'];
const wanted = [['user', 'item_reference', ...rest], ['user', 'assistant', ...rest]];
process.exit(JSON.stringify(seen) === JSON.stringify(wanted) ? 0 : 1);
JAVASCRIPT
node seen.js
