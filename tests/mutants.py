"""Breaks one rule of the package at a time, in one line, and sees that the tests notice.

    python -m tests.mutants            # or with words of the names: python -m tests.mutants salt

Each mutant is a copy of the project with one change; the tests named beside it must fail on it. On
the project as it is they pass, which `make test` shows.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("radixcache", "runtime", "kernels", "bench", "tests", "examples", "docs")
FILES = ("pyproject.toml", "README.md", "Makefile")


class Mutant(NamedTuple):
    """One line less of the truth: in `path`, `old` (once there) becomes `new`."""

    name: str
    path: str
    old: str
    new: str
    tests: str


INDEX = "tests/index"
ENGINE = "tests/runtime/engine"
SERVER = "tests/runtime/server"
STATES = f"{INDEX}/test_states.py {ENGINE}/test_hybrids.py"
EXACT = "tests/runtime/model/test_exact.py"
RULES = f"{INDEX}/test_contract.py -k HashBlock"

MUTANTS = [
    Mutant(
        "rollback leaves what is in flight",
        "radixcache/radix.py",
        "for lease in self._in_flight:\n            node = lease.node",
        "for lease in ():\n            node = lease.node",
        INDEX,
    ),
    Mutant(
        "rollback lets a lease claim what was not written",
        "radixcache/radix.py",
        "lease.num_tokens = min(lease.num_tokens, written)",
        "lease.num_tokens = lease.num_tokens",
        INDEX,
    ),
    Mutant(
        "no copy of a page at a branch",
        "radixcache/radix.py",
        "lease._copies.append(PageCopy(page, pages.item(0), position % page_size))",
        "pass",
        f"{INDEX} {ENGINE}/test_engine.py",
    ),
    Mutant(
        "a half-filled page that others hold is written to",
        "radixcache/radix.py",
        "position == lease.node.end and self._tree.held_alone(lease.node, position, page)",
        "position == lease.node.end",
        INDEX,
    ),
    Mutant(
        "a hold too few on the last page",
        "radixcache/radix.py",
        "if end % page_size and last >= new_first:",
        "if False:",
        INDEX,
    ),
    Mutant(
        "a page stays held",
        "radixcache/pages.py",
        "left = refs[page] = refs.item(page) - 1",
        "left = refs[page] = refs.item(page) - 0",
        INDEX,
    ),
    Mutant(
        "part of a page in flight is shared",
        "radixcache/radix.py",
        "position = max(written, whole_pages)",
        "position = max(written, position)",
        f"{INDEX} {ENGINE}/test_engine.py",
    ),
    Mutant(
        "pins of what is in flight",
        "radixcache/radix.py",
        "if self._find(node, position, tokens[:0])[2] < position:",
        "if False:",
        f"{INDEX}/test_radix_facts.py",
    ),
    Mutant(
        "eviction takes the whole leaf",
        "radixcache/radix.py",
        "kept = max(0, leaf.num_pages - (num_pages - freed))",
        "kept = 0",
        INDEX,
    ),
    Mutant(
        "a trimmed leaf keeps its tokens",
        "radixcache/radix.py",
        "end = (leaf.first_page + kept) * self.page_size if kept else leaf.start",
        "end = leaf.end if kept else leaf.start",
        INDEX,
    ),
    Mutant(
        "what a lease stands on is evicted",
        "radixcache/radix.py",
        "if not node.children and not node.leases:\n            if node.parent",
        "if not node.children:\n            if node.parent",
        INDEX,
    ),
    Mutant(
        "the lower half of what a split cuts is not in flight",
        "radixcache/tree.py",
        "            self.in_flight[node] = position\n",
        "            self.in_flight.pop(node)\n",
        INDEX,
    ),
    Mutant(
        "what merges is not in flight",
        "radixcache/tree.py",
        "self.in_flight[child] = written",
        "pass",
        f"{INDEX}/test_radix_facts.py",
    ),
    Mutant(
        "the step stays in flight",
        "radixcache/radix.py",
        "tree.in_flight.clear()",
        "pass",
        INDEX,
    ),
    Mutant(
        "reserved pages count as evictable",
        "radixcache/held.py",
        "self._num += count",
        "self._num += 0",
        INDEX,
    ),
    Mutant(
        "what a lease has found counts as evictable",
        "radixcache/held.py",
        "            self._is_counted = False\n",
        "            pass\n",
        INDEX,
    ),
    Mutant(
        "a cut-off change counts as whole",
        "radixcache/base.py",
        "self._thread, self._inside = get_ident(), True",
        "self._thread, self._inside = get_ident(), False",
        f"{INDEX} {ENGINE}/test_cut_off.py",
    ),
    Mutant(
        "two threads in an engine",
        "runtime/engine/engine.py",
        "if self._thread is not None and self.has_work:",
        "if False:",
        f"{ENGINE} tests/runtime/test_threads.py",
    ),
    Mutant(
        "two threads in a cache",
        "radixcache/base.py",
        "if self._thread != get_ident():",
        "if False:",
        f"{ENGINE}/test_cut_off.py",
    ),
    Mutant(
        "an engine that is cut off does not recover",
        "runtime/engine/engine.py",
        "        except BaseException:\n            self._recover()\n",
        "        except BaseException:\n            self._cut_off = False\n",
        ENGINE,
    ),
    Mutant(
        "salt: one tree for all",
        "radixcache/radix.py",
        "root = self._tree.root(namespace)",
        "root = self._tree.root(None)",
        INDEX,
    ),
    Mutant(
        "salt: what was computed is remembered without",
        "runtime/engine/explain.py",
        "self._known.remember(tokens, namespace)",
        "self._known.remember(tokens)",
        f"{ENGINE}/test_explain.py",
    ),
    Mutant(
        "salt: scores for all",
        "runtime/sampling/prompt_logprobs.py",
        "return self.tree.acquire(tokens, namespace, include_last=include_last)",
        "return self.tree.acquire(tokens, None, include_last=include_last)",
        f"{ENGINE}/test_prompt_logprobs.py",
    ),
    Mutant(
        "salt: kept logits for all",
        "runtime/engine/logits_cache.py",
        "return namespace, blake2b(",
        "return None, blake2b(",
        f"{ENGINE}/test_logits_cache.py",
    ),
    Mutant(
        "the logits of any token are kept as those at a prompt's end",
        "runtime/engine/engine.py",
        "if chunk.ends_prompt:",
        "if True:",
        f"{ENGINE}/test_logits_cache.py",
    ),
    Mutant(
        "a flush leaves the kept logits",
        "runtime/engine/engine.py",
        "            self.scheduler.kept.clear()",
        "            pass",
        f"{ENGINE}/test_logits_cache.py",
    ),
    Mutant(
        "a hit of the whole prompt in flight",
        "radixcache/radix.py",
        "if include_last and written < len(tokens):",
        "if include_last and position < len(tokens):",
        INDEX,
    ),
    Mutant(
        "salt: tokens of conversations for all",
        "runtime/tokens/history.py",
        'return cache_salt is not None, cache_salt or "", text',
        'return False, "", text',
        "tests/runtime/tokens/test_history.py",
    ),
    Mutant(
        "salt: pins have one name for all",
        "radixcache/base.py",
        "if (namespace, name) in self._pins:",
        "if name in {pinned for _, pinned in self._pins}:",
        f"{INDEX} {SERVER}/test_tenants.py",
    ),
    Mutant(
        "salt: pins without a share",
        "radixcache/base.py",
        "if num_own > self.pin_share:",
        "if False:",
        f"{SERVER}/test_tenants.py",
    ),
    Mutant(
        "salt: a prefix's name is taken by others",
        "runtime/engine/named_prefixes.py",
        "        if (cache_salt, name) in self._prefixes:",
        "        if any(name == other for _, other in self._prefixes):",
        f"{SERVER}/test_tenants.py",
    ),
    Mutant(
        "salt: a prefix is found by its name alone",
        "runtime/engine/named_prefixes.py",
        "        self.drop_expired()\n        if (cache_salt, name) not in",
        "        cache_salt = {n: s for s, n in self._prefixes}.get(name)\n"
        "        if (cache_salt, name) not in",
        f"{SERVER}/test_tenants.py",
    ),
    Mutant(
        "salt: the list of prefixes is of all",
        "runtime/server/admin/prefixes.py",
        " if prefix.cache_salt == cache_salt]",
        "]",
        f"{SERVER}/test_tenants.py",
    ),
    Mutant(
        "salt: a response is found by its id alone",
        "runtime/server/api/response_store.py",
        'kept = self._stored[salt].get(name or "") if salt in self._stored else None',
        "kept = next((own[name] for own in self._stored.values() if name in own), None)",
        f"{SERVER}/test_responses.py",
    ),
    Mutant(
        "salt: quotas count the pins of all",
        "runtime/server/admin/prefixes.py",
        "llm.cache.pinned_pages_of(cache_salt)",
        "llm.cache.pinned_pages",
        f"{SERVER}/test_tenants.py",
    ),
    Mutant(
        "salt: a digest that guesses can be compared with",
        "runtime/server/admin/cache.py",
        ", key=_KEY)",
        ")",
        f"{SERVER}/test_tenants.py",
    ),
    Mutant(
        "hash-block: a pin that only looks",
        "radixcache/hash_block.py",
        "        self._hold(lease, pages)\n        self._use(lease)\n",
        "        self._hold(lease, pages)\n",
        RULES,
    ),
    Mutant(
        "hash-block: pins count a shared page twice",
        "radixcache/base.py",
        "len(np.unique(np.concatenate(tables))) if",
        "len(np.concatenate(tables)) if",
        RULES,
    ),
    Mutant(
        "hash-block: a failed step leaves the hashes of its last page",
        "radixcache/hash_block.py",
        "for page in reversed(self._published):",
        "for page in [*self._published][:-1]:",
        RULES,
    ),
    Mutant(
        "hash-block: a failed step counts as evictions",
        "radixcache/hash_block.py",
        "in reversed(self._published):\n            self._forget(page)",
        "in reversed(self._published):\n            self._evict(page)",
        RULES,
    ),
    Mutant(
        "hash-block: the leases of a failed step go back first come, first served",
        "radixcache/hash_block.py",
        "in reversed(self._in_flight.items()):",
        "in [*self._in_flight.items()]:",
        RULES,
    ),
    Mutant(
        "hash-block: a failed step leaves a page that was reserved",
        "radixcache/hash_block.py",
        "self._let_go(lease, -(-num_tokens // self.page_size))",
        "self._let_go(lease, num_tokens // self.page_size + 1)",
        RULES,
    ),
    Mutant(
        "hash-block: written tokens are in flight",
        "radixcache/hash_block.py",
        "in_flight = lease in self._in_flight",
        "in_flight = True",
        RULES,
    ),
    Mutant(
        "hash-block: written tokens after what is in flight",
        "radixcache/hash_block.py",
        "if written and lease in self._in_flight:",
        "if False:",
        RULES,
    ),
    Mutant(
        "hash-block: a look takes pages from the line",
        "radixcache/hash_block.py",
        "        self._hold(lease, pages)\n        lease.cached",
        "        self._hold(lease, pages)\n        self._use(lease)\n        lease.cached",
        RULES,
    ),
    Mutant(
        "hash-block: a page is in use by whoever looks",
        "radixcache/hash_block.py",
        "table[users == 1]",
        "table[self.pool.refs[table] == 1]",
        RULES,
    ),
    Mutant(
        "hash-block: evictions of what leases look at",
        "radixcache/hash_block.py",
        "if self._blocks[page] is not None and not self.pool.refs[page]:",
        "if self._blocks[page] is not None:",
        RULES,
    ),
    Mutant(
        "hash-block: evictions that nobody counts",
        "radixcache/hash_block.py",
        "                self._evict(page)\n                evicted",
        "                self._forget(page)\n                evicted",
        RULES,
    ),
    Mutant(
        "hash-block: pages are taken from leases that look",
        "radixcache/free_queue.py",
        "                while self._refs[page]:\n",
        "                if self._refs[page]:\n",
        RULES,
    ),
    Mutant(
        "hash-block: a reset beside leases that look",
        "radixcache/base.py",
        "        if self._leases:\n            raise",
        "        if any(getattr(lease, 'uses', 1) for lease in self._leases):\n            raise",
        RULES,
    ),
    Mutant(
        "access: the cache for every client",
        "runtime/server/admin/cache.py",
        "APIRouter(dependencies=[ADMINISTRATOR])",
        "APIRouter()",
        f"{SERVER}/test_access.py",
    ),
    Mutant(
        "access: metrics for every client",
        "runtime/server/app.py",
        ", dependencies=[ADMINISTRATOR])",
        ")",
        f"{SERVER}/test_tenants.py",
    ),
    Mutant(
        "access: any key administrates",
        "runtime/server/http/access.py",
        "if _has(keys, options.admin_key):",
        "if any(keys):",
        f"{SERVER}/test_access.py",
    ),
    Mutant(
        "access: who has no key administrates in spite of keys",
        "runtime/server/http/access.py",
        "if options.api_key is not None or options.admin_key is not None or is_foreign:",
        "if is_foreign:",
        f"{SERVER}/test_access.py",
    ),
    Mutant(
        "access: any machine administrates",
        "runtime/server/http/access.py",
        "_is_local(client[0]) and ",
        "",
        f"{SERVER}/test_access.py",
    ),
    Mutant(
        "access: a proxy is its clients",
        "runtime/server/http/access.py",
        " and not forwarded",
        "",
        f"{SERVER}/test_access.py",
    ),
    Mutant(
        "access: any host name",
        "runtime/server/http/access.py",
        "and not _is_address(name):\n                raise",
        "and False:\n                raise",
        f"{SERVER}/test_access.py",
    ),
    Mutant(
        "access: any web page",
        "runtime/server/http/access.py",
        'if (origin := headers.get("origin")) is not None:',
        "if (origin := None) is not None:",
        f"{SERVER}/test_access.py",
    ),
    Mutant(
        "exact: linear layers of transformers as torch has them",
        "runtime/model/operations/exact.py",
        "    pack_linears(model)\n",
        "",
        EXACT,
    ),
    Mutant(
        "native: blocks of the depth are summed apart",
        "kernels/native/linear.h",
        "tile<P>(n, a + row * depth + k * n, b, deep, to, k == 0);",
        "float more[MOST * N];\n"
        "                        tile<P>(n, a + row * depth + k * n, b, deep, more, true);\n"
        "                        for (int e = 0; e < n * N; e++)\n"
        "                            to[e] = k ? to[e] + more[e] : more[e];",
        "tests/kernels/test_native_linear.py",
    ),
    Mutant(
        "native: the last layer's rows in another order",
        "kernels/native/model.h",
        "x + wanted[i] * width",
        "x + wanted[count - 1 - i] * width",
        "tests/runtime/model/test_decoder.py",
    ),
    Mutant(
        "exact: elements for scalar code",
        "runtime/model/operations/exact.py",
        "-x.numel() % _VECTORS",
        "0",
        EXACT,
    ),
    Mutant(
        "exact: a load without a check",
        "runtime/model/load.py",
        "    if exact:\n        exactness.check(model)",
        "    if False:\n        exactness.check(model)",
        EXACT,
    ),
    Mutant(
        "exact: the check compares no logits",
        "runtime/model/exact.py",
        "for found in others_logits:",
        "for found in ():",
        EXACT,
    ),
    Mutant(
        "exact: the check compares no values",
        "runtime/model/exact.py",
        'zip(("keys", "values"), layer, strict=True)',
        'zip(("keys",), layer[:1], strict=True)',
        EXACT,
    ),
    Mutant(
        "what is reported of equal log-probabilities depends on the company",
        "runtime/sampling/sampler.py",
        "for count in {*limits} - {max(limits)}:",
        "for count in ():",
        EXACT,
    ),
    Mutant(
        "a state is found before it is written",
        "radixcache/states.py",
        "found = self._kept.get(key, found)",
        "found = self._written.get(key, self._kept.get(key, found))",
        STATES,
    ),
    Mutant(
        "a state of a failed step is kept",
        "radixcache/states.py",
        'called again. O(num_slots).\n        """\n',
        'called again. O(num_slots).\n        """\n        self._kept.update(self._written)\n',
        STATES,
    ),
    Mutant(
        "a state is given one token late",
        "runtime/engine/state_planner.py",
        "done, slot = sequence.tokens[: sequence.num_computed], plan.slot",
        "done, slot = sequence.tokens[: sequence.num_computed + 1], plan.slot",
        STATES,
    ),
    Mutant(
        "a state in mid-chunk is that of the chunk's end",
        "runtime/model/recurrent.py",
        "if start < first + count:",
        "if False:",
        f"{ENGINE}/test_hybrids.py",
    ),
    Mutant(
        "a state is found by its length alone",
        "radixcache/states.py",
        "key = Key(namespace, length, digest.copy().digest())",
        "key = next((k for k in self._kept if k.length == length), Key(None, 0, b''))",
        STATES,
    ),
    Mutant(
        "a sequence begins from what is in a fresh slot",
        "runtime/model/recurrent.py",
        "for live in self._live.values() if fresh else ():",
        "for live in ():",
        f"{ENGINE}/test_hybrids.py",
    ),
    Mutant(
        "a state that the step reads is evicted",
        "radixcache/states.py",
        "if self._kept[key].slot not in self._reads:",
        "if True:",
        STATES,
    ),
    Mutant(
        "a hit of a hybrid goes on from where its KV ends",
        "runtime/engine/state_planner.py",
        "lease.cached_tokens = depth",
        "pass",
        STATES,
    ),
]


def survives(mutant: Mutant) -> bool:
    """Whether the tests pass on it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in PARTS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=ignored)
        for file in FILES:
            shutil.copy(ROOT / file, copy / file)
        path = copy / mutant.path
        path.write_text(changed(path.read_text(), mutant))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *mutant.tests.split()], cwd=copy, capture_output=True, text=True, check=False
        )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutant.name}: the tests did not run\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def changed(text: str, mutant: Mutant) -> str:
    """The text of the mutant's file."""
    assert text.count(mutant.old) == 1, f"{mutant.name}: {text.count(mutant.old)} places"
    return text.replace(mutant.old, mutant.new)


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if all(word in m.name for word in words)]
    survivors = 0
    for mutant in chosen:
        start = time.monotonic()
        lives = survives(mutant)
        survivors += lives
        verdict = "SURVIVES" if lives else "killed"
        print(f"{verdict:8} {time.monotonic() - start:5.0f} s  {mutant.name}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
