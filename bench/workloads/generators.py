"""Synthetic workloads: the shapes in which requests share prefixes, from a seed.

Tokens are drawn evenly from the vocabulary, so texts agree where a generator says so and elsewhere
only by chance. Lengths that are called "about n" are drawn evenly from n/2 to 3n/2. Every shape is
in the docstring of its generator, and every number is a keyword.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import numpy as np

from radixcache.bench.workloads.workload import Tokens, Workload
from radixcache.errors import InvalidRequest


class Writer:
    def __init__(self, seed: int, vocabulary: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.vocabulary = vocabulary

    def text(self, length: int) -> Tokens:
        return self.rng.integers(0, self.vocabulary, length, dtype=np.int32)

    def about(self, length: int) -> Tokens:
        """From half to three halves of `length` random tokens, at least one."""
        return self.text(max(1, int(self.rng.integers(length // 2, length * 3 // 2 + 1))))

    def zipf(self, kinds: int, count: int) -> list[int]:
        """`count` of the numbers from 0 to `kinds`, by Zipf's law: the k-th with weight 1/k."""
        weights = 1 / np.arange(1, kinds + 1)
        return [int(k) for k in self.rng.choice(kinds, count, p=weights / weights.sum())]


def chat(
    write: Writer, *, conversations: int = 60, turns: int = 8, system: int = 200, systems: int = 1,
    user: int = 60, answer: int = 120,
) -> Workload:  # fmt: skip
    """Multi-turn chat: every turn's prompt is the whole conversation so far.

    `conversations` over one system prompt of `system` tokens, or over one of `systems`, drawn by
    Zipf's law, `turns` each; a turn adds about `user` tokens and an answer of about `answer`. The
    turns of all conversations come in a random order, those of one conversation one after the
    other.
    """
    workload = Workload("chat", f"{conversations} conversations of {turns} turns")
    texts = [write.text(system) for _ in range(systems)]
    drawn = write.zipf(systems, conversations) if systems > 1 else [0] * conversations
    parts = [[texts[index]] for index in drawn]
    last: list[int | None] = [None] * conversations
    order = np.repeat(np.arange(conversations), turns)
    write.rng.shuffle(order)
    for index in order.tolist():
        parts[index].append(write.about(user))
        generated = write.about(answer)
        turn = (len(parts[index]) - 2) // 2
        last[index] = workload.add(
            parts[index], generated, after=last[index], turn=turn, template=1
        )
        parts[index].append(generated)
    return workload


def few_shot(
    write: Writer, *, tasks: int = 10, questions: int = 40, shots: int = 5, shot: int = 120,
    question: int = 60, answer: int = 8,
) -> Workload:  # fmt: skip
    """Few-shot evaluation, task after task: the same examples before every question of a task.

    `tasks` of `shots` examples of about `shot` tokens; `questions` each, of about `question`
    tokens, answered in about `answer`.
    """
    workload = Workload(
        "few-shot", f"{tasks} tasks of {shots} examples, {questions} questions each"
    )
    for _ in range(tasks):
        examples = [write.about(shot) for _ in range(shots)]
        for _ in range(questions):
            parts = [*examples, write.about(question)]
            workload.add(parts, write.about(answer), template=shots)
    return workload


def best_of_n(
    write: Writer, *, questions: int = 60, n: int = 8, instruction: int = 25, question: int = 60,
    answer: int = 100,
) -> Workload:  # fmt: skip
    """Best of n: each question is asked `n` times at once, for different answers.

    `instruction` tokens that all share, then a question of about `question`; the `n` answers of
    about `answer` tokens differ from their first token on.
    """
    workload = Workload("best-of-n", f"{questions} questions, {n} samples each")
    common = write.text(instruction)
    for _ in range(questions):
        asked = write.about(question)
        for sample in range(n):
            generated, together = write.about(answer), sample > 0
            workload.add([common, asked], generated, together=together, template=1, stem=2)
    return workload


def tree_search(
    write: Writer, *, problems: int = 12, branch: int = 3, depth: int = 3, instruction: int = 80,
    problem: int = 60, thought: int = 40,
) -> Workload:  # fmt: skip
    """Tree of thought: every thought is expanded into `branch` next ones, `depth` levels deep.

    A prompt is `instruction` tokens that all share, a problem of about `problem`, and the thoughts
    from the root down, of about `thought` each. A thought waits for the one it expands.
    """
    workload = Workload("tree-search", f"{problems} problems, {branch} branches, {depth} levels")
    common = write.text(instruction)
    for _ in range(problems):
        leaves: list[tuple[list[Tokens], int | None]] = [([common, write.about(problem)], None)]
        for level in range(depth):
            grown: list[tuple[list[Tokens], int | None]] = []
            for path, after in leaves:
                for _ in range(branch):
                    generated = write.about(thought)
                    index = workload.add(
                        path, generated, after=after, turn=level, template=1, stem=2
                    )
                    grown.append(([*path, generated], index))
            leaves = grown
    return workload


def documents(
    write: Writer, *, documents: int = 20, questions: int = 200, document: int = 2000,
    question: int = 30, answer: int = 20,
) -> Workload:  # fmt: skip
    """Questions about long documents, in random order, about some more often than others.

    Documents of about `document` tokens, asked about by Zipf's law: the k-th with weight 1/k.
    """
    workload = Workload("documents", f"{questions} questions about {documents} documents")
    texts = [write.about(document) for _ in range(documents)]
    for index in write.zipf(documents, questions):
        workload.add([texts[index], write.about(question)], write.about(answer), template=1)
    return workload


