// Which tokens of two answers are not in the other: what is left over of their longest common part.

const MOST = 4_000_000; // pairs to compare; longer answers are compared place by place

/** Indices into `a` and into `b`. */
export function differences(a, b) {
  let start = 0, end = 0;
  const least = Math.min(a.length, b.length);
  while (start < least && a[start] === b[start]) start++;
  while (end < least - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const rows = a.length - start - end, columns = b.length - start - end;
  const pairs = rows * columns > MOST ? [] : common(a, b, start, rows, columns);
  const inA = new Set(pairs.map(([i]) => i)), inB = new Set(pairs.map(([, j]) => j));
  const rest = (size, kept) =>
    Array.from({ length: size }, (_, i) => start + i).filter((i) => !kept.has(i));
  return [rest(rows, inA), rest(columns, inB)];
}

/** Pairs of indices of a longest common subsequence of the middle parts. */
function common(a, b, start, rows, columns) {
  const wide = columns + 1, longest = new Uint16Array((rows + 1) * wide);
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      longest[i * wide + j] = a[start + i] === b[start + j]
        ? longest[(i + 1) * wide + j + 1] + 1
        : Math.max(longest[(i + 1) * wide + j], longest[i * wide + j + 1]);
    }
  }
  const pairs = [];
  for (let i = 0, j = 0; i < rows && j < columns;) {
    if (a[start + i] === b[start + j]) pairs.push([start + i++, start + j++]);
    else if (longest[(i + 1) * wide + j] >= longest[i * wide + j + 1]) i++;
    else j++;
  }
  return pairs;
}

/** In words, for people. */
export function verdict([a, b]) {
  if (!a.length && !b.length) return "Same answer, token for token.";
  const first = Math.min(a[0] ?? Infinity, b[0] ?? Infinity) + 1;
  return `The answers differ from token ${first} on.`;
}
