"""Loads a model: from a folder or the hub, onto a device, and through the gate."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import transformers
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig

from radixcache.errors import InvalidRequest, ModelError, first_sentence
from radixcache.kernels.attention import AttentionBackend, PagedBatch
from radixcache.kernels.native.library import quiet_torch
from radixcache.kernels.upload import on_device
from radixcache.runtime.gguf_file import GGUFFile
from radixcache.runtime.model import compatibility as gate
from radixcache.runtime.model import exact as exactness
from radixcache.runtime.model.architecture import Unknown, understand
from radixcache.runtime.model.checkpoint import open_checkpoint
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.gguf.checkpoint import GGUFCheckpoint, open_gguf
from radixcache.runtime.model.gguf.config import (
    generation_config_of,
    settings_of,
    with_rope_factors,
)
from radixcache.runtime.model.operations.linear import pack_linears
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.progress import report
from radixcache.runtime.model_files import check_model, split_gguf
from radixcache.states import SequenceStates

if TYPE_CHECKING:
    from radixcache.runtime.model.transformers_model import TransformersModel

_log = logging.getLogger("radixcache")

# Compared with the plain forward by this project's tests; `check_logits` is skipped for them.
VERIFIED = frozenset({"gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"})

_MOST_ROUNDING = 0.25
"""How far logits in 16 bits may be off, as a share of their range, if those in float32 are right:
beyond, whoever wants the model wants another dtype."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_TRIED = {"torch": (2, 13), "transformers": (5, 24)}
"""The newest that `make test-machines` has run with; pyproject.toml says so, too."""


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    attention: AttentionBackend | None = None,
    exact: bool = False,
    max_model_len: int | None = None,
) -> PagedModel:
    """Load a causal LM from a folder, a GGUF file or the Hugging Face hub; refuse what goes wrong.

    Code that comes with a checkpoint is never run.

    Args:
        dtype: "float32", "bfloat16", "float16", "fp16" and so on, or a torch dtype; "auto" is
            float32 on a CPU and the checkpoint's own elsewhere.
        device: a torch device; "auto" is CUDA where there is one.
        attention: the backend; None chooses the fastest that works.
        exact: a row's bits depend on its own tokens only (see `exact.py`).
        max_model_len: the most tokens of a sequence; None is what the config says.

    Raises:
        ModelError: there is no such model, or it cannot be loaded or trusted over pages; or it, or
            this machine, cannot be exact.
        InvalidRequest: a dtype or device that does not exist, or that is never exact.
    """
    place = resolve_device(device)
    warn_of_untried({"torch": torch.__version__, "transformers": transformers.__version__})
    with quiet_torch() if place.type == "cpu" else nullcontext():
        return _load_model(name_or_path, dtype, place, attention, exact, max_model_len)


def warn_of_untried(versions: dict[str, str]) -> None:
    """Log which libraries are newer than those that the tests have run with."""
    for name, version in versions.items():
        tried = ".".join(map(str, _TRIED[name]))
        if tuple(map(int, re.findall(r"\d+", version)[:2])) > _TRIED[name]:
            _log.warning("%s %s is newer than what was tried, %s", name, version, tried)


def _load_model(
    name_or_path: str | Path,
    dtype: str | torch.dtype,
    place: torch.device,
    attention: AttentionBackend | None,
    exact: bool,
    max_model_len: int | None,
) -> PagedModel:
    check_model(str(name_or_path))
    kind, file = resolve_dtype(dtype, place), open_gguf(name_or_path)
    settings = _settings(name_or_path, file)
    gate.check_sizes(settings)
    if exact:
        exactness.require(place, kind)
        by_transformers = file is None and split_gguf(str(name_or_path))[1]
        if settings.get("quantization_config") or by_transformers:
            raise ModelError(
                "exact mode takes no quantised checkpoint, and GGUF files only of Llama, Mistral, "
                "Qwen2 and Qwen3: no other is checked"
            )
    model: PagedModel | None = None
    try:
        model = _load_decoder(name_or_path, settings, kind, place, attention, exact, file)
    except Unknown as reason:
        if file is not None:
            raise _unread(name_or_path, reason) from None
        _log.info("transformers' own layers run this model: %s", reason)
    if model is None:
        make = partial(_transformers_model, max_model_len=max_model_len)
        model = load_stock(name_or_path, kind, place, attention, exact, make=make)
    if exact:
        exactness.check(model)
    return model


