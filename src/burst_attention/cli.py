"""The `burst` command."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from burst_attention.layout import LAYOUT_NAMES
from burst_attention.mask import parse_mask
from burst_attention.options import RESULTS
from burst_attention.tiles import KERNEL_NAMES
from burst_attention.train.config import add_arguments, read_config
from burst_attention.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status is 0 when it succeeded, 1 when a check failed, 2 for wrong usage."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except ValueError as error:
        parser.exit(2, f"burst {args.command}: {error}\n")
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; usage is for --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses an unknown option with the nearest that there is; argparse would name the program's, not its."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], names, 1)
            self.error(f"there is no option {unknown[0]}" + (f", is {near[0]} meant?" if near else ""))
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="burst", description="Exact attention over sequences spread on a ring of ranks.")
    parser.add_argument("--version", action="version", version=f"burst-attention {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_check, _add_bench, _add_plan, _add_train, _add_hosts):
        add(commands)
    return parser


def _add_check(commands: Any) -> None:
    check = commands.add_parser("check", help="prove on this machine that a ring of processes is exact")
    check.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    check.add_argument(
        "--tokens", type=int, help="length of the whole sequence (default 1000; of a GPU's steady cases 2048 a rank)"
    )
    check.add_argument("--mask", help='one mask instead of the table, e.g. "causal() & window(64)"')
    check.add_argument("--layout", choices=(*LAYOUT_NAMES, "balanced"), help="one layout for every case")
    check.add_argument("--direction", choices=("kv", "query", "auto"), help="one moving side instead of both")
    check.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: ranks as threads on one GPU")
    check.add_argument("--json", action="store_true", help="print one JSON object per case")
    check.set_defaults(run=_check)


BENCH_SUITES = ("local", "gpu", "hosts", "loss", "train")
BENCH_OPTIONS = {
    "tokens": ("local",),
    "flash": ("gpu",),
    "only": ("gpu", "hosts", "loss", "train"),
    "trace": ("hosts",),
}
"""Options that are not for every suite, and those that they are for."""


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure against baselines in the same run")
    bench.add_argument(
        "suite",
        choices=BENCH_SUITES,
        help="local: processes on this CPU against one; gpu: kernels and rings on one GPU; hosts: rings between hosts; "
        "loss: the chunked LM head and loss; train: steps of a long sequence on one GPU",
    )
    bench.add_argument("--tokens", type=int, help="local: length of the whole sequence (default 16384)")
    bench.add_argument("--repeat", type=int, default=5, help="measured repetitions, interleaved (default 5)")
    bench.add_argument("--flash", help="gpu: what to activate under torch's flash operator, e.g. FA4")
    bench.add_argument("--only", help="gpu, hosts, loss, train: one part alone, e.g. tax, speed or 131072")
    bench.add_argument(
        "--trace", metavar="PREFIX", help="hosts: draw a double ring's rounds, PREFIX.json and PREFIX.svg"
    )
    bench.add_argument("--output", help="append the rows, as JSON lines, to this file")
    bench.set_defaults(run=_bench)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="print what a call would compute and move, without running it")
    plan.add_argument("--tokens", type=int, required=True)
    plan.add_argument("--ranks", type=int, required=True)
    plan.add_argument("--heads", type=int, default=32)
    plan.add_argument("--kv-heads", type=int)
    plan.add_argument("--head-dim", type=int, default=128)
    plan.add_argument("--mask", default="full()")
    plan.add_argument("--layout", choices=LAYOUT_NAMES, default="contiguous")
    plan.add_argument(
        "--direction", choices=("auto", "kv", "query"), default="auto", help="which side moves in backward"
    )
    plan.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="bfloat16")
    plan.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose kernels compute (default cpu)")
    plan.add_argument("--kernel", choices=KERNEL_NAMES, default="auto", help="one kernel by its name (default auto)")
    plan.add_argument("--coalesce", type=int, help="visiting blocks computed as one (default 1, on a GPU 2)")
    plan.add_argument("--ranks-per-host", type=int, default=1, help="more than 1: a double ring (default 1)")
    plan.add_argument(
        "--results",
        choices=RESULTS,
        default="auto",
        help="how results come home: by a chain of visitors, or straight (default on GPUs of one host, if it can be)",
    )
    plan.set_defaults(run=_plan)


def _add_train(commands: Any) -> None:
    train = commands.add_parser("train", help="train a causal language model on sequences sharded over ranks")
    add_arguments(train)
    train.set_defaults(run=_train)


def _add_hosts(commands: Any) -> None:
    hosts = commands.add_parser(
        "hosts",
        help="run a script by torchrun on hosts made on this machine (root, Linux)",
        usage="burst hosts [options] -- script.py [its arguments]",
    )
    hosts.add_argument("--count", type=int, default=2, help="hosts to make (default 2)")
    hosts.add_argument("--mbit", type=float, help="limit of every host's link, each way, in Mbit/s (default none)")
    hosts.add_argument("--ranks", type=int, default=1, help="ranks on every host (default 1)")
    hosts.add_argument("--timeout", type=float, default=3600.0, help="seconds until all is killed (default 3600)")
    hosts.add_argument("--clean", action="store_true", help="only remove what killed runs have left behind")
    hosts.add_argument("script", nargs=argparse.REMAINDER, help="what torchrun is to run: a script, or -m module")
    hosts.set_defaults(run=_hosts)


def _train(args: argparse.Namespace) -> int:
    from burst_attention.train.start import train

    return train(read_config(args))


def _check(args: argparse.Namespace) -> int:
    from burst_attention.check import check, make_cases

    if args.ranks < 1 or (args.tokens is not None and args.tokens < 1):
        name = "ranks" if args.ranks < 1 else "tokens"
        raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.mask:
        args.mask = str(parse_mask(args.mask))
    cases = make_cases(args.ranks, args.tokens, args.mask, args.layout, args.direction, args.device)
    if args.mask:
        parse_mask(args.mask).require_cover(cases[0].problem.tokens, cases[0].problem.tokens)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch can use, and there is none here")
    return 0 if check(cases, args.ranks, args.json, device=args.device) else 1


def _bench(args: argparse.Namespace) -> int:
    if args.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {args.repeat}")
    for name, suites in BENCH_OPTIONS.items():
        if getattr(args, name) is not None and args.suite not in suites:
            raise ValueError(f"--{name} is not for bench {args.suite}, but for {', '.join(suites)}")
    if args.suite == "gpu":
        from burst_attention.bench_gpu import gpu

        gpu(repeat=args.repeat, output=args.output, flash=args.flash, only=args.only)
        return 0
    if args.suite == "hosts":
        from burst_attention.bench_hosts import hosts

        hosts(args.repeat, args.output, args.only, args.trace)
        return 0
    if args.suite == "loss":
        from burst_attention.bench_loss import loss

        loss(args.repeat, args.output, args.only)
        return 0
    if args.suite == "train":
        from burst_attention.bench_train import bench_train

        bench_train(args.repeat, args.output, args.only)
        return 0
    from burst_attention.bench import local

    local(tokens=16384 if args.tokens is None else args.tokens, repeat=args.repeat, output=args.output)
    return 0


def _plan(args: argparse.Namespace) -> int:
    from burst_attention.api import plan

    names = ("heads", "kv_heads", "head_dim", "layout", "direction", "device", "kernel", "ranks_per_host", "results")
    options = {name: getattr(args, name) for name in names}
    options |= {"mask": parse_mask(args.mask), "dtype": getattr(torch, args.dtype), "coalesce": "auto"}
    if args.coalesce is not None:
        options["coalesce"] = args.coalesce
    made = plan(args.tokens, args.ranks, **options)
    if args.device == "cuda" and getattr(made.kernel, "name", "") != "plain" and not torch.cuda.is_available():
        print("burst plan: there is no GPU here; planned for Hopper with FlashAttention-4", file=sys.stderr)
    try:
        print(made, flush=True)
    except BrokenPipeError:
        # Whoever read it has seen enough, as `| head` has. What is left to be written at the end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _hosts(args: argparse.Namespace) -> int:
    from burst_attention.hosts import Hosts, hosts_refusal, remove_leftovers

    if reason := hosts_refusal():
        raise ValueError(f"no hosts can be made here: {reason}")
    if args.clean:
        for name in remove_leftovers():
            print(f"removed {name}")
        return 0
    # argparse leaves the separator in or takes it out, as Python's version has it.
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script:
        raise ValueError("nothing to run; give a script, e.g. burst hosts --count 2 -- script.py")

    def show(host: int, line: str) -> None:
        # One write, for hosts may speak at once.
        print("[host {}] {}\n".format(host, line.rstrip("\n")), end="", flush=True)

    with Hosts(args.count, mbit=args.mbit) as hosts:
        outcomes = hosts.torchrun(script, args.ranks, timeout=args.timeout, on_line=show)
    for outcome in outcomes:
        if outcome.killed:
            print(f"burst hosts: host {outcome.host} was not done, and was killed", file=sys.stderr)
    # As a shell and `timeout` have it: 128 and the signal for a process that one ended, 124 where time was up.
    statuses = [o.status if o.status >= 0 else 128 - o.status for o in outcomes if not o.killed]
    return max(statuses, default=0) or (124 if any(o.killed for o in outcomes) else 0)


if __name__ == "__main__":
    sys.exit(main())
