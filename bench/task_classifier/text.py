"""Random filler for the prompts: prose, passages, transcripts, shots, code, and questions.

The same prose fills all kinds. It mentions reports, meetings, questions and so on at random, so
that single words of a context say nothing about the task.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import yaml

WORDS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text())
NAMES, PLACES, NOUNS, VERBS = (WORDS[kind] for kind in ("names", "places", "nouns", "verbs"))
ADJECTIVES, LINKS = WORDS["adjectives"], WORDS["links"]

Text = Callable[[random.Random, int], str]


def name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.5 else f"{rng.choice(NAMES)} {rng.choice(NAMES)}"


def pseudo_word(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS["syllables"], k=rng.randint(2, 4)))


def noun(rng: random.Random) -> str:
    return rng.choice(NOUNS) if rng.random() < 0.8 else pseudo_word(rng)


def noun_phrase(rng: random.Random) -> str:
    pick = rng.random()
    if pick < 0.2:
        return name(rng)
    article = rng.choice(("the", "a", "this", "its", "their", "his", "her", "every", "one", "the"))
    middle = f" {rng.choice(ADJECTIVES)}" if pick < 0.6 else ""
    of = f" of {rng.choice(('the', 'a'))} {noun(rng)}" if pick > 0.85 else ""
    return f"{article}{middle} {noun(rng)}{of}"


def clause(rng: random.Random) -> str:
    verb = rng.choice(VERBS) if rng.random() < 0.85 else f"{rng.choice(('was', 'is', 'had'))} not"
    tail = rng.choice((
        "", f"in {rng.choice(PLACES)}", f"with {noun_phrase(rng)}", rng.choice(WORDS["adverbs"]),
        f"for {noun_phrase(rng)}", f"in {rng.randint(1700, 2030)}", f"by {name(rng)}",
        f"from {rng.choice(PLACES)} to {rng.choice(PLACES)}", f"at {rng.randint(2, 99)} percent",
    ))  # fmt: skip
    return f"{noun_phrase(rng)} {verb} {noun_phrase(rng)} {tail}".strip()


def sentence(rng: random.Random) -> str:
    text = clause(rng)
    if rng.random() < 0.3:
        opener = rng.choice(WORDS["openers"])
        opener = opener.replace("{year}", str(rng.randint(1700, 2030))).replace("{name}", name(rng))
        text = f"{opener.format(day=rng.choice(WORDS['days']), place=rng.choice(PLACES))} {text}"
    while rng.random() < 0.35:
        text += f"{rng.choice((',', ''))} {rng.choice(LINKS)} {clause(rng)}"
    if rng.random() < 0.05:
        return f"Who {rng.choice(VERBS)} {noun_phrase(rng)}, and how many?"
    return text[0].upper() + text[1:] + "."


def gibberish(rng: random.Random, words: int) -> str:
    """Text in no language."""
    return " ".join(pseudo_word(rng) for _ in range(words)).capitalize() + "."


def prose(rng: random.Random, words: int) -> str:
    """Paragraphs of sentences, or now and then gibberish."""
    if rng.random() < 0.08:
        return gibberish(rng, words)
    parts: list[str] = []
    count = 0
    while count < words:
        parts.append(sentence(rng))
        count += len(parts[-1].split())
    return "".join(part + rng.choice((" ", " ", " ", "\n\n")) for part in parts).strip()


def story(rng: random.Random, words: int) -> str:
    speech = [f'"{sentence(rng)}" said {name(rng)}.' for _ in range(words // 60)]
    parts = [*speech, *(prose(rng, 40) for _ in range(words // 50 + 1))]
    rng.shuffle(parts)
    head = rng.choice(("", f"CHAPTER {rng.randint(1, 40)}\n", f"INT. {noun(rng).upper()} - DAY\n"))
    return head + rng.choice((" ", "\n")).join(parts)


def sections(titles: tuple[str, ...], rng: random.Random, words: int) -> str:
    """Prose under headings."""
    chosen = titles[: max(1, min(len(titles), words // 40))]
    style = rng.choice(("{}\n", "# {}\n", "{}. ", "## {}\n"))
    return "\n\n".join(style.format(title) + prose(rng, words // len(chosen)) for title in chosen)


def paper(rng: random.Random, words: int) -> str:
    titles = ("Abstract", "Introduction", "Related Work", "Method", "Experiments", "Conclusion")
    return sections(titles, rng, words)


def report(rng: random.Random, words: int) -> str:
    titles = ("Background", "Scope and Methodology", "Findings", "Recommendations", "Appendix")
    return sections(titles, rng, words)


def document(rng: random.Random, words: int) -> str:
    return rng.choice((prose, paper, report, story))(rng, words)


def listed(marks: tuple[str, ...], rng: random.Random, words: int) -> str:
    """Texts one after the other, each under a numbered mark."""
    mark, size = rng.choice(marks), rng.choice((30, 60, 120))
    titled = rng.random() < 0.5
    texts = [
        mark.format(at + 1)
        + (f"{noun(rng).title()} {noun(rng)}\n" if titled else "")
        + prose(rng, size)
        for at in range(max(2, words // size))
    ]
    return rng.choice(("\n", "\n\n")).join(texts)


MARKS = (
    "Passage {}:\n",
    "Document {}: ",
    "[{}] ",
    "({}) ",
    "Paragraph {}: ",
    "Article {}\n",
    "{}. ",
)


def passages(rng: random.Random, words: int) -> str:
    return listed(MARKS, rng, words)


def paragraphs(rng: random.Random, words: int) -> str:
    return listed((*MARKS, "Paragraph {}: ", "Paragraph {}: "), rng, words)


def news(rng: random.Random, words: int) -> str:
    if rng.random() < 0.6:
        return listed((*MARKS, "News {}:\n", "Source {}: "), rng, words)
    texts = (f"{rng.choice(PLACES).upper()} - {prose(rng, 80)}" for _ in range(words // 80 + 1))
    return rng.choice(("\n\n", "\n|||||\n", "\n---\n")).join(texts)


def transcript(rng: random.Random, words: int) -> str:
    speakers = [rng.choice((name(rng), "Speaker A", "PM", "Chair")) for _ in range(4)]
    small = ("Okay.", "Yeah.", "Um, right.", "Mm-hmm.", "So, uh,", "Thank you.", "")
    return "\n".join(
        f"{rng.choice(speakers)}: {rng.choice(small)} {prose(rng, 20)}"
        for _ in range(words // 20 + 1)
    )


def chat(rng: random.Random) -> str:
    one, other = rng.choice(NAMES), rng.choice(NAMES)
    small = ("hey", "hi, how are you?", "lol", "ok, see you", "sure", "thanks!", "what about you?")
    return "\n".join(
        f"{speaker}: {rng.choice(small) if rng.random() < 0.5 else clause(rng)}"
        for speaker in [one, other] * rng.randint(1, 4)
    )


def join_shots(shots: list[str], rng: random.Random) -> str:
    return rng.choice(("\n", "\n\n")).join(shots)


def code(rng: random.Random, words: int) -> str:
    """Statements in the style of Python, Java or C."""
    write = rng.choice((_python_line, _brace_line))
    head = rng.choice(("import os\nimport sys\n", "package com.{};\n", "#include <{}.h>\n", ""))
    lines = [head.format(pseudo_word(rng))]
    lines += [write(rng) for _ in range(words // 6 + 2)]
    return "\n".join(lines) + "\n"


def repository(rng: random.Random, words: int) -> str:
    mark = rng.choice(("# {}.py\n", "// {}.java\n", "File: src/{}.c\n", "Path: {}/util.py\n"))
    size = rng.choice((60, 150))
    return "\n".join(
        mark.format(pseudo_word(rng)) + code(rng, size) for _ in range(max(2, words // size))
    )


def _identifier(rng: random.Random) -> str:
    parts = [noun(rng), rng.choice(("id", "count", "list", "get", "set", "name", noun(rng)))]
    return rng.choice(("_".join(parts), parts[0] + parts[1].title(), parts[0]))


def _python_line(rng: random.Random) -> str:
    a, b, c = (_identifier(rng) for _ in range(3))
    return " " * rng.choice((0, 4, 8)) + rng.choice((
        f"def {a}(self, {b}):", f"return {a}", f"{a} = self.{b}({c})", f"if {a} is not None:",
        f"for {a} in {b}:", f"from {a} import {b}", f"class {a.title()}({b.title()}):",
        f"{a}.append({b}[{rng.randint(0, 9)}])", f'"""{sentence(rng)}"""', f"# {clause(rng)}",
        f"raise ValueError({a!r})", f"{a} = {rng.randint(0, 99)}", f"assert {a} == {b}",
    ))  # fmt: skip


def _brace_line(rng: random.Random) -> str:
    a, b, c = (_identifier(rng) for _ in range(3))
    return "\t" * rng.randint(0, 3) + rng.choice((
        f"public void {a}(String {b}) {{", f"private int {a} = {rng.randint(0, 99)};", "}",
        f"return {a}.{b}({c});", f"if ({a} == null) {{", f"for (int i = 0; i < {a}; i++) {{",
        f"// {clause(rng)}", f"{a}->{b} = {c};", f"using {a.title()};", f"int {a} = {b}({c});",
        "@Override", f"throw new IllegalArgumentException({a});", f"var {a} = new {b.title()}();",
    ))  # fmt: skip


# ---- questions ----------------------------------------------------------------------------------


def question(rng: random.Random) -> str:
    """A question about a fact."""
    verb, who, what = rng.choice(VERBS), name(rng), noun(rng)
    return rng.choice((
        f"Who {verb} {noun_phrase(rng)}?", f"What is the name of the {what} that {who} {verb}?",
        f"When did {who} leave {rng.choice(PLACES)}?", f"Where was {noun_phrase(rng)} {verb}?",
        f"How many {what}s did {who} own?", f"Why does {who} leave the {what}?",
        f"Which {what} was {verb} first?", f"What does {who} give to {name(rng)}?",
        f"In which year was the {what} {verb}?", f"How much did the {what} cost?",
        f"What is the {rng.choice(ADJECTIVES)} {what} of {rng.choice(PLACES)}?",
        f"Is {noun_phrase(rng)} {rng.choice(ADJECTIVES)}?", f"How did {who} learn of the {what}?",
        f"Whose {what} {verb} {noun_phrase(rng)}?", f"what {what} has {who} {verb}",
        f"At what time does the {what} open, and who may enter?",
        f"What happened to {noun_phrase(rng)} {rng.choice(LINKS)} {clause(rng)}?",
        f"Who is {who}?", f"What {rng.choice(('colour', 'kind', 'sort', 'size'))} of {what} is it?",
        f"Where do {who} and {name(rng)} meet?",
        f"Did {who} {rng.choice(('like', 'see'))} the {what}?",
        f"How long did the {what} last?", f"How old is {who}?", f"Who are the {what}s of {who}?",
        f"What was {rng.choice(VERBS)} by {noun_phrase(rng)}?", f"To whom was the {what} given?",
        f"For how many years was {who} {rng.choice(ADJECTIVES)}?",
        f"Which {what} did {who} choose?",
        f"What is the {what}'s {rng.choice(('number', 'code', 'password', 'address', 'price'))}?",
    ))  # fmt: skip


def paper_question(rng: random.Random) -> str:
    thing = rng.choice(
        ("dataset", "baseline", "metric", "architecture", "corpus", "loss", "method")
    )
    return rng.choice((
        f"Which {thing}s do they use?", f"What {thing} is used in the experiments?",
        f"Do they evaluate on {noun(rng)} data?", f"How large is the {thing}?",
        f"By how much does the {thing} improve over {pseudo_word(rng)}?",
        f"Is the {thing} publicly available?", f"What is the {thing} of the authors?",
        f"How was the {thing} annotated?", f"Does the {thing} outperform the state of the art?",
        question(rng),
    ))  # fmt: skip


def hop_question(rng: random.Random) -> str:
    a, b = name(rng), name(rng)
    role = rng.choice(("director", "spouse", "founder", "mother", "performer", "author", "owner"))
    what = noun(rng)
    return rng.choice((
        f"What nationality is the {role} of the {what} {pseudo_word(rng).title()}?",
        f"Where was the {role} of {a} born?", f"When did the {role} of {a}'s {what} die?",
        f"Which {what} came out first, {pseudo_word(rng).title()} or {pseudo_word(rng).title()}?",
        f"Who is older, {a} or {b}?", f"Are {a} and {b} from the same country?",
        f"Were both {a} and {b} {what}s?", f"In what county is the birthplace of {a}?",
        f"Who is the {role} of the {role} of {a}?", f"Which city hosts the {what} that {a} leads?",
        f"The {what} of {rng.choice(PLACES)} was named after which {noun(rng)}?", question(rng),
    ))  # fmt: skip


def meeting_request(rng: random.Random) -> str:
    role, topic = rng.choice(WORDS["roles"]), rng.choice(WORDS["topics"])
    return rng.choice((
        f"What did {role} think about {topic}?", f"Summarize the discussion about {topic}.",
        f"Why did {role} disagree with {rng.choice(WORDS['roles'])} on {topic}?",
        "Summarize the whole meeting.", f"What was said about {topic}?",
        f"How did {role} want to deal with {topic}?", f"What was decided about {topic}?",
        f"Describe the opinion of {role} on {topic}.", f"What was the conclusion on {topic}?",
        f"What problems did {role} see with {topic}, and why?",
    ))  # fmt: skip
