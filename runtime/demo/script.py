"""The script: three users, two documents, twelve questions with one right answer each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parent / "table.md"
CREW = Path(__file__).parent / "crew.md"


@dataclass(frozen=True)
class Question:
    """A line of the script: `user` asks for one cell of the user's document.

    Attributes:
        edits: the question replaces the user's last one, whose turn is taken back.
    """

    user: str
    text: str
    name: str
    column: str
    edits: bool = False

    @property
    def expected(self) -> str:
        """The cell, in the row whose column Name has `name`."""
        text = DOCUMENTS[self.user].read_text()
        lines = [line for line in text.splitlines() if line.startswith("|")]
        header, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
        people = (dict(zip(header, row, strict=True)) for row in rows)
        return next(person[self.column] for person in people if person["Name"] == self.name)


DOCUMENTS = {"Ana": TABLE, "Ben": TABLE, "Cleo": CREW}
SCRIPT = (
    Question("Ana", "What is the occupation of Nora Lund?", "Nora Lund", "Occupation"),
    Question("Ben", "Which country is Felix Wolf from?", "Felix Wolf", "Country"),
    Question("Cleo", "How old is Lena Snow?", "Lena Snow", "Age"),
    Question("Ana", "And the email?", "Nora Lund", "Email"),
    Question("Ben", "What is the phone number of Hugo Marsh?", "Hugo Marsh", "Phone Number"),
    Question("Ben", "What is the phone number of Hugo Lund?", "Hugo Lund", "Phone Number", True),
    Question("Cleo", "What about Carmen Fox?", "Carmen Fox", "Age"),
    Question("Ana", "What is the address of Theo Holm?", "Theo Holm", "Address"),
    Question("Ana", "What about Theo Marsh?", "Theo Marsh", "Address"),
    Question("Ben", "And the occupation?", "Hugo Lund", "Occupation"),
    Question("Cleo", "What is the email of Lars Hayes?", "Lars Hayes", "Email"),
    Question("Ben", "How old is Ines Costa?", "Ines Costa", "Age"),
)