def _transformers_model(
    model: Any, attention: AttentionBackend | None, exact: bool, max_model_len: int | None
) -> TransformersModel:
    from radixcache.runtime.model.transformers_model import TransformersModel

    return TransformersModel(model, attention, exact, max_model_len)


def _settings(name_or_path: str | Path, file: GGUFFile | None) -> dict[str, Any]:
    """What config.json says, or a GGUF file in its place."""
    if file is not None:
        try:
            return settings_of(file)
        except Unknown as reason:
            raise _unread(name_or_path, reason) from None
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing and split_gguf(str(name_or_path))[1]:
        raise ModelError(
            f"the model at {name_or_path} is a GGUF file of an architecture that transformers "
            f"reads, with the package {' and '.join(missing)}: pip install '.[gguf]' in a checkout"
        )
    settings, _ = _load(name_or_path, PreTrainedConfig.get_config_dict)
    if not isinstance(settings, dict):
        raise ModelError(f"the model at {name_or_path} does not load: its config is no dictionary")
    return settings


def _unread(name_or_path: str | Path, reason: Unknown) -> ModelError:
    """Of a GGUF file that the loop should run: transformers leaves out what it does not know."""
    return ModelError(f"the GGUF file {name_or_path} is not one that is understood: {reason}")


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> Any:
    """The torch dtype of that name; "auto" stays where it is the checkpoint's.

    Raises:
        InvalidRequest: there is no such dtype.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else dtype
    kind = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if kind not in _DTYPES.values():
        raise InvalidRequest(f"unknown dtype {dtype!r}: say auto, {', '.join(_DTYPES)}")
    return kind


def _load_decoder(
    name_or_path: str | Path,
    settings: dict[str, Any],
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
    attention: AttentionBackend | None = None,
    exact: bool = False,
    file: GGUFFile | None = None,
) -> PagedModel:
    """A model that the decoder loop knows; nothing of transformers' layers is imported.

    Args:
        file: the GGUF file that the model is, if the loop knows its architecture.

    Raises:
        Unknown: the loop does not know the model, or is wrong about it.
    """
    if file is None and split_gguf(str(name_or_path))[1]:
        raise Unknown("its weights are in a GGUF file")
    architecture = understand(settings)
    if file is not None:
        architecture = with_rope_factors(architecture, file)
    if dtype == "auto":
        named = str(settings.get("dtype") or settings.get("torch_dtype"))
        if named not in _DTYPES:
            raise Unknown(f"the dtype of its config is {named}")
        dtype = _DTYPES[named]
    report("fetching weights", 0.0)
    opened = (
        open_checkpoint(name_or_path, device, dtype)
        if file is None
        else nullcontext(GGUFCheckpoint(file, device, dtype))
    )
    with opened as checkpoint, on_device(device):
        found, wanted = checkpoint.shapes, architecture.shapes()
        for name in found.keys() & wanted.keys():  # transformers refuses it, too, but may not end
            if found[name] != wanted[name]:
                raise ModelError(
                    f"the checkpoint of {name_or_path} has {name} as {list(found[name])}, "
                    f"where its config says {list(wanted[name])}"
                )
        if found != wanted:
            raise Unknown("its checkpoint has other weights")
        report("preparing kernels", 0.0)  # which are compiled at the first start
        return Decoder(
            architecture,
            _generation_config(name_or_path, file),
            checkpoint.tensor,
            dtype,
            device,
            attention,
            exact,
        )


def load_stock(
    name_or_path: str | Path,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
    attention: AttentionBackend | None = None,
    exact: bool = False,
    ranks: int = 1,
    make: Callable[..., TransformersModel] | None = None,
    latents: bool | None = None,
) -> PagedModel:
    """A model with transformers' own layers.

    Pages keep MLA's latents where nobody has chosen the backend and layers are neither exact nor
    shared out among ranks; else its keys and values of all heads, as a model's own layers do.

    Args:
        ranks: the processes of this group, each of which loads its shard at the same time.
        make: what to make of transformers' model; None is a `TransformersModel`.
        latents: whether those of MLA are kept; None is: unless that makes logits wrong.

    Raises:
        ModelError: as `load_model`.
    """
    report("importing transformers' layers")
    from radixcache.runtime.model.operations.exact import make_exact
    from radixcache.runtime.model.operations.mla import keep_latents
    from radixcache.runtime.model.operations.row_parallel_linear import take_local
    from radixcache.runtime.model.transformers_model import IMPLEMENTATION, TransformersModel

    config = load_config(name_or_path)
    if exact and gate.is_recurrent(config):
        raise ModelError(
            f"model type {config.model_type!r} cannot run in exact mode, but without it: recurrent "
            "layers sum in blocks from wherever a chunk begins"
        )
    parallel: dict[str, Any] = {}
    if ranks > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        parallel["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=ranks)
    read = partial(
        _auto_class(config).from_pretrained,
        config=config,
        dtype=dtype,
        attn_implementation="eager",  # not what the config says: it may name a kernel of the hub
        output_loading_info=True,
        **parallel,
    )
    report("reading weights")
    model, found = _load(name_or_path, read)
    if missing := sorted(found["missing_keys"]):
        count = len(missing)
        raise ModelError(
            f"the checkpoint of {name_or_path} lacks {count} of its weights, {missing[0]} for one"
        )
    with on_device(device):
        report("packing weights")
        model = model.to(device).eval()
        if ranks > 1:
            take_local(model)
        kept = latents is not False and attention is None and ranks == 1 and not exact
        kept = kept and keep_latents(model, IMPLEMENTATION)
        if exact:
            make_exact(model)
        else:
            pack_linears(model)
        load = partial(load_stock, name_or_path, make=make)
        paged: TransformersModel | None = None
        try:
            paged = (make or TransformersModel)(model, attention, exact)
            if config.model_type not in VERIFIED:
                report("comparing logits")
                again = partial(load, torch.float32, torch.device("cpu"), latents=kept)
                check_logits(paged, again if ranks == 1 else None)
            return paged
        except ModelError as error:
            if not kept or latents:
                raise
            _log.warning(
                "MLA's latents do not do, so keys and values of all heads are tried: %s", error
            )
    model = paged = None  # before all of it is read again
    return load(dtype, device, latents=False)


def _auto_class(config: PreTrainedConfig) -> Any:
    """What of transformers loads a config: a causal LM, or one that takes images, too, which here
    is given texts alone (Mistral 3, Qwen-VL, InternVL, ...)."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    causal = type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    images = type(config) in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if images and not causal else AutoModelForCausalLM


