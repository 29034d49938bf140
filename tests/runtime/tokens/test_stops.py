"""Stop strings: found as `str.find` finds them, at a cost that their lengths do not change."""

from __future__ import annotations

import random

from radixcache.runtime.tokens.detokenizer import Detokenizer
from radixcache.runtime.tokens.stops import StopStrings

SEED = 20_261_125


def first(stops: list[str], text: str, since: int) -> tuple[int, str] | None:
    """The stop string that begins first of those that end behind `since`; brute force."""
    hits = [
        (start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > since
    ]
    return min(hits, default=None)


def test_stop_strings_are_those_that_brute_force_finds():
    rng = random.Random(SEED)
    for _ in range(400):
        stops = ["".join(rng.choices("ab|", k=rng.randint(1, 6))) for _ in range(rng.randint(0, 6))]
        automaton, state, text = StopStrings(stops), 0, ""
        assert bool(automaton) == bool(stops)
        while len(text) < 30:
            piece = "".join(rng.choices("ab|c", k=rng.randint(0, 5)))
            state, hit = automaton.read(state, piece)
            wanted = first(stops, text + piece, len(text))
            told = None if hit is None else (len(text) + hit[0], hit[1])
            assert told == wanted, f"{stops} in {text + piece!r}, seed {SEED}"
            text += piece
            if hit is not None:
                break
            may_begin = [n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])]
            assert automaton.held_back(state) == max(may_begin, default=0)


def test_a_detokenizer_never_shows_half_a_character_or_half_a_stop_string() -> None:
    """Random cuts of UTF-8 bytes into tokens, against decoding everything at once."""
    rng = random.Random(SEED)

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    for _ in range(300):
        text = "".join(rng.choice("aб漢🙂|STOP ") for _ in range(rng.randint(1, 25)))
        stops = rng.choice([[], ["STOP"], ["|", "TO"], ["🙂a"], ["OP ", "STOP |"], ["<"], ["k"]])
        opening = rng.choice(["", "", "<think>\n"])
        thoughts = rng.choice(["\n", ""]) + "<think>" * (not opening) + text + "</think>\n "
        begin = rng.choice([0, len(thoughts)]) if not opening else len(thoughts)
        text = f"{thoughts[:begin]}{rng.choice(['<thi', ''])}x{text}"
        detokenizer = Detokenizer(decode, StopStrings(stops), opening=opening)
        shown = ""
        for index, token in enumerate(text.encode()):
            detokenizer.append(token, index)
            detokenizer.append(token, index)  # as after a step that was cut off
            if detokenizer.stopped_by is not None:
                break
            shown += detokenizer.take(finished=False)
            assert "\ufffd" not in shown
            assert not any(stop in shown[begin:] for stop in stops)
        detokenizer.finish()
        shown += detokenizer.take(finished=True)
        places = [text.find(stop, begin) for stop in stops]
        cut = min((place for place in places if place >= 0), default=len(text))
        assert shown == detokenizer.text == text[:cut], f"{text!r} {stops}, seed {SEED}"
