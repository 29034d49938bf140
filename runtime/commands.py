"""Runs the commands of the command line, with the flags that `cli.py` has parsed.

torch and transformers take seconds to import, so a command imports them only once it needs a model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from threading import Thread
from typing import TYPE_CHECKING, Any

from radixcache import __version__
from radixcache.errors import InvalidRequest, MissingDependency
from radixcache.runtime.checkpoints.model_files import check_model
from radixcache.runtime.config.flags import settings_of
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.model import progress
from radixcache.runtime.sampling.params import SamplingArgs, SamplingParams
from radixcache.runtime.server.http.listener import address_of, listen

if TYPE_CHECKING:
    from radixcache import LLM, Chat, RequestOutput
    from radixcache.runtime.engine.input_processor import Prompt

Note = Callable[[str], None]

_SAMPLING = (*(one.name for one in settings_of(SamplingArgs)), "seed", "stop", "n")
_RAY = {"RAY_py_gcs_connect_timeout_s": "8", "RAY_gcs_server_port_wait_time_s": "1"}
"""For how long Ray, which reads it at its import, tries to join a cluster: 20 seconds, not 240."""

_CHAT_COMMANDS = "/reset forgets the conversation, /stats shows hits, /exit or /quit leaves"


def demo(args: argparse.Namespace) -> int:
    check_model(args.model)
    _share_cores()
    from radixcache.runtime.demo import play, restart

    _silence(args)
    run = restart.run if args.restart else play.run
    return run(_given(args, _names(EngineArgs)), args.json)


def chat(args: argparse.Namespace) -> int:
    given = _given(args, _SAMPLING)
    SamplingParams(**given)  # refuses bad values before the model is loaded
    system = args.system if args.system_file is None else _read(args.system_file)
    _take_model(args)
    llm = _load(args)
    if llm.tokenizer is not None:
        llm.tokenizer.chat_template()  # refused before the first question, if there is none
    from radixcache import Chat
    from radixcache.runtime.demo.script import TABLE

    note = _make_note()
    if system is None and args.model is None:
        system = TABLE.read_text()
        note("The bundled model answers questions about tables only. You can ask about this one:")
        note(system)
    params = replace(llm.default_params, **{"max_tokens": 512, **given})
    for text in (*llm.notes, f"answers by {params.describe()}"):
        note(text)
    note(f"{_CHAT_COMMANDS}; Ctrl-C aborts an answer.")
    start = Chat(llm, system)
    chat = start.fork()
    while (line := _ask_user()) not in (None, "/exit", "/quit"):
        if line == "/reset":
            chat = start.fork()
        elif line == "/stats":
            note(_describe_cache(llm))
        elif line.startswith("/"):
            note(_CHAT_COMMANDS)
        elif line:
            _answer(chat, line, params, note)
    return 0


def _answer(chat: Chat, text: str, params: SamplingParams, note: Note) -> None:
    """Print the answer as it comes, and a note on its costs."""
    output = None
    try:
        with closing(chat.stream(text, params)) as stream:
            for output in stream:
                print(output.outputs[0].new_text, end="", flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        note("aborted: the conversation is as it was before the question")
    except InvalidRequest as error:
        note(f"{error} (/reset starts anew)")
    else:
        print(flush=True)
        if output is not None:
            note(_describe(output))


def _ask_user() -> str | None:
    """The next line of input, None at the end."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 (gives `input` a history and an editable line)
    try:
        return input("> " if interactive else "").strip()
    except UnicodeDecodeError:
        raise InvalidRequest("cannot read -: it is not UTF-8 text") from None
    except EOFError:
        if interactive:
            print()
        return None


def generate(args: argparse.Namespace) -> int:
    given = _given(args, _SAMPLING)
    SamplingParams(**given)  # refuses bad values before the model is loaded
    prompts = _prompts(args)
    _take_model(args)
    llm = _load(args)
    params = replace(llm.default_params, **given)
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    note = _make_note()
    note(llm.engine.model.placement)
    for output in outputs:
        if args.json:
            print(json.dumps(asdict(output)))
        else:
            print(*(completion.text for completion in output.outputs), sep="\n")
        note(_describe(output))
    return 1 if any(output.error for output in outputs) else 0