def load_config(name_or_path: str | Path) -> PreTrainedConfig:
    """transformers' config of a model that the gate lets pass, before its weights are read."""
    from transformers import AutoConfig

    config: PreTrainedConfig = _load(name_or_path, AutoConfig.from_pretrained)
    gate.check_config(config)
    return config


def _generation_config(name_or_path: str | Path, file: GGUFFile | None) -> GenerationConfig:
    if file is not None:
        return generation_config_of(file)
    try:
        return GenerationConfig.from_pretrained(str(name_or_path))
    except OSError:  # it has none
        return GenerationConfig()
    except Exception as error:  # whatever nonsense raises in transformers
        reason = f"its generation config does not make sense ({first_sentence(error)})"
        raise ModelError(f"the model at {name_or_path} does not load: {reason}") from None


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """The torch device of that name; "auto" is CUDA where there is one, else the CPU.

    Raises:
        InvalidRequest: there is no such device here.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if (driver := nvidia_driver()) is not None:
            _log.warning("the CPU is taken: %s", driver_problem(driver))
        return torch.device("cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise InvalidRequest(f"unknown device {device!r}: say auto, cpu or cuda") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"device {str(device)!r} was asked for, but there is no CUDA here")
    if place.type == "cuda" and (place.index or 0) >= (count := torch.cuda.device_count()):
        raise InvalidRequest(f"device {str(device)!r} was asked for; CUDA has {count} here")
    if place.type not in ("cpu", "cuda"):
        try:
            torch.zeros(1, device=place).item()
        except (RuntimeError, AssertionError):  # not built in, not here, or without memory (meta)
            raise InvalidRequest(f"device {str(device)!r} cannot be used here") from None
    return place


def nvidia_driver() -> str | None:
    """The version of this machine's NVIDIA driver; None if there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return "unknown" if found is None else found[0]


