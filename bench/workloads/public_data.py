"""Public data as workloads: GSM8K, MMLU, MT-bench, if a folder with them is at hand.

The texts are tokenised by a byte-level BPE that is trained on these very files, because no
tokenizer comes without a network; its vocabulary is 32,768. Answers are the data's own where it has
any. A text that many prompts share is cut before its last newline, where that tokenizer cuts, too.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

from radixcache.bench.workloads.byte_level_bpe import train_encoder
from radixcache.bench.workloads.workload import Tokens, Workload
from radixcache.errors import InvalidRequest

VOCABULARY = 32_768

_FILES = ("gsm8k_test.jsonl.gz", "mmlu_dev_test.tar.gz", "mt_bench_question.jsonl")
_STEMS = (
    "Answer the following question as briefly as you can. ",
    "Translate the following question into French, word for word, and do not answer it: ",
    "Rewrite the following so that a child of ten understands it. ",
    "Summarise the following request in one sentence, in your own words: ",
    "List the key facts in the following text, one per line, without comment. ",
    "Is the following question about mathematics? Answer yes or no. ",
    "Correct the grammar of the following text and return only the corrected text: ",
    "You are a helpful assistant. Think step by step before you answer. ",
    "Classify the topic of the following text as science, history, law or other: ",
    "Write a title of at most six words for the following text. ",
)


def data_folder() -> Path | None:
    """Where the files are: RADIXCACHE_DATA, or ../shared/data beside the project; None if not."""
    root = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("RADIXCACHE_DATA") or root.parent / "shared" / "data")
    return folder if all((folder / name).is_file() for name in _FILES) else None


def load_public(name: str, folder: Path | None = None) -> Workload:
    """The workload called `name`, one of `PUBLIC`."""
    folder = folder or data_folder()
    if folder is None:
        raise InvalidRequest(
            f"{name} needs {', '.join(_FILES)} in ../shared/data, or in the folder RADIXCACHE_DATA"
        )
    return PUBLIC[name](folder, trained_encoder(folder))


Encode = Callable[[str], Tokens]


def gsm8k_best_of_8(folder: Path, encode: Encode) -> Workload:
    """Every question of GSM8K's test set, sampled 8 times at once."""
    workload = Workload("gsm8k-best-of-8", "1,319 questions of GSM8K, 8 samples each")
    rng = np.random.default_rng(0)
    for question, answer in _gsm8k(folder):
        prompt = encode(
            "Solve the problem step by step and end with the number.\n\n"
            f"Question: {question}\nAnswer:"
        )
        length = len(encode(answer))
        for sample in range(8):
            generated = rng.integers(0, VOCABULARY, length, dtype=np.int32)
            workload.add([prompt], generated, together=sample > 0, stem=1)
    return workload


def gsm8k_8_shot(folder: Path, encode: Encode) -> Workload:
    """GSM8K with the first 8 questions and answers as examples before each of the others."""
    workload = Workload("gsm8k-8-shot", "1,311 questions of GSM8K after the same 8 examples")
    rows = _gsm8k(folder)
    shots = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in rows[:8])
    shared = encode(shots[:-1])
    for question, answer in rows[8:]:
        asked = encode(f"\nQuestion: {question}\nAnswer:")
        workload.add([shared, asked], encode(f" {answer}"), template=1)
    return workload


def mmlu_5_shot(folder: Path, encode: Encode) -> Workload:
    """All of MMLU's test questions, subject by subject, after the subject's 5 examples."""
    workload = Workload("mmlu-5-shot", "14,079 questions of MMLU in 57 subjects, 5 examples each")
    answer = encode(" A")
    for subject, examples, rows in _mmlu(folder):
        title = subject.replace("_", " ")
        stem = f"The following are multiple choice questions (with answers) about {title}.\n\n"
        stem += "".join(f"{_choices(row)} {row[5]}\n\n" for row in examples)
        shared = encode(stem[:-1])
        for row in rows:
            workload.add([shared, encode("\n" + _choices(row))], answer, template=1)
    return workload