def rerank(
    write: Writer, *, queries: int = 5, documents: int = 100, instruction: int = 2000,
    query: int = 30, document: int = 300,
) -> Workload:  # fmt: skip
    """Reranking: `documents` behind each query, scored by the row of their last token.

    All begin with `instruction` tokens, then a query of about `query` and a document of about
    `document`; a score is a prefill and one row. The documents of a query come at once, after
    those of the query before.
    """
    workload = Workload("rerank", f"{documents} documents behind each of {queries} queries")
    common, before = write.text(instruction), None
    for _ in range(queries):
        asked = write.about(query)
        for index in range(documents):
            parts = [common, asked, write.about(document)]
            workload.add(parts, write.text(1), after=before, together=index > 0, template=1, stem=2)
        before = len(workload.arrivals) - 1
    return workload


def agents(
    write: Writer, *, agents: int = 20, steps: int = 12, system: int = 600, task: int = 60,
    action: int = 30, observation: int = 80,
) -> Workload:  # fmt: skip
    """Agent loops: think, call a tool, read what it says, and again.

    All share a prompt with tools of `system` tokens. A step generates an action of about `action`
    tokens; the next prompt adds the tool's answer of about `observation`. The agents run at the
    same time, step by step in turns.
    """
    workload = Workload("agents", f"{agents} agents of {steps} steps")
    tools = write.text(system)
    parts = [[tools, write.about(task)] for _ in range(agents)]
    last: list[int | None] = [None] * agents
    for step in range(steps):
        for agent in range(agents):
            generated = write.about(action)
            last[agent] = workload.add(
                parts[agent], generated, after=last[agent], turn=step, template=1
            )
            parts[agent] += [generated, write.about(observation)]
    return workload


def short_instructions(
    write: Writer, *, requests: int = 600, stems: int = 10, stem: int = 28, question: int = 18,
    answer: int = 24,
) -> Workload:  # fmt: skip
    """Short instructions: one of `stems` instructions, then a few tokens of the user's own.

    Instructions of about `stem` tokens in random order, questions of about `question`.
    """
    workload = Workload("short", f"{requests} requests over {stems} instructions")
    texts = [write.about(stem) for _ in range(stems)]
    for index in write.rng.integers(0, stems, requests).tolist():
        workload.add([texts[index], write.about(question)], write.about(answer), template=1)
    return workload


def zero_sharing(
    write: Writer, *, requests: int = 300, prompt: int = 300, answer: int = 20,
) -> Workload:  # fmt: skip
    """Nothing shared at all: what a cache costs where it cannot help.

    Prompts of about `prompt` tokens, no two of which begin with the same token.
    """
    if requests > write.vocabulary:
        raise InvalidRequest(
            f"zero-sharing: {requests} prompts cannot begin with different tokens of a vocabulary "
            f"of {write.vocabulary}"
        )
    workload = Workload("zero-sharing", f"{requests} prompts with nothing in common")
    for first in write.rng.permutation(write.vocabulary)[:requests]:
        begin = np.array([first], np.int32)
        workload.add([begin, write.about(prompt)], write.about(answer))
    return workload


def bursts(
    write: Writer, *, bursts: int = 15, size: int = 32, stem: int = 300, question: int = 40,
    answer: int = 16,
) -> Workload:  # fmt: skip
    """Bursts: `size` requests with one new stem arrive at the same moment.

    Stems of about `stem` tokens, questions of about `question`. A burst waits for the one before.
    """
    workload = Workload("bursts", f"{bursts} bursts of {size} requests")
    before: int | None = None
    for _ in range(bursts):
        common = write.about(stem)
        for index in range(size):
            asked = [common, write.about(question)]
            workload.add(asked, write.about(answer), after=before, together=index > 0, stem=1)
        before = len(workload.arrivals) - 1
    return workload


GENERATORS: dict[str, Callable[..., Workload]] = {
    "chat": chat,
    "few-shot": few_shot,
    "best-of-n": best_of_n,
    "tree-search": tree_search,
    "documents": documents,
    "rerank": rerank,
    "agents": agents,
    "short": short_instructions,
    "zero-sharing": zero_sharing,
    "bursts": bursts,
}


def generate(spec: str, seed: int, vocabulary: int) -> Workload:
    """The workload that `spec` names, such as "chat" or "chat:turns=4,conversations=10"."""
    name, _, options = spec.partition(":")
    if name not in GENERATORS:
        raise InvalidRequest(f"no workload {name!r}; there are {', '.join(GENERATORS)}")
    known = list(inspect.signature(GENERATORS[name]).parameters)[1:]
    given: dict[str, int] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in known:
            raise InvalidRequest(f"{name} has no {key!r}; it has {', '.join(known)}")
        if not re.fullmatch(r"[0-9]{1,8}", value) or not int(value):
            raise InvalidRequest(
                f"{name}: {key} must be a positive number, not {value!r:.40} (8 digits at most)"
            )
        given[key] = int(value)
    workload = GENERATORS[name](Writer(seed, vocabulary), **given)
    workload.name = spec
    return workload
