"""summary.json: the results of a run."""

import pathlib
import typing

from ddptrain.ground import files

if typing.TYPE_CHECKING:
    from ddptrain.world import distributed

FILE = "summary.json"

Record = dict[str, typing.Any]


def write(
    world: "distributed.World",
    run_dir: pathlib.Path | None,
    report_json: pathlib.Path | None,
    **figures: typing.Any,
) -> Record:
    """Write the summary of a run that has ended well, on rank 0, and return it.

    It is summary.json, as docs/reference/run-directory.md describes it, and behind the figures of
    the Kubernetes guide's trainer the file of --report-json. Losses are in nats, times in seconds;
    rates are over all ranks.
    """
    summary = {
        "nodes": world.num_nodes,
        "world_size": world.size,
        "ranks": world.members,
        **figures,
    }
    if run_dir is not None:
        files.write_json(run_dir / FILE, summary)
    if report_json is not None:
        guide = {
            "world_size": world.size,
            "tokens": summary.get("tokens") or summary.get("samples"),
            "tokens/s": summary.get("tokens_per_second") or summary.get("samples_per_second"),
            "elapsed": summary["elapsed_s"],
        }
        files.write_json(report_json, {**guide, **summary})
    return summary
