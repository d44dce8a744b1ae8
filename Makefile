# `make train` and `make test` each work alone on a fresh machine with Python 3.11 or newer, and so does `make demo`.

PYTHON ?= python3
# Another torch, in an environment of its own, with the triton that it brings: make test TORCH=2.15.0
TORCH ?=
ifeq ($(TORCH),)
VENV ?= .venv
CONSTRAINTS = constraints.txt
else
VENV ?= .venv-torch-$(TORCH)
CONSTRAINTS = $(VENV)/constraints.txt
endif
BIN = $(VENV)/bin
READY = $(VENV)/ready
# What training needs, without the tools of the tests: a smaller install.
TRAIN_READY = $(VENV)/ready-train
TRAIN ?=
# These import transformers and torch's compiler, and ranks are forked: from a small process that is several times faster.
TRAIN_TESTS = tests/train
# Most of these need one core: they run beside the others, and are told at the end.
BESIDE = tests/unit tests/interpreted $(addprefix tests/ring/,test_exactness.py test_double_ring.py) tests/integrations

.PHONY: train demo test test-gpu sanitize lint types test-all soak bench clean

# Settings of your own: make train TRAIN="--steps 100 --data my-texts/"
train: $(TRAIN_READY)
	$(BIN)/burst train $(TRAIN)

demo: $(TRAIN_READY)
	$(BIN)/burst check

# Without GPUs: autograd's device threads would keep the tests from forking ranks. `make test-gpu` is for GPUs.
# Our Triton kernels run in Triton's interpreter, which must be chosen before they are imported: a process of its own.
test: export CUDA_VISIBLE_DEVICES =
test: lint types
	@echo "$(BIN)/python -m pytest, for each of $(BESIDE): beside the following, told at the end"
	@trap 'kill 0' INT TERM; \
	( status=0; for part in $(BESIDE); do \
	     if [ $$part = tests/interpreted ]; then export TRITON_INTERPRET=1; else unset TRITON_INTERPRET; fi; \
	     $(BIN)/python -m pytest $$part || status=1; \
	  done; exit $$status ) > $(VENV)/beside.log 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest $(addprefix --ignore=,$(TRAIN_TESTS) $(BESIDE)) && $(BIN)/python -m pytest $(TRAIN_TESTS); \
	status=$$?; wait $$beside || status=1; cat $(VENV)/beside.log; exit $$status

test-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu

# Needs NVIDIA's compute-sanitizer.
sanitize: $(READY)
	$(BIN)/python -m tests.gpu.sanitize

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

test-all: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m "not soak"

soak: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m soak

bench: $(READY)
	$(BIN)/burst bench local

$(READY): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev]"
	touch $(READY) $(TRAIN_READY)

$(TRAIN_READY): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[train]"
	touch $(TRAIN_READY)

# Without what goes with one torch alone. The interpreter of triton 3.6 cannot do with a newer numpy.
$(VENV)/constraints.txt: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	grep -v -E '^(torch|triton|numpy|setuptools|cuda-.*)==' constraints.txt > $@
	printf 'torch==%s\nnumpy<2.4\n' $(TORCH) >> $@

clean:
	rm -rf $(VENV) .venv-torch-* build dist src/*.egg-info