def mt_bench(folder: Path, encode: Encode) -> Workload:
    """MT-bench's 80 questions in two turns; answers of 200 random tokens."""
    workload = Workload("mt-bench", "80 questions of MT-bench, two turns")
    rng = np.random.default_rng(0)
    system = encode("A chat between a curious user and a helpful, honest assistant.\n\nUser: ")
    lines = (folder / "mt_bench_question.jsonl").read_text().splitlines()
    turns = [json.loads(line)["turns"] for line in lines]
    before = []
    for first, _ in turns:
        generated = rng.integers(0, VOCABULARY, 200, dtype=np.int32)
        prompt = [system, encode(first), encode("\n\nAssistant:")]
        before.append(([*prompt, generated], workload.add(prompt, generated, template=1)))
    for (_, second), (parts, index) in zip(turns, before, strict=True):
        prompt = [*parts, encode("\n\nUser: "), encode(second), encode("\n\nAssistant:")]
        generated = rng.integers(0, VOCABULARY, 200, dtype=np.int32)
        workload.add(prompt, generated, after=index, turn=1, template=1)
    return workload


def short_instructions(folder: Path, encode: Encode) -> Workload:
    """Ten instructions in random order, each before a question of GSM8K's first sentence."""
    workload = Workload("short-instructions", "1,319 first sentences of GSM8K, ten instructions")
    rng = np.random.default_rng(0)
    for question, _ in _gsm8k(folder):
        stem = _STEMS[int(rng.integers(len(_STEMS)))]
        sentence = question.partition(". ")[0]
        workload.add([encode(stem + sentence)], rng.integers(0, VOCABULARY, 20, dtype=np.int32))
    return workload


def long_documents(folder: Path, encode: Encode) -> Workload:
    """Documents of 17,800 tokens on average, 15 questions each, in random order.

    A document is a stretch of MMLU's questions; the questions are GSM8K's.
    """
    workload = Workload("long-documents", "40 documents of about 17,800 tokens, 15 questions each")
    rng = np.random.default_rng(0)
    text = "\n\n".join(_choices(row) for _, _, rows in _mmlu(folder) for row in rows)
    tokens = encode(text)
    questions = [question for question, _ in _gsm8k(folder)]
    sizes = rng.integers(8_900, 26_700, 40)
    ends = sizes.cumsum()
    texts = [tokens[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    assert ends[-1] <= len(tokens)
    order = np.repeat(np.arange(len(texts)), 15)
    rng.shuffle(order)
    for number, index in enumerate(order.tolist()):
        asked = encode(f"\n\nQuestion: {questions[number]}\nAnswer:")
        generated = rng.integers(0, VOCABULARY, 60, dtype=np.int32)
        workload.add([texts[index], asked], generated, template=1)
    return workload


PUBLIC: dict[str, Callable[[Path, Encode], Workload]] = {
    "gsm8k-best-of-8": gsm8k_best_of_8,
    "gsm8k-8-shot": gsm8k_8_shot,
    "mmlu-5-shot": mmlu_5_shot,
    "mt-bench": mt_bench,
    "short-instructions": short_instructions,
    "long-documents": long_documents,
}


def _gsm8k(folder: Path) -> list[tuple[str, str]]:
    lines = gzip.decompress((folder / "gsm8k_test.jsonl.gz").read_bytes()).decode().splitlines()
    return [(record["question"], record["answer"]) for record in map(json.loads, lines)]


def _mmlu(folder: Path) -> Iterator[tuple[str, list[list[str]], list[list[str]]]]:
    """Subject, its dev rows and its test rows: question, four choices, the letter of the right."""
    with tarfile.open(folder / "mmlu_dev_test.tar.gz") as tar:
        texts = {
            member.name: read.read().decode()
            for member in tar
            if (read := tar.extractfile(member)) is not None
        }
    for name in sorted(name for name in texts if "/dev/" in name):
        subject = Path(name).name.removesuffix("_dev.csv")
        test = name.replace("/dev/", "/test/").replace("_dev.csv", "_test.csv")
        yield subject, _rows(texts[name]), _rows(texts[test])


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]


def _choices(row: list[str]) -> str:
    letters = "".join(f"\n{letter}. {row[1 + i]}" for i, letter in enumerate("ABCD"))
    return f"{row[0]}{letters}\nAnswer:"


@cache
def trained_encoder(folder: Path) -> Encode:
    texts = [f"{question}\n{answer}" for question, answer in _gsm8k(folder)]
    texts += [_choices(row) for _, dev, test in _mmlu(folder) for row in (*dev, *test)]
    texts += [(folder / "mt_bench_question.jsonl").read_text()]
    encode = train_encoder(texts, VOCABULARY)
    return lambda text: np.array(encode(text), np.int32)
