// Conversations, kept in this browser: `{id, turns: [{text, answers: [{name, text, note}]}]}`.

const NAME = "kvserve.conversations";
const MOST = 30;
const LONGEST = 300_000; // characters of all that is kept

export class Conversations {
  constructor() {
    this.all = read();
    this.current = this.all[0] ?? this.add();
  }

  add() {
    const made = { id: Date.now(), turns: [] };
    this.all = [made, ...this.all.filter(({ turns }) => turns.length)].slice(0, MOST);
    this.current = made;
    return made;
  }

  choose(id) {
    this.current = this.all.find((one) => one.id === id) ?? this.current;
  }

  remove() {
    this.all = this.all.filter((one) => one !== this.current);
    this.save();
    this.current = this.all[0] ?? this.add();
  }

  save() {
    const kept = this.all.filter(({ turns }) => turns.length);
    let text = JSON.stringify(kept);
    while (text.length > LONGEST && kept.length > 1) {
      kept.pop();
      text = JSON.stringify(kept);
    }
    try {
      localStorage.setItem(NAME, text);
    } catch (error) {
      console.info("conversations are not kept:", error.message);
    }
  }
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(NAME) ?? "[]");
  } catch {
    return [];
  }
}

export function title({ turns }) {
  const text = turns[0]?.text.trim() ?? "";
  return text ? (text.length > 40 ? `${text.slice(0, 40)}…` : text) : "New conversation";
}
