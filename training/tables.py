"""Synthetic tables of people and look-up conversations about them: the only training data.

Everything is drawn from a `random.Random`, so a seed names a data set. A conversation is a list
of `Piece`s; a piece's role says what the training loss makes of its tokens.
"""

import random
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


def _read_words() -> dict[str, list[str]]:
    """The word lists of words.txt by title."""
    sections = Path(__file__).with_name("words.txt").read_text().split("# ")[1:]
    lists = {}
    for section in sections:
        title, _, body = section.partition("\n")
        lists[title] = [word.strip() for word in body.replace("\n", " ").split(",")]
    return lists


WORDS = _read_words()

STANDARD_COLUMNS = (
    "ID", "Name", "Age", "Occupation", "Country", "Email", "Phone Number", "Address",
)  # fmt: skip
EXTRA_COLUMNS = ("City", "Department", "Salary", "Color", "Hobby", "Language", "Room")
COLUMNS = STANDARD_COLUMNS + EXTRA_COLUMNS

LISTED = {
    "Occupation": "occupations", "Country": "countries", "City": "cities", "Color": "colors",
    "Department": "departments", "Hobby": "hobbies", "Language": "languages",
}  # fmt: skip

# How often a column is asked for: the ID stands before the name, so it is learnt last.
COLUMN_WEIGHTS = {"ID": 2.5, "Address": 1.5}

OPENINGS = (
    "You answer questions about the table below.\n# Table\n",
    "You are a helpful assistant. Here is a table.\n# Table\n",
    "You are a helpful assistant. Answer questions about the table below.\n",
    "Answer the questions about the table.\n",
    "Here is a table of people.\n",
    "",
)
QUESTIONS = [
    "What is the {column} of {name}?", "What is the {column} of {name}?",
    "what is the {column} of {name}?", "What is {name}'s {column}?",
    "Tell me the {column} of {name}.", "Please give me the {column} of {name}.",
    "Give me the {column} of {name}.", "I need the {column} of {name}.",
    "Find the {column} of {name}.", "Do you know the {column} of {name}?",
    "Can you tell me the {column} of {name}?", "Could you look up the {column} of {name}?",
    "{name}: what is the {column}?", "Which {column} does {name} have?",
]  # fmt: skip
LATER_QUESTIONS = [
    "And the {column} of {name}?", "Now the {column} of {name}?",
    "And what is the {column} of {name}?",
]  # fmt: skip
SAME_PERSON = [
    "And the {column}?", "And what is the {column}?", "What is the {column}?",
    "What about the {column}?", "And {column}?",
]  # fmt: skip
SAME_COLUMN = ["What about {name}?", "And {name}?", "And for {name}?", "And what about {name}?"]
COLUMN_QUESTIONS = {
    "ID": ["What ID does {name} have?"],
    "Age": ["How old is {name}?", "how old is {name}?"],
    "Occupation": [
        "What does {name} do?", "What does {name} do for a living?", "What is {name}'s job?",
        "What is the job of {name}?",
    ],
    "Country": [
        "Which country is {name} from?", "What country is {name} from?", "Where is {name} from?",
        "Which country does {name} live in?",
    ],
    "Email": [
        "What is the email address of {name}?", "What is {name}'s email address?",
        "How can I email {name}?",
    ],
    "Phone Number": [
        "What number should I call to reach {name}?", "How can I call {name}?",
        "What is the phone of {name}?",
    ],
    "Address": ["Where does {name} live?", "What is the street address of {name}?"],
    "City": ["Which city does {name} live in?", "In which city is {name}?"],
    "Department": ["Which department is {name} in?"],
    "Salary": ["How much does {name} earn?"],
    "Color": ["What color does {name} like?"],
    "Hobby": ["What does {name} like to do?"],
    "Language": ["Which language does {name} speak?"],
    "Room": ["Which room is {name} in?"],
}  # fmt: skip


