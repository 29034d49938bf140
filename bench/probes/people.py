"""Random tables of people, which the bundled model answers questions about."""

from __future__ import annotations

import random

NAMES = "Ada Bea Cleo Dora Elsa Finn Gus Hugo Ida Jon Kai Lena Milo Nora Otto Pia".split()
SURNAMES = "Lund Holm Frost Marsh Rossi Tanaka Byron Silva".split()
FIELDS = {
    "Age": [str(age) for age in range(20, 80)],
    "Occupation": "Pilot Baker Judge Nurse Painter Farmer".split(),
    "Country": "Norway Denmark Chile Japan Kenya Italy".split(),
}


def make_table(rng: random.Random) -> tuple[str, list[str]]:
    people = rng.sample([f"{name} {surname}" for name in NAMES for surname in SURNAMES], 10)
    rows = [["ID", "Name", *FIELDS], ["---"] * (2 + len(FIELDS))]
    for number, person in enumerate(people, 1):
        rows.append([str(number), person, *(rng.choice(values) for values in FIELDS.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows), people


def ask_about(rng: random.Random, table: str, people: list[str]) -> list[dict[str, str]]:
    """A chat with one question about a table."""
    question = f"What is the {rng.choice([*FIELDS]).lower()} of {rng.choice(people)}?"
    return [{"role": "system", "content": f"{table}\n"}, {"role": "user", "content": question}]
