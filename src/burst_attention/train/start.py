"""Starting a run: under torch's elastic agent on this machine, or as one rank of torchrun's or SLURM's job."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from burst_attention.rendezvous import MeetingError, meet
from burst_attention.ring import RingError
from burst_attention.train.config import LIST, TrainConfig
from burst_attention.train.folders import CheckpointError
from burst_attention.train.processes import FAILED, STOPPED, WRONG, RankError, run_ranks

CPU_RANKS = 2
UNSHARDED = "unsharded"
ENVIRONMENT = "env://"
"""Where the ranks of a job meet; those of this machine alone meet at a file."""


class NoGpuError(ValueError):
    """This rank's host has fewer GPUs than ranks."""


def train(config: TrainConfig) -> int:
    """Run `burst train`; the exit status."""
    if config.model == LIST:
        from burst_attention.train.model import families

        print("\n".join(families()))
        return 0
    under = _ranks_of_a_job()
    if under is not None:
        return _rank_of_a_job(config, *under)
    ranks, device = _find_ranks(config)
    config = replace(config, device=device).on(ranks)
    if config.compare:
        alone = replace(
            config, cp=1, dp=1, tp=1, heads=1, hosts=0, compare=False, accumulate=config.accumulate * config.dp
        )
        alone = replace(alone, out=str(Path(config.out) / UNSHARDED)).on(1)
        if status := run_ranks(_run_rank, alone, 1):
            return 0 if status == STOPPED else status
    status = run_ranks(_run_rank, config, ranks)
    return 0 if status == STOPPED else status


def _find_ranks(config: TrainConfig) -> tuple[int, str]:
    """How many ranks to start here, and on what."""
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and not gpus:
        raise ValueError("there is no GPU here; leave --device out, or say --device cpu")
    asked = config.ranks
    if gpus:
        ranks = asked or gpus // (config.dp * config.tp) * config.dp * config.tp
        if ranks > gpus or not ranks:
            raise ValueError(f"{asked or config.dp * config.tp} ranks need as many GPUs, and {gpus} are here")
        return ranks, "cuda"
    return asked or max(CPU_RANKS, config.dp * config.tp), "cpu"


def _ranks_of_a_job() -> tuple[int, int, int] | None:
    """(rank, ranks, rank on this host) under torchrun or SLURM; None where nobody has started ranks."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
    if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000))
        if "MASTER_ADDR" not in env:
            env["MASTER_ADDR"] = _first_host(env.get("SLURM_JOB_NODELIST", ""))
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", 0))
    return None


def _first_host(listed: str) -> str:
    """Of SLURM's short list of a job's hosts, as node[7-8]."""
    try:
        words = ["scontrol", "show", "hostnames", listed]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise ValueError(
            f"cannot tell the job's first host from SLURM_JOB_NODELIST {listed!r} ({error}); set MASTER_ADDR"
        ) from None


def _run_rank(config: TrainConfig, store: str, rank: int, ranks: int, local: int | None = None) -> int:
    """One rank, from meeting the others to the end; RankError where it fails."""
    try:
        config = config.on(ranks)
        device = _device(config, rank, rank if local is None else local)
        with _group(config, store, rank, ranks, device):
            return _train_on(config, device)
    except (ValueError, CheckpointError) as error:
        raise RankError(str(error), WRONG, 0) from error
    except OSError as error:
        raise RankError(f"rank {rank}: {error}", FAILED, 0) from error
    except MeetingError as error:
        raise RankError(str(error), FAILED, 2) from error
    except Exception as error:
        if _lost_a_rank(error):
            raise RankError(f"rank {rank} lost another rank: {str(error).splitlines()[0]}", FAILED, 2) from error
        raise RankError(f"rank {rank}: {type(error).__name__}: {error}", FAILED, 1) from error


def _lost_a_rank(error: Exception) -> bool:
    """Whether the failure is another's. gloo has no type of its own for it, and names its source files instead."""
    return isinstance(error, RingError | dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _rank_of_a_job(config: TrainConfig, rank: int, ranks: int, local: int) -> int:
    """A rank that torchrun or SLURM started. What is wrong with the input all ranks find, and the first says it."""
    if config.compare and rank == 0 and not (Path(config.out) / UNSHARDED).exists():
        print(f"burst train: --compare has nothing to draw: {config.out} holds no unsharded run", file=sys.stderr)
    try:
        status = _run_rank(config, ENVIRONMENT, rank, ranks, local)
    except RankError as error:
        if error.weight == 1:
            raise
        found_by_all = isinstance(error.__cause__, ValueError | CheckpointError)
        if rank == 0 or not found_by_all or isinstance(error.__cause__, NoGpuError):
            print(f"burst train: {error}", file=sys.stderr, flush=True)
        if isinstance(error.__cause__, MeetingError):
            # A thread may still be waiting inside torch: one that wakes while Python ends would abort the process.
            sys.stdout.flush()
            os._exit(error.status)
        return error.status
    return 0 if status == STOPPED else status


def _device(config: TrainConfig, rank: int, local: int) -> torch.device:
    """Where a rank computes: its own GPU, or this host's CPU."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1 and "SLURM_GPUS_PER_TASK" in os.environ:
        local = 0  # SLURM shows each task its own GPU alone.
    if local >= gpus:
        raise NoGpuError(f"rank {rank} has no GPU: {gpus} are on this host")
    device = torch.device("cuda", local)
    if config.deterministic:
        # What cuBLAS must find before it starts; torch refuses its products otherwise.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def _group(config: TrainConfig, store: str, rank: int, ranks: int, device: torch.device) -> Iterator[None]:
    """The process group of all ranks, for as long as they train."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if store == ENVIRONMENT:
        meet(backend, timeout=config.timeout, rank=rank, ranks=ranks)
    else:
        limit = timedelta(seconds=config.timeout)
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=limit)
    yield
    # Not where a rank failed: its process ends, and taking leave of ranks that are gone could hang.
    dist.destroy_process_group()


def _quieten() -> None:
    """What a run says is its own: no progress bars and hints of transformers, warnings as one line each."""
    # With tp, weights are gathered by two messages at a save, which torch tells every rank's user at length.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.formatwarning = lambda message, *_, **__: f"burst train: {message}\n"
    with contextlib.suppress(ImportError):
        from transformers.utils import logging as hints

        hints.disable_progress_bar()
        hints.set_verbosity_error()


def _train_on(config: TrainConfig, device: torch.device) -> int:
    _quieten()
    from burst_attention.train.loop import LOG, Trainer
    from burst_attention.train.parallel import make_ranks
    from burst_attention.train.record import read_log

    trainer = Trainer(config, make_ranks(config, device))
    if not trainer.run():
        return STOPPED
    unsharded = Path(config.out) / UNSHARDED / LOG
    trainer.finish(read_log(unsharded) if config.compare and unsharded.exists() else None)
    return 0
