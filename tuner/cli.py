"""The command line: parses, calls and prints. Heavy modules are imported inside the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from . import program
from .options import duration, indices, share, workload_argument, workload_options

# As kt.tuner.strategy, which is not imported here.
STRATEGIES = ("kt", "forest", "autotvm", "anneal", "random", "grid")
LOG = click.argument("log", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="JSON on stdout, for machines.")
TRIAL = click.option("--trial", type=int, help="This trial instead of the best.")
RUN = click.option("--run", help="Only this run (the start of its id is enough).")
FORCE = click.option("--force", is_flag=True, help="Overwrite a file that kt did not write.")


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from .versions import kt_version

        click.echo(f"kt {kt_version()}")
        context.exit()


class InOrder(click.Group):
    """Lists commands in the order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version,
    help="Show the version and exit.",
)  # fmt: skip
def cli() -> None:
    """Tunes tensor kernels: measures schedules for real, guided by a learned cost model.

    \b
    kt tune gemm 512x512x512 --dtype fp32     search; results go to kt-logs/
    kt show kt-logs                           what was found
    kt apply kt-logs -o kernel.c --verify     the best kernel as one C file
    """


@cli.command()
@workload_argument
@click.option(
    "--workloads",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="One workload a line; # begins a comment. All share the model. A line's weight=NUMBER is "
    "what its time counts for --scheduler gain.",
)
@workload_options()
@click.option(
    "--target",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="auto, cpu, cuda or a name that `kt target` lists.",
)
@click.option(
    "--trials",
    type=int,
    help="Trials a workload, shared with --scheduler gain.  [default: 128; CUDA 256]",
)
@click.option(
    "--scheduler",
    metavar="NAME",
    help="Turns of several workloads: even, or gain: where trials save most.  [default: even]",
)
@click.option(
    "--time", "seconds", type=duration, metavar="TIME", help="Time budget: 90, 90s, 5m, 1h30m."
)
@click.option(
    "--log",
    default="kt-logs",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Log file, or a directory of logs.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random draws.")
@click.option("--resume", is_flag=True, help="Go on with the newest run of these workloads.")
@click.option("--family", metavar="NAMES", help="Only these kernel families: mma,simt.")
@click.option("--strategy", metavar="NAME", help=f"{', '.join(STRATEGIES)}.  [default: kt]")
@click.option(
    "--batch-size",
    type=int,
    help="Trials of a full batch; early ones are smaller.  [default: 16; CUDA 32]",
)
@click.option(
    "--epsilon", type=share(), metavar="SHARE", help="Share of exploring trials.  [default: 0.25]"
)
@click.option(
    "--patience", type=int, help="Stop after so many trials without improvement; 0: never."
)
@click.option(
    "--near-bound",
    type=share(0, 10),
    metavar="SHARE",
    help="Stop this close to the measured bound: 5%.",
)
@click.option(
    "--max-failures",
    type=int,
    help="Stop when this many failed before any succeeded.  [default: 64]",
)
@click.option(
    "--finalists", type=int, help="Trials that are measured again at the end.  [default: 4]"
)
@click.option("--builders", type=int, help="Builds at a time.  [default: usable cores]")
@click.option("--gpus", type=indices, metavar="LIST", help="These GPUs: 0,1.  [default: all alike]")
@click.option(
    "--build-only", is_flag=True, help="Write a bundle for a device that is not here (-o DIR)."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="With --build-only."
)
@click.option(
    "--bundle", type=click.Path(path_type=Path), metavar="DIR", help="Take the first binaries here."
)
@click.option(
    "--build-timeout", type=duration, metavar="TIME", help="For one build.  [default: 30s]"
)
@click.option(
    "--run-timeout", type=duration, metavar="TIME", help="For one check or run.  [default: 10s]"
)
@click.option(
    "--sample-time",
    "sample_seconds",
    type=duration,
    metavar="TIME",
    help="Measuring time of a trial.  [default: 0.1s; CUDA 0.02s]",
)
@AS_JSON
@click.option("--plain", is_flag=True, help="Plain lines also on a terminal.")
@click.option("--quiet", is_flag=True, help="Only the summary.")
def tune(**options: Any) -> int:
    """Search the fastest kernel of WORKLOAD by measuring candidates.

    \b
    kt tune gemm 512x512x512 --dtype fp32
    kt tune gemm 33x17x65 batch=512 layout=nt epilogue=bias+gelu dtype=fp32
    kt tune conv2d 1x56x56x64,64x3x3 --pad 1 --epilogue bias+relu
    kt tune attention 1x8x1024x64 --causal --kv-heads 2
    kt tune --workloads shapes.txt --trials 64 --scheduler gain
    kt tune gemm 4096x4096x4096 --target h200 --build-only -o bundle    (no GPU needed)
    kt tune gemm 4096x4096x4096 --target cuda --bundle bundle           (on the H200)

    A bundle is a cache of binaries by content, with the proposals that need no measurement: the
    first batches, or as many as --trials with --strategy random or grid. The run that takes it must
    have the same workloads, seed and search settings, kt and compiler, or it is refused. Warm
    starts from a log take places of such proposals; those are then built. Binaries run on your GPU:
    use bundles of people you trust.

    WORKLOAD is gemm MxNxK, conv2d NxHxWxC,KxRxS or attention BxHxSxD; its options may be given as
    words (layout=nt, causal=true) or flags.
    """  # fmt: skip
    from .start import tune_command

    return tune_command(**options)


@cli.command()
@LOG
@workload_argument
@workload_options(hidden=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; else stdout.")
@click.option(
    "--format",
    "form",
    default="",
    metavar="FORMAT",
    help="c or json for CPU kernels; cu, cubin, python or json for CUDA ones.",
)
@click.option("--verify", is_flag=True, help="Compile the emitted text and check its results.")
@click.option("--bench", is_flag=True, help="Time it against the default and the vendor library.")
@click.option("--any-device", is_flag=True, help="Also a kernel measured on another device.")
@click.option("--predict", is_flag=True, help="Of a shape never tuned, by the model of LOG's.")
@click.option("--dispatch", is_flag=True, help="One file with the best kernel of every shape.")
@TRIAL
@RUN
@FORCE
def apply(**options: Any) -> int:
    """Emit the best kernel of LOG as one self-contained file.

    LOG is a file or directory; name the WORKLOAD when it has several, with options as for tune.

    \b
    c       one C file for cc; cu one CUDA file for nvcc: kt_launch and its workspace
    cubin   the binary alone, built here by NVRTC without a GPU
    python  a module that needs CuPy and not kt; takes tensors of torch, CuPy, JAX …; for its
            workload it has torch's conv2d or scaled_dot_product_attention
    json    the record

    With --dispatch the file holds the best kernel of every gemm of LOG (or of the WORKLOADs named),
    and a plain one for any other extents; kt_launch_gemm(m, n, k, batch, args, workspace) chooses.
    Its shapes have the rest in common: where LOG has several, restrict it, as in

    
    kt apply runs/ gemm --dispatch --dtype bf16 --layout nt -o gemm.cu
    """
    from .apply import apply_command

    return apply_command(**options)


@cli.command()
@LOG
@workload_argument
@workload_options(hidden=True)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the search: .png, .svg or .pdf.",
)
@click.option(
    "--explain", "explained", is_flag=True, help="Which knobs mattered, and where the model erred."
)
@TRIAL
@RUN
@FORCE
@AS_JSON
def show(**options: Any) -> int:
    """Show what LOG holds: bests, failures, time, model quality.

    LOG is a file or directory. WORKLOADs, with options as for tune, restrict the view; so does an
    operator alone, such as gemm.
    """
    from .show import show_command

    return show_command(**options)


@cli.command()
@LOG
@workload_argument
@workload_options(hidden=True)
@click.option("--strategy", metavar="NAME", help="Search the recorded points with this instead.")
@click.option("--budget", type=click.IntRange(1), help="Trials of it.  [default: half the points]")
@click.option("--seeds", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option(
    "--constraints", type=click.Path(path_type=Path), metavar="FILE",
    help="T1 file of a foreign recording: its conditions and defaults.",
)  # fmt: skip
@RUN
@AS_JSON
def replay(**options: Any) -> int:
    """Check offline that LOG's proposals are reproduced, or re-run a strategy on its outcomes.

    LOG may also be a T4 file or a Kernel Tuner cache, plain or gzip: a strategy then searches what
    that tool recorded. WORKLOAD, with options as for tune, restricts it.

    Exit code 0: identical; 1: different under the same versions; 2: other versions.
    """
    from .offline import replay_command

    return replay_command(**options)


@cli.command()
@LOG
@workload_argument
@workload_options(hidden=True)
@click.option(
    "--format", "form", default="t4", show_default=True, metavar="FORMAT", help="t4, kernel-tuner."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; else stdout.")
@RUN
@FORCE
def export(**options: Any) -> int:
    """Write LOG's trials in another tool's format, with nothing lost.

    t4 is a T4 result file, kernel-tuner a Kernel Tuner cache; each result carries its whole record.
    """
    from .export import export_command

    return export_command(**options)


@cli.command()
@click.argument("words", metavar="LOG|WORKLOAD...", nargs=-1)
@workload_options(hidden=True)
@click.option(
    "--target",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Of a WORKLOAD: as for tune.",
)
@click.option("--any-device", is_flag=True, help="Also kernels measured on another device.")
@RUN
@click.option(
    "--time",
    "seconds",
    type=duration,
    default="2s",
    show_default=True,
    metavar="TIME",
    help="Measuring time of a workload.",
)
@click.option("--rested", is_flag=True, help="CUDA: pause 10 ms before each sample.")
@click.option("--opponents", metavar="NAMES", help="CUDA: these libraries, separated by commas.")
@AS_JSON
def bench(**options: Any) -> int:
    """Time tuned kernels, their defaults and the vendor's libraries, interleaved.

    LOG is a file or directory, all of whose workloads are timed (or one: kt bench LOG WORKLOAD).
    A WORKLOAD alone is timed with its default schedule. On the CPU the opponent is NumPy; on CUDA
    what is installed of these (* only when named: it tunes itself for up to minutes):

    \b
    gemm       torch, cublaslt-tuned (over all its candidates), inductor-triton*
    conv2d     cudnn (through torch, in benchmark mode), inductor*
    attention  cudnn and fa2 (torch's scaled_dot_product_attention), fa3, flex*
    """
    from .bench import bench_command

    return bench_command(**options)


@cli.command()
@workload_argument
@workload_options()
@click.option(
    "--target",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="cpu (auto means it here) or a name that `kt target` lists.",
)
@click.option("--check", "theta", metavar="JSON", help="Whether this θ is legal, and why not.")
@AS_JSON
def space(**options: Any) -> int:
    """Show the knobs of WORKLOAD and what each rule removes."""
    from .describe import space_command

    return space_command(**options)


@cli.command()
@click.argument("name", required=False)
@AS_JSON
def target(name: str | None, as_json: bool) -> int:
    """List the targets, or show one in full."""
    from .describe import target_command

    return target_command(name, as_json)


def main(arguments: Sequence[str] | None = None) -> None:
    """The `kt` program. Ends the process with the command's exit code."""
    sys.exit(program.end(program.run(cli, arguments)))
