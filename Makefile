.PHONY: setup docs demo demo-rl demo-search test test-ray test-track test-vllm soak lint bench bench-offline bench-rl bench-gpu bench-vllm protos clean
PYTHON ?= python3
BIN := .venv/bin
# Hundreds of processes of the tests import what one has compiled, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
VLLM := .venv-vllm/bin
# Where CPU builds of torch live; not asked on a machine with an NVIDIA GPU.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# uv installs in seconds what takes pip minutes. torch comes by pip, which knows this machine's wheels;
# editables is what hatchling's editable install imports, of which uv does not learn.
INSTALL = uv pip install -q --compile-bytecode -c constraints.txt editables --python

demo: .venv/.demo  ## teacher, server, job, table: the whole line on this machine
	$(BIN)/distill demo

demo-rl: .venv/.demo  ## a model that adds badly learns from rewards alone
	$(BIN)/distill demo-rl

demo-search: .venv/.demo  ## a small model learns to search a directory that it cannot know; minutes
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[plot,rl]'
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.search

test: setup  ## every test that runs without a GPU
	$(BIN)/pytest -n 3 --dist worksteal

test-vllm: .venv-vllm/.installed  ## the vLLM engine with a real vLLM, on the CPU
	$(VLLM)/pytest -n 2 --dist worksteal tests/vllm

soak: setup  ## every injected fault and fuzzed request 15 times as often as in the tests; an hour
	DISTILL_REPEATS=300 $(BIN)/pytest -n 2 --timeout 7200 tests/faults tests/teacher_service/serving/test_bad_requests.py

test-ray: setup  ## captures and jobs on a Ray cluster of this machine; `make test` has no Ray
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[ray]'
	$(BIN)/pytest tests/teacher_service/capture/test_ray.py tests/distill_server/runners/test_ray.py tests/distill_server/runners/test_ray_runner.py

test-track: setup  ## the trackers with a real trackio, which `make test` does not install
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[track]'
	$(BIN)/pytest tests/student_trainer/run/test_trackers.py

lint: setup docs  ## style, types, import contracts, links of the documentation
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

docs: setup  ## the documentation as a site, in site/; a broken link fails the build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup  ## the loss against its bounds and its peers; minutes, on a quiet machine
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[bench]'
	$(BIN)/python -m benchmarks.loss
	$(BIN)/python -m benchmarks.estimators
	$(BIN)/python -m benchmarks.long_sequences
	$(BIN)/python -m benchmarks.cache
	$(BIN)/python -m benchmarks.wire
	$(BIN)/python -m benchmarks.scoring
	$(BIN)/python -m benchmarks.server

bench-vllm: .venv-vllm/.installed  ## the vLLM engine against vLLM's own prompt_logprobs, on the CPU
	$(VLLM)/python -m benchmarks.vllm_engine

bench-offline: setup  ## DATA=train.jsonl of GSM8K: learning from stored rows; a quarter of an hour
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[bench]'
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.offline --data $(DATA)

bench-rl: setup  ## anchors and estimators of reinforcement learning; half an hour, goes on if stopped
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[bench]'
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.rl

bench-gpu: setup  ## the loss and the teacher's scoring head on this machine's GPU
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[bench]' liger-kernel
	$(BIN)/python -m benchmarks.gpu

setup: .venv/.installed

# What a demo needs, and no compiler; the rest is for tests.
.venv/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	command -v nvidia-smi >/dev/null || $(BIN)/pip install -q --retries 0 -c constraints.txt --extra-index-url $(TORCH_CPU_INDEX) torch
	$(BIN)/pip install -q uv
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[teacher,train]'
	touch $@

.venv/.installed: .venv/.demo
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[dev]'
	touch $@

# An environment of its own: vLLM pins its dependencies. Its three companions are builds for CUDA.
.venv-vllm/.installed: pyproject.toml constraints.txt tests/vllm/requirements.txt
	test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM)/pip install -q --retries 0 -c constraints.txt --extra-index-url $(TORCH_CPU_INDEX) torch
	$(VLLM)/pip install -q uv
	$(VLLM)/$(INSTALL) $(VLLM)/python -r tests/vllm/requirements.txt -e '.[teacher]'
	$(VLLM)/uv pip uninstall -q --python $(VLLM)/python torchvision torchaudio torchcodec
	touch $@

protos:  ## generate the code of protos/*.proto; a test checks that it is up to date
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  protos/teacher.proto protos/distill.proto

clean:
	rm -rf .venv .venv-vllm runs site
