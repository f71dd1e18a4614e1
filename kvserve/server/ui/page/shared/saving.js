// How much less is held than the full cache would take: a figure, and what it is of.

/** `compacted`: whether all that is counted has been; `keepsAll`: whether the policy drops nothing. */
export function saving({ all, held, log, compacted, keepsAll }) {
  const percent = Math.round(100 * (1 - held / (all || 1)));
  if (percent > 0) return [`${percent} %`, "less memory"];
  if (keepsAll) return ["0 %", "less: policy none keeps everything"];
  if (!compacted) return ["…", "not yet compressed"];
  // Without a log, more than the full cache is only the block that a request is about to fill.
  return percent && log ? [`${-percent} %`, "more memory, for the query log"] : ["0 %", "less memory"];
}