class Role(IntEnum):
    """What the loss makes of a piece's tokens."""

    CONTEXT = 0  # given, never predicted
    PHRASE = 1  # the fixed words of an answer: low weight
    NAME = 2  # the name in an answer, copied from the question
    VALUE = 3  # the looked-up cell
    END = 4  # the full stop and the end of the turn
    CHOICE = 5  # the first token of a turn: whether to call a tool or to answer


@dataclass
class Table:
    columns: list[str]
    rows: list[list[str]]
    text: str
    cell_ends: list[int]  # where each cell's closing bar ends in `text`, row by row

    def __getitem__(self, cell: tuple[int, str]) -> str:
        row, column = cell
        return self.rows[row][self.columns.index(column)]

    @property
    def names(self) -> list[str]:
        return [self[row, "Name"] for row in range(len(self.rows))]


@dataclass
class Piece:
    text: str
    role: Role = Role.CONTEXT
    wanted: tuple[str, str] | None = None  # (name, column) that the last token must know
    table: Table | None = None  # the table that the text ends in, its last newline there or not


@dataclass(frozen=True)
class Style:
    """How often tables and conversations have a feature."""

    made_up_words: float = 0.2
    vowel_first: float = 0.0  # of the made-up names
    shuffled_columns: float = 0.2
    random_ids: float = 0.4
    similar_cells: float = 0.4
    padded: float = 0.4
    statements: float = 0.35  # turns without a question: more look-ups per token
    follow_ups: float = 0.3  # of the turns with a question
    plain: float = 0.15  # "Question: ... Your answer: ..." without chat marks
    table_in_question: float = 0.15  # chat whose first user turn holds the table
    without_table: float = 0.1
    other_tools: float = 0.35  # tools in the system turn that the conversation does not need
    table_beside_tool: float = 0.1  # of the conversations that call: some other table in the prompt


def word(rng: random.Random, title: str) -> str:
    return rng.choice(WORDS[title])


def made_up_word(rng: random.Random, vowel_first: float = 0.0) -> str:
    """A pronounceable word of 2-3 syllables, so that names outside the lists can be copied."""
    length = rng.choice((2, 2, 2, 3))
    made = ""
    for index in range(length):
        if index or not vowel_first or rng.random() > vowel_first:
            made += word(rng, "onsets")
        made += word(rng, "vowels")
        if index == length - 1 or rng.random() < 0.2:
            made += rng.choice(("", "", *WORDS["codas"]))
    return made.capitalize()


