"""Starting a run: by torch's own process starter on this machine, or as one rank of torchrun's or SLURM's job."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from burst_attention.launch import LOOPBACK
from burst_attention.train.config import TrainConfig

CPU_RANKS = 2
UNSHARDED = "unsharded"
FAILED, WRONG, STOPPED = 1, 2, 0


def train(config: TrainConfig) -> int:
    """Run `burst train`; the exit status."""
    under = _ranks_of_a_job()
    if under is not None:
        return _run_rank(config, "env://", *under)
    ranks, device = _find_ranks(config)
    config = replace(config, device=device).on(ranks)
    if config.compare:
        alone = replace(config, cp=1, dp=1, tp=1, heads=1, compare=False, accumulate=config.accumulate * config.dp)
        status = _start(replace(alone, out=str(Path(config.out) / UNSHARDED)).on(1), 1)
        if status:
            return status
    return _start(config, ranks)


def _find_ranks(config: TrainConfig) -> tuple[int, str]:
    """How many ranks to start here, and on what."""
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and not gpus:
        raise ValueError("there is no GPU here; leave --device out, or say --device cpu")
    asked = config.dp * config.cp * config.tp
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
            listed = subprocess.run(
                ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=True
            )
            env["MASTER_ADDR"] = listed.stdout.split()[0]
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", 0))
    return None


def _start(config: TrainConfig, ranks: int) -> int:
    """Start ranks here and wait for them. They meet over a file and the loopback interface: no port is opened."""
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="burst-train-") as folder:
        shared = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(cores // ranks, 1))),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK),
        }
        store, errors = f"file://{folder}/store", f"{folder}/error"
        started = start_processes(
            name="burst-train",
            entrypoint=_rank_entry,
            args={rank: (config, store, rank, ranks, errors) for rank in range(ranks)},
            envs=dict.fromkeys(range(ranks), shared),
            logs_specs=DefaultLogsSpecs(log_dir=f"{folder}/logs"),
            start_method="spawn",
        )
        try:
            result = started.wait()
        except KeyboardInterrupt:
            started.close(death_sig=_soft_signal())
            return 130
        finally:
            started.close()
        told = [Path(f"{errors}-{rank}") for rank in range(ranks)]
        words = [path.read_text() for path in told if path.exists()]
    if result is not None and not result.is_failed():
        return max(result.return_values.values(), default=0)
    print(f"burst train: {words[0] if words else 'a rank ended without a word'}", file=sys.stderr)
    return FAILED


def _soft_signal() -> Any:
    import signal

    return signal.SIGTERM


def _rank_entry(config: TrainConfig, store: str, rank: int, ranks: int, errors: str) -> int:
    """One rank in a process of its own; why it failed is left in a file, for the one that started it."""
    return _run_rank(config, store, rank, ranks, rank, Path(f"{errors}-{rank}"))


def _run_rank(config: TrainConfig, store: str, rank: int, ranks: int, local: int, words: Path | None = None) -> int:
    from burst_attention.train.folders import CheckpointError

    try:
        config = config.on(ranks)
        with _group(config, store, rank, ranks, local) as device:
            return _train_on(config, device)
    except (ValueError, CheckpointError) as error:
        if words is None:
            if rank == 0:
                print(f"burst train: {error}", file=sys.stderr, flush=True)
        else:
            words.write_text(str(error))
        return WRONG
    except Exception as error:
        if words is not None:
            words.write_text(f"rank {rank}: {type(error).__name__}: {error}")
        raise


@contextlib.contextmanager
def _group(config: TrainConfig, store: str, rank: int, ranks: int, local: int) -> Iterator[torch.device]:
    """The process group of all ranks, for as long as they train."""
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if on_gpu and local >= torch.cuda.device_count():
        raise ValueError(f"rank {rank} has no GPU: {torch.cuda.device_count()} are on this host")
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=config.timeout)
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _train_on(config: TrainConfig, device: torch.device) -> int:
    from burst_attention.train.loop import LOG, Trainer
    from burst_attention.train.parallel import make_ranks
    from burst_attention.train.record import read_log

    trainer = Trainer(config, make_ranks(config, device))
    if not trainer.run():
        return STOPPED
    unsharded = Path(config.out) / UNSHARDED / LOG
    trainer.finish(read_log(unsharded) if config.compare and unsharded.exists() else None)
    return 0