def serve(args: argparse.Namespace) -> int:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # the event loop needs a core
    for package in ("pydantic_settings", "fastapi", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise MissingDependency(
                f"radixcache serve needs {package}: pip install '.[server]' in a checkout"
            )
    from radixcache.runtime.server.settings import SETTINGS, read_settings

    _take_model(args)
    engine, server = read_settings(_given(args, ("config", *SETTINGS)))
    # The port and the model are checked before torch is imported.
    with listen(server.host, server.port) as listener:
        check_model(engine.model)
        if server.replicas is not None and find_spec("ray") is None:
            raise MissingDependency("--replicas needs ray: pip install '.[ray]' in a checkout")
        if server.replicas is not None and engine.kv_events_config is not None:
            raise InvalidRequest("--kv-events-config is for one server, not yet for --replicas")
        if engine.model is not None:
            where = "" if server.replicas is not None else f" {address_of(listener)}"
            print(f"Loading {engine.model} ...{where}", file=sys.stderr, flush=True)
        if server.replicas is not None:
            for name, value in _RAY.items() if "RAY_ADDRESS" in os.environ else ():
                os.environ.setdefault(name, value)
            from radixcache.runtime.router import deploy

            deploy.run(engine, server, listener)
            return 0
        from radixcache.runtime.server.loading import Loading

        with Loading(server, listener) as loading:
            with progress.watch(loading.report):
                llm = _load(engine, "radixcache.runtime.server.app")
            from radixcache.runtime.server.app import create_app

            def close() -> None:
                llm.close()
                if llm.offload is not None:
                    print(*llm.offload.describe(), sep="\n", file=sys.stderr, flush=True)

            loading.serve(create_app(llm, server), close)
    return 0


def explain(args: argparse.Namespace) -> int:
    """Ask a running server, without torch or a model."""
    from radixcache.runtime.explanation import summarise
    from radixcache.runtime.server.http import client

    body = _explain_body(args)
    if args.cache_salt is not None:
        body["cache_salt"] = args.cache_salt
    key = (args.api_key or os.environ.get("RADIXCACHE_API_KEY", "")).strip()
    answer = client.post(args.url, "/v1/explain", body, key)
    try:
        sentences = [miss["text"] for miss in answer["explanation"]]
        text = summarise(answer["prompt_tokens"], answer["cached_tokens"], sentences)
    except (LookupError, TypeError, ValueError):
        raise InvalidRequest(f"what {args.url} answers is no explanation") from None
    print(json.dumps(answer) if args.json else text)
    return 0


def _explain_body(args: argparse.Namespace) -> dict[str, Any]:
    """The body for the prompt or the messages to explain."""
    if (args.PROMPT is None) == (args.messages is None):
        raise InvalidRequest("give either a prompt or --messages FILE")
    if args.PROMPT is not None:
        return {"prompt": _read("-") if args.PROMPT == "-" else args.PROMPT}
    text = _read(args.messages)
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{args.messages} is not JSON") from None
    return {**messages} if isinstance(messages, dict) else {"messages": messages}


def cache(args: argparse.Namespace) -> int:
    from radixcache.runtime.kv_offload import files

    folder = Path(args.DIR)
    if args.ACTION == "clear":
        files.clear(folder)
        print(f"{folder} holds no pages any more")
        return 0
    if args.ACTION == "inspect":
        found = [files.describe(one) for one in files.contents(folder)]
        print("\n".join(found) or f"{folder} holds no pages")
        _note_use(folder)
        return 0
    from tqdm import tqdm

    track = partial(tqdm, desc="Pages", unit="page", leave=False, disable=not sys.stderr.isatty())
    count, spoilt = files.verify(folder, track)
    what = f"{spoilt:,} of them spoilt, to be computed again" if spoilt else "all are right"
    print(f"pages that were read: {count:,}; {what}" if count else f"{folder} holds no pages")
    _note_use(folder)
    return 1 if spoilt else 0


def _note_use(folder: Path) -> None:
    from radixcache.runtime.kv_offload.files import is_locked

    if is_locked(folder):
        print("in use by a process, which writes the rest of what it has cached when it ends")


def info(args: argparse.Namespace) -> int:
    """Print versions and what runs here, or why it does not."""
    check_model(args.MODEL)
    import torch
    import transformers

    from radixcache.kernels import trial
    from radixcache.kernels.native.library import problem as native_problem
    from radixcache.runtime.model import exact, quantized_activations
    from radixcache.runtime.model.host.device import driver_problem, nvidia_driver

    problem, threads, driver = native_problem(), torch.get_num_threads(), nvidia_driver()
    gpu = [("GPU", "none")]
    if torch.cuda.is_available():
        gpu = [
            ("GPU", f"{torch.cuda.get_device_name()}, driver {driver or 'unknown'}"),
            ("CUDA of torch", torch.version.cuda or "ROCm"),
            ("FlashInfer", _version_of("flashinfer-python") or "not installed: '.[cuda]'"),
            ("Triton", _version_of("triton") or "not installed"),
            ("nvcc", which("nvcc") or "none: what FlashInfer has not built cannot be compiled"),
        ]
    elif driver is not None:
        gpu = [("GPU", driver_problem(driver))]
    for name, text in (
        ("radixcache", __version__),
        ("python", sys.version.partition(" ")[0]),
        ("torch", f"{torch.__version__}, {threads} thread{'s' * (threads != 1)}"),
        ("transformers", transformers.__version__),
        *gpu,
        ("native kernels", "yes" if problem is None else f"no, models run slower: {problem}"),
        ("exact mode", exact.describe()),
        ("8-bit activations", quantized_activations.describe()),
    ):
        print(f"{name:17} {text}")
    if args.MODEL is not None:
        print("", *_load(EngineArgs(model=args.MODEL)).notes, sep="\n")
        for task, outcome in trial.outcomes.items():
            print(f"{task} in {outcome.taken}", *outcome.reasons, sep="\n  not in ")
    return 0


def _version_of(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts, from the one source that was named."""
    named = args.prompt is not None or args.prompt_file is not None
    if not named and args.PROMPT is None:  # a single text is the prompt
        args.MODEL, args.PROMPT = None, args.MODEL
        if (one := args.PROMPT or "").endswith(".gguf") or os.path.isfile(f"{one}/config.json"):
            raise InvalidRequest(f"{one} is a model: give a prompt after it")
    if named is (args.PROMPT is not None):
        raise InvalidRequest("give one of a prompt, --prompt TEXT and --prompt-file FILE")
    if args.prompt is not None:
        sources = {"--prompt": args.prompt}
    elif args.PROMPT not in (None, "-"):
        sources = {"the prompt": args.PROMPT}
    else:
        sources = {name: _read(name) for name in args.prompt_file or ["-"]}
    if not args.jsonl:
        return list(sources.values())
    return [
        _parse_record(f"{name}:{number}", line)
        for name, text in sources.items()
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]


def _parse_record(where: str, line: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where}: not JSON: {error.msg}") from None
    except (RecursionError, ValueError):  # ValueError: a number with thousands of digits
        raise InvalidRequest(f"{where}: JSON that is too deep, or has too long a number") from None
    match record:
        case {"prompt": str(text), **rest} if not rest:
            return text
        case {"prompt_token_ids": [*ids], **rest} if not rest and all(type(i) is int for i in ids):
            return {"prompt_token_ids": ids}
    raise InvalidRequest(
        f'{where}: not a prompt: say {{"prompt": "..."}} or {{"prompt_token_ids": [1, 2]}}'
    )


# What the commands share.


def _take_model(args: argparse.Namespace) -> None:
    """Take the positional MODEL as --model."""
    if args.MODEL is not None and args.model is not None:
        raise InvalidRequest(f"two models are given: {args.MODEL} and --model {args.model}")
    args.model = args.model if args.MODEL is None else args.MODEL


def _load(args: argparse.Namespace | EngineArgs, *modules: str) -> LLM:
    """The model; `modules`, which are needed next, are imported while its weights are read."""
    check_model(args.model)
    _share_cores()
    with _show_progress():
        progress.report("importing torch", 0.0)
        with _without_collections():
            from radixcache import LLM

        _silence(args)
        for module in modules:
            Thread(target=import_module, args=(module,), daemon=True).start()
        return LLM(**_given(args, _names(EngineArgs)))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Imports make a million objects and little garbage: looking for it takes a fifth of their
    time, and so would each later look. What they made is never looked at again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _show_progress() -> Iterator[None]:
    """Show a bar on a terminal while loading, if that takes more than a second."""
    from tqdm import tqdm

    bar = tqdm(total=1, leave=False, disable=None, delay=1, mininterval=0, miniters=0)

    def show(stage: str, share: float | None) -> None:
        bar.bar_format = "{desc} ..." if share is None else "{desc} {percentage:3.0f} % {bar}"
        bar.set_description_str(stage, refresh=False)
        bar.update((bar.n if share is None else share) - bar.n)

    with bar, progress.watch(show):
        yield


def _silence(args: argparse.Namespace | EngineArgs) -> None:
    """Hide transformers' own bars; show downloads and warnings on a terminal only."""
    seen = args.model is not None and sys.stderr.isatty()
    if "transformers" not in sys.modules and not (seen and not Path(str(args.model)).exists()):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # both read these
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if seen else "error")
        return
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    fetching = seen and not are_progress_bars_disabled()
    logging.disable_progress_bar()  # the hub's, too
    if fetching:
        enable_progress_bars()
    if not seen:
        logging.set_verbosity_error()


def _share_cores() -> None:
    """Let torch's threads sleep rather than spin if the machine has other work to do.

    libgomp's threads busy-wait for each other for milliseconds. While another process holds a core,
    each operation then takes up to 25 times as long. libgomp itself uses 1000 once it knows that
    cores are shared; on an idle machine that costs a tenth of the decoding speed.
    """
    if os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _names(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in settings_of(kind))


def _given(args: argparse.Namespace | EngineArgs, names: tuple[str, ...]) -> dict[str, Any]:
    """The given flags, without those that are left to defaults."""
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def _read(name: str) -> str:
    """The text of a file, or of standard input if the name is "-"."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"cannot read {name}: it is not UTF-8 text") from None


def _make_note() -> Note:
    """A function that prints remarks on standard error, dim on a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    return lambda text: console.print(text, style="dim")


def _describe(output: RequestOutput) -> str:
    """A request's costs, in one line."""
    metrics = output.metrics
    if output.error is not None:
        return f"failed: {output.error}"
    ttft = "" if metrics.ttft is None else f", TTFT {1000 * metrics.ttft:,.0f} ms"
    speed = "" if (rate := metrics.tokens_per_second) is None else f", {rate:,.0f} tokens/s"
    loops = [completion.repetition for completion in output.outputs if completion.repetition]
    end = "; cut at --max-tokens" if "length" in [x.finish_reason for x in output.outputs] else ""
    if loops:
        end = f"; it repeats its last {loops[0]} tokens (try --repetition-penalty)"
    return (
        f"prompt tokens: {len(output.prompt_token_ids):,}, {output.num_cached_tokens:,} cached, "
        f"{metrics.prefilled_tokens:,} prefilled{ttft}{speed}{end}"
    )


def _describe_cache(llm: LLM) -> str:
    stats, pool = llm.cache.stats, llm.cache.pool
    return (
        f"requests: {stats.requests:,}; {stats.hit_tokens:,} of {stats.query_tokens:,} prompt "
        f"tokens cached ({stats.hit_rate:.1%}); {stats.evicted_tokens:,} tokens evicted; "
        f"{pool.num_pages - pool.num_free:,} of {pool.num_pages:,} pages in use"
    )