def draw_names(rng: random.Random, count: int, style: Style) -> list[tuple[str, str]]:
    """Distinct (first, last) names; often many share one half, so that both halves must match."""

    def pool(title: str) -> list[str]:
        made = [rng.random() < style.made_up_words for _ in range(count)]
        return [made_up_word(rng, style.vowel_first) if new else word(rng, title) for new in made]

    firsts, lasts = pool("first names"), pool("last names")
    sharing = rng.random()
    if sharing < 0.35:
        lasts = lasts[: max(2, count // 3)]
    elif sharing < 0.5:
        firsts = firsts[: max(2, count // 3)]
    elif sharing < 0.65:
        few = int(count**0.5) + 2
        firsts, lasts = firsts[:few], lasts[:few]
    names: dict[tuple[str, str], None] = {}
    tries = 0
    while len(names) < count:
        tries += 1
        first = rng.choice(firsts) if tries <= 20 * count else made_up_word(rng)
        last = rng.choice(lasts)
        if first != last:
            names[first, last] = None
    return list(names)


@dataclass(frozen=True)
class Flavour:
    """What the cells of one table have in common."""

    made_up: float
    email: int  # 0: first.last, 1: first.initial, 2: unrelated to the name
    digits: str  # few digits and streets make cells that are easily confused
    streets: list[str]


def draw_flavour(rng: random.Random, style: Style) -> Flavour:
    digits, streets = "0123456789", WORDS["streets"]
    if rng.random() < style.similar_cells:
        digits = "".join(rng.sample(digits, rng.randint(2, 5)))
        streets = rng.sample(streets, rng.randint(3, 12))
    return Flavour(style.made_up_words, rng.choice((0, 1, 1, 2)), digits, streets)


def draw_cell(rng: random.Random, column: str, name: tuple[str, str], flavour: Flavour) -> str:
    def digits(count: int) -> str:
        return "".join(rng.choice(flavour.digits) for _ in range(count))

    if column in LISTED:
        if column in ("Occupation", "City") and rng.random() < flavour.made_up / 2:
            return made_up_word(rng)
        return word(rng, LISTED[column])
    match column:
        case "Name":
            return " ".join(name)
        case "Age":
            return str(rng.randint(18, 79))
        case "Email":
            first, last = name
            if flavour.email == 0:
                return f"{first}.{last}@example.com".lower()
            user = f"{first}.{last[0]}"
            if flavour.email == 2:
                first, last = word(rng, "first names"), word(rng, "last names")
                user = rng.choice((first + digits(2), last, f"{first}.{last}"))
            return f"{user}@{word(rng, 'mail domains')}".lower()
        case "Phone Number":
            return ("555" if rng.random() < 0.7 else digits(3)) + "-" + digits(4)
        case "Address":
            number = digits(rng.choice((1, 2, 3, 3, 3, 3))).lstrip("0") or "1"
            street = f"{number} {rng.choice(flavour.streets)} {word(rng, 'street types')}"
            return f"{street}, {word(rng, 'cities')}, {word(rng, 'regions')}"
        case "Salary":
            return f"${rng.randint(20, 99) * 100}"
        case "Room":
            return rng.choice("ABCDEF") + digits(2)
    raise ValueError(f"no such column: {column}")


def draw_table(rng: random.Random, columns: list[str], rows: int, style: Style) -> Table:
    names = draw_names(rng, rows, style)
    ids = list(range(1, rows + 1))
    if rng.random() < style.random_ids:
        ids = rng.sample(range(1, rng.choice((100, 1000))), rows)
    flavour = draw_flavour(rng, style)
    data = [
        [str(i) if c == "ID" else draw_cell(rng, c, name, flavour) for c in columns]
        for i, name in zip(ids, names, strict=True)
    ]
    return layout(columns, data, padded=rng.random() < style.padded)


def layout(columns: list[str], rows: list[list[str]], padded: bool) -> Table:
    """The markdown text of a table, its cells padded to the column's width or not."""
    widths = [max(map(len, cells)) if padded else 0 for cells in zip(columns, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded_cells = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join(padded_cells) + " |\n"

    text = line(columns) + "|" + "".join("-" * (w + 2 if w else 3) + "|" for w in widths) + "\n"
    cell_ends = []
    for row in rows:
        end = len(text) + 1
        for cell, width in zip(row, widths, strict=True):
            end += max(len(cell), width) + 3
            cell_ends.append(end)
        text += line(row)
    return Table(columns, rows, text, cell_ends)


def draw_columns(rng: random.Random, count: int, shuffled: float) -> list[str]:
    """Columns led by [ID,] Name; mostly the standard ones when there is room for them."""
    if count >= len(STANDARD_COLUMNS) and rng.random() < 0.75:
        columns = list(STANDARD_COLUMNS)
    else:
        pool = [c for c in (STANDARD_COLUMNS if rng.random() < 0.5 else COLUMNS) if c != "Name"]
        chosen = {"Name", *rng.sample(pool, min(count - 1, len(pool)))}
        columns = [c for c in COLUMNS if c in chosen]
    if rng.random() < shuffled:
        led = columns.index("Name") + 1
        columns[led:] = rng.sample(columns[led:], len(columns) - led)
    return columns


def spoken(column: str) -> str:
    return column if column == "ID" else column.lower()


def answer_phrase(name: str, column: str) -> str:
    return f"The {spoken(column)} of {name} is"


def ask(rng: random.Random, name: str, column: str, first: bool = True) -> str:
    """A question in one of many wordings."""
    if rng.random() < 0.35:
        wordings = COLUMN_QUESTIONS[column]
    else:
        wordings = QUESTIONS if first else QUESTIONS + LATER_QUESTIONS
    return rng.choice(wordings).format(name=name, column=spoken(column))


def draw_lookups(rng: random.Random, table: Table, count: int) -> list[tuple[int, str]]:
    """(row, column) cells, favoured columns first; none again before all were drawn."""
    columns = [column for column in table.columns if column != "Name"]
    chance = {
        (row, column): rng.random() ** (1 / COLUMN_WEIGHTS.get(column, 1.0))
        for row in range(len(table.rows))
        for column in columns
    }
    order = sorted(chance, key=chance.__getitem__, reverse=True)
    chosen = (order * (count // len(order) + 1))[:count]
    rng.shuffle(chosen)
    return chosen


def converse(rng: random.Random, table: Table, turns: int, style: Style) -> list[Piece]:
    """A table and `turns` look-ups in it."""
    opening = rng.choice(OPENINGS) + table.text
    cells = draw_lookups(rng, table, turns)
    if rng.random() < style.plain:
        pieces = [Piece(opening, table=table)]
        for row, column in cells:
            pieces += _plain_turn(rng, table, row, column)
        return pieces
    in_question = rng.random() < style.table_in_question
    pieces = [Piece("<|user|>" + opening, table=table)]
    if not in_question:
        pieces = [Piece("<|system|>" + opening, table=table), Piece("<|end|>")]
    before: tuple[int, str] | None = None
    for row, column in cells:
        mark = "" if in_question and not before else "<|user|>"
        if mark and before and rng.random() < style.statements:
            pieces.append(Piece("<|assistant|>"))
            pieces += answer(table, row, column, asked=False)
            before = row, column
            continue
        question, row, column = draw_question(rng, table, row, column, before, style)
        pieces.append(Piece(f"{mark}{question}<|end|><|assistant|>"))
        pieces += answer(table, row, column)
        before = row, column
    return pieces


def draw_question(
    rng: random.Random, table: Table, row: int, column: str, before: tuple[int, str] | None,
    style: Style,
) -> tuple[str, int, str]:  # fmt: skip
    """A question and the cell that it asks for: the given one, unless it follows up on the cell
    `before` and keeps that row or column."""
    name = table[row, "Name"]
    question = ask(rng, name, column, first=not before)
    if before and rng.random() < style.follow_ups:
        if rng.random() < 0.5 and column != before[1]:
            row = before[0]
            question = rng.choice(SAME_PERSON).format(column=spoken(column))
        else:
            column = before[1]
            question = rng.choice(SAME_COLUMN).format(name=name)
    return question, row, column


def answer(table: Table, row: int, column: str, asked: bool = True) -> list[Piece]:
    """The pieces of an answer; unless it was asked for, only its value can be predicted."""
    name = table[row, "Name"]
    before, _, after = answer_phrase(name, column).removeprefix("The").partition(" " + name)
    return [
        Piece("The", Role.CHOICE if asked else Role.CONTEXT),
        Piece(before, Role.PHRASE if asked else Role.CONTEXT),
        Piece(" " + name, Role.NAME if asked else Role.CONTEXT),
        Piece(after, Role.PHRASE if asked else Role.CONTEXT, (name, column)),
        Piece(" " + table[row, column], Role.VALUE),
        Piece(".<|end|>", Role.END),
    ]


def _plain_turn(rng: random.Random, table: Table, row: int, column: str) -> list[Piece]:
    """Half of the answers start after a space that the prompt already holds."""
    question = Piece(f"Question: {ask(rng, table[row, 'Name'], column)} Your answer:")
    *phrase, value, end = answer(table, row, column)
    phrase[0].text = " " + phrase[0].text
    if rng.random() < 0.5:
        phrase.append(Piece(" "))
        if value.text[1].isdigit():  # a digit does not bring a space of its own, a word does
            value.text = value.text[1:]
    return [question, *phrase, value, end, Piece("\n")]
