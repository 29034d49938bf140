"""The command line: `radixcache demo`, `chat`, `generate`, `serve`, `explain`, `bench`,
`report`, `cache`, `info`.

Help and bad input answer at once: `commands.py` runs the commands, and imports torch only where
one needs a model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from radixcache import __version__
from radixcache.errors import InvalidRequest, RadixCacheError
from radixcache.runtime.commands import cache, chat, demo, explain, generate, info, serve
from radixcache.runtime.config.flags import add_flags
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.sampling.params import SamplingArgs
from radixcache.runtime.server.args import ServerArgs

_RUNTIME = ("torch", "transformers", "tokenizers", "huggingface_hub", "rich", "tqdm")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        args = _parser().parse_args(argv)
        code: int = args.handler(args)
        sys.stdout.flush()
    except RadixCacheError as error:
        print(f"radixcache: error: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:  # numpy's says how much it was
        print(f"radixcache: error: out of memory: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in _RUNTIME:
            raise
        print(
            f"radixcache: error: {error.name} is missing: pip install '.[runtime]' in a checkout "
            "(or '.[bench]', to compare caches without a model)",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has left: discard what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


_FLAGS_OF_OTHERS = {
    "--block-size": "--page-size",
    "--gpu-memory-utilization": "--kv-cache-memory-bytes",
    "--enable-prefix-caching": "--cache radix",
    "--no-enable-prefix-caching": "--cache none",
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--tp-size", "--tp"), ""),
}
"""Our names for flags of vLLM and SGLang, where the closest match would be wrong; "" is none."""


class _Parser(argparse.ArgumentParser):
    """Refuses bad flags in one sentence, like any other bad input."""

    def parse_known_args(  # type: ignore[override]  # each command reports its own unknown flags
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        waits = getattr(known, "MODEL", None) and getattr(known, "PROMPT", "") is None
        if waits and len(unknown) == 1 and not unknown[0].startswith("-"):
            known.PROMPT = unknown.pop()  # behind flags that are behind the model
        if unknown:
            flag = unknown[0].partition("=")[0]
            close = get_close_matches(flag, self._option_string_actions.keys() - {"--help"}, 1)
            if (ours := _FLAGS_OF_OTHERS.get(flag)) is not None:
                close = [ours] if ours.partition(" ")[0] in self._option_string_actions else []
            hint = f": did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        raise InvalidRequest(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="radixcache",
        description="Language models with a token-exact radix-tree prefix cache.",
    )
    parser.add_argument("--version", action="version", version=f"radixcache {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_chat(commands)
    _add_generate(commands)
    _add_serve(commands)
    _add_explain(commands)
    _add_bench(commands)
    _add_report(commands)
    _add_cache(commands)
    _add_info(commands)
    return parser


def _add_command(commands: Any, handler: Callable[..., int], summary: str) -> _Parser:
    parser: _Parser = commands.add_parser(handler.__name__, help=summary, description=f"{summary}.")
    parser.set_defaults(handler=handler)
    return parser


def _add_demo(commands: Any) -> None:
    summary = "three users ask about two documents, with the cache on and off"
    parser = _add_command(commands, demo, summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--restart", action="store_true", help="show that a conversation outlives its process"
    )
    # The demo runs both caches, and two models.
    left_out = (
        "cache", "kv_events_config", "host_memory", "kv_dir", "kv_dir_size",
    )  # fmt: skip
    _add_engine(parser, left_out)


def _add_chat(commands: Any) -> None:
    parser = _add_command(commands, chat, "talk with a model; each turn computes only what is new")
    _add_model(parser)
    system = parser.add_mutually_exclusive_group()
    system.add_argument("--system", metavar="TEXT", help="the system message")
    system.add_argument("--system-file", metavar="FILE", help="the system message, from a file")
    _add_sampling(parser)
    _add_engine(parser)


def _add_generate(commands: Any) -> None:
    parser = _add_command(commands, generate, "complete prompts")
    _add_model(parser)
    parser.add_argument("PROMPT", nargs="?", help="prompt text; - is stdin")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="a prompt that may start with -")
    source.add_argument(
        "--prompt-file", metavar="FILE", nargs="+", help="files, a prompt each; - is stdin"
    )
    parser.add_argument(
        "--jsonl",
        action="store_true",
        help='read one prompt a line: {"prompt": "..."} or {"prompt_token_ids": [1, 2]}',
    )
    parser.add_argument("--json", action="store_true", help="print each output as a line of JSON")
    parser.add_argument("--n", type=int, metavar="N", help="completions per prompt (1)")
    _add_sampling(parser)
    _add_engine(parser)


def _add_serve(commands: Any) -> None:
    parser = _add_command(commands, serve, "an OpenAI-compatible server")
    _add_model(parser)
    group = parser.add_argument_group(
        "server",
        "Each flag may also be a variable, such as RADIXCACHE_PORT, or a line of --config.",
    )
    group.add_argument("--config", metavar="FILE", help="YAML like `port: 8001`; flags override")
    add_flags(group, ServerArgs)
    _add_sampling(parser, of_one_prompt=False)
    _add_engine(parser, leave_out=())


def _add_explain(commands: Any) -> None:
    summary = "how much of a prompt a running server has cached, and why not the rest"
    parser = _add_command(commands, explain, summary)
    parser.add_argument("PROMPT", nargs="?", help="prompt text of a completion; - is stdin")
    parser.add_argument(
        "--messages", metavar="FILE", help="file of messages or a chat's body; - is stdin"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="its URL (%(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="API key; better RADIXCACHE_API_KEY")
    parser.add_argument("--cache-salt", metavar="SALT", help="salt of the request, if it has one")
    parser.add_argument("--json", action="store_true", help="print the server's answer")


def _add_cache(commands: Any) -> None:
    parser = _add_command(commands, cache, "inspect, verify or empty a --kv-dir")
    what = "list the contents, compare the checksums of all pages, or delete them"
    parser.add_argument("ACTION", choices=("inspect", "verify", "clear"), help=what)
    parser.add_argument("DIR", help="the folder of --kv-dir")


def _add_info(commands: Any) -> None:
    parser = _add_command(commands, info, "what runs here: versions, threads, native kernels")
    parser.add_argument("MODEL", nargs="?", help="a model that is loaded, to say how it runs")


def _add_report(commands: Any) -> None:
    report = import_module("radixcache.plugins.report")  # plugins are above the runtime, too
    parser = _add_command(commands, report.report, report.SUMMARY)
    parser.add_argument("FILE", help="the file of JSON lines that RADIXCACHE_REPORT named")


def _add_bench(commands: Any) -> None:
    # By name: the benchmark is above the runtime, which must not import it.
    bench = import_module("radixcache.bench.cli")
    parser = commands.add_parser("bench", help=bench.SUMMARY, description=f"{bench.SUMMARY}.")
    bench.add_flags(parser)
    parser.set_defaults(handler=bench.run)


def _add_sampling(parser: argparse.ArgumentParser, *, of_one_prompt: bool = True) -> None:
    group = parser.add_argument_group(
        "sampling", "The defaults are the model's own, and temperature 1 if it has none."
    )
    add_flags(group, SamplingArgs)
    if not of_one_prompt:
        return
    group.add_argument("--seed", type=int, metavar="N", help="make sampled tokens repeatable")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("MODEL", nargs="?", help="the same as --model MODEL")


def _add_engine(
    parser: argparse.ArgumentParser, leave_out: tuple[str, ...] = ("kv_events_config",)
) -> None:
    add_flags(parser.add_argument_group("engine"), EngineArgs, leave_out)


if __name__ == "__main__":
    sys.exit(main())
