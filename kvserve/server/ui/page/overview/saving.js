// What compression saves: one sentence, one figure, two bars.

import { $, bytes, count, fill, say } from "../shared/dom.js";

const whole = (share) => `${Math.round(100 * share)} %`;

/** Tokens and bytes of those who run, as they are and as they would be without compression. */
export function running(event, tokenBytes) {
  const held = event.requests.reduce((sum, request) => sum + request.held_bytes, 0);
  return {
    read: event.tokens_logical, kept: event.tokens_held,
    without: event.tokens_logical * tokenBytes, with: held,
  };
}

/** The same of all tokens since the start; of their query logs nothing is known any more. */
export function sinceStart(event, tokenBytes) {
  const read = event.prompt_tokens_total + event.generation_tokens_total;
  const kept = Math.max(0, read - event.tokens_evicted_total);
  return { read, kept, without: read * tokenBytes, with: kept * tokenBytes };
}

export class Saving {
  show(event, { tokenBytes, policy }) {
    const busy = event.num_running > 0;
    const sums = busy ? running(event, tokenBytes) : sinceStart(event, tokenBytes);
    say($("sentence"), sentence(event, sums, busy));
    const share = sums.without ? 1 - sums.with / sums.without : 0;
    say($("share"), sums.read ? whole(Math.abs(share)) : "–");
    say($("share-of"), share < -0.005 ? "more memory, for the query log" : "less memory");
    const most = Math.max(sums.without, sums.with, 1);
    fill($("without-bar"), sums.without / most);
    fill($("with-bar"), sums.with / most);
    say($("without"), `${count(sums.read)} tokens, ${bytes(sums.without)}`);
    say($("with"), `${count(sums.kept)} tokens, ${bytes(sums.with)}`);
    say($("with-name"), `With ${policy === "none" ? "compression" : policy}`);
  }
}

function sentence(event, { read, kept }, busy) {
  if (busy) {
    const one = event.num_running === 1 ? "One request runs" : `${event.num_running} requests run`;
    return `${one}, remembering ${count(read)} tokens in the space of ${count(kept)}.`;
  }
  if (!read) return "Nothing has run yet. Press Try it, and see a cache shrink.";
  return `Nothing runs now. Of ${count(read)} tokens read so far, ` +
    `${count(read - kept)} were dropped.`;
}
