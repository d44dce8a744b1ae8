# `make train` and `make test` each work alone on a fresh machine with Python 3.11 or newer, and so does `make demo`.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/ready
# What training needs, without the tools of the tests: a smaller install.
TRAIN_READY = $(VENV)/ready-train
TRAIN ?=
# These import transformers and torch's compiler, and ranks are forked: from a small process that is several times faster.
HEAVY = tests/integrations tests/train
ALONE = tests/unit tests/interpreted

.PHONY: train demo test test-gpu sanitize lint types test-all soak bench clean

# Settings of your own: make train TRAIN="--steps 100 --data my-texts/"
train: $(TRAIN_READY)
	$(BIN)/burst train $(TRAIN)

demo: $(TRAIN_READY)
	$(BIN)/burst check

# Without GPUs: autograd's device threads would keep the tests from forking ranks. `make test-gpu` is for GPUs.
# Our Triton kernels run in Triton's interpreter, which must be chosen before they are imported: a process of its own.
# Plans and kernels need one core and no other process: their tests run beside the others, and are told at the end.
test: lint types
	@echo "$(BIN)/python -m pytest $(ALONE), TRITON_INTERPRET=1 for the last: beside the following, told at the end"
	@trap 'kill 0' INT TERM; \
	( CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest tests/unit \
	   && CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreted \
	 ) > $(VENV)/alone.log 2>&1 & alone=$$!; \
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest $(addprefix --ignore=,$(HEAVY) $(ALONE)) \
	 && CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest $(HEAVY); status=$$?; \
	wait $$alone || status=1; cat $(VENV)/alone.log; exit $$status

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

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY) $(TRAIN_READY)

$(TRAIN_READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[train]"
	touch $(TRAIN_READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