def driver_problem(driver: str) -> str:
    """Why torch does not see the GPU of a driver."""
    if torch.version.cuda is None:
        return (
            f"there is an NVIDIA driver ({driver}), but torch {torch.__version__} is built without "
            "CUDA: remove .venv and say make TORCH=cuda"
        )
    return (
        f"torch {torch.__version__} is for CUDA {torch.version.cuda}, and finds no GPU with the "
        f"NVIDIA driver {driver}: a newer driver, or a torch for an older CUDA"
    )


def _load(name_or_path: str | Path, read: Callable[..., Any]) -> Any:
    """`read(name_or_path)`, with what transformers raises said in one sentence.

    The generation config is read with the model, under the same `trust_remote_code`. If it were not
    said, standard input would be asked.
    """
    source, gguf = split_gguf(str(name_or_path))
    try:
        return read(source, trust_remote_code=False, **gguf)
    except Exception as error:
        reason = first_sentence(error)
        # What transformers does not find is an OSError; so is a model that must be asked for first.
        absent = isinstance(error, OSError) and "gated repo" not in reason
        if absent and not Path(source).is_dir():
            raise ModelError(
                f"no model at {name_or_path}: no such folder, and no model of that name in reach"
            ) from None
        raise ModelError(f"the model at {name_or_path} does not load: {reason}") from None


def check_logits(model: TransformersModel, again: Callable[[], object] | None = None) -> None:
    """Refuse a model whose logits over pages differ from those of the stock attention.

    Two short random sequences run in chunks, together and alone, then token by token. Of a
    recurrent model, a state of the first is kept in the middle of a chunk, and gone on from.

    Args:
        again: loads the model in float32, and raises what this does. That counts where 16 bits are
            off by no more than deep models round.

    Raises:
        ModelError: the logits differ by more than rounding.
    """
    page_size, lens = 4, (min(48, model.max_context), min(30, model.max_context))
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.vocab_size, length) for length in lens]
    pages = np.array_split(rng.permutation(24).astype(np.int32), [14])
    pool = model.allocate(24, page_size, 4)
    expected = [model.stock_logits(tokens) for tokens in sequences]
    done, worst, middle = [0, 0], 0.0, min(22, lens[0] - 1)
    for step in ((17, 0), (21, 11), (0, 12), (1, 1), (1, 1), (64, 64), (64, 0)):
        again_from = step == (64, 0) and model.bytes_per_state and middle > 17
        done = [middle, lens[1]] if again_from else done
        ends = [min(d + n, length) for d, n, length in zip(done, step, lens, strict=True)]
        runs = [i for i in (0, 1) if ends[i] > done[i]]
        if not runs:
            continue
        counts = [ends[i] - done[i] for i in runs]
        batch = PagedBatch.of([pages[i] for i in runs], counts, [ends[i] for i in runs], page_size)
        tokens = np.concatenate([sequences[i][done[i] : ends[i]] for i in runs])
        states = [
            SequenceStates(
                3 if again_from else i if done[i] else -1,
                i,
                ((middle - 17, 3),) if i == 0 and done[0] == 17 and middle > 17 else (),
            )
            for i in runs
        ]
        got = model.forward(tokens, batch, np.arange(len(tokens)), pool, states)
        wanted = torch.cat([expected[i][done[i] : ends[i]] for i in runs])
        spread = wanted.max() - wanted.min()
        worst = max(worst, float(((got - wanted).abs().max() / spread).nan_to_num(torch.inf)))
        done = ends
    in_float32 = model.dtype == torch.float32
    if worst <= (1e-3 if in_float32 else 5e-2):
        return
    hint = "" if in_float32 else "; float32 tells if it is rounding"
    refused = gate.refusal(
        model.model_type, f"its logits come out wrong there (by {worst:.1%} of their range{hint})"
    )
    if in_float32 or again is None or worst > _MOST_ROUNDING:
        raise refused
    try:
        again()
    except ModelError:
        raise refused from None
