"""What a run did, after it: report.json, report.png and a few lines for the terminal."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

from cosmos_ctrl.audit import RunReport, StepReport, audit


def write_report(run: Path) -> None:
    """Count from the journals, write the report beside them, and print the summary."""
    report = audit(run)
    (run / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    print()
    print("\n".join(summary_lines(report)))
    print(f"  report  {run / 'report.json'}")
    try:
        if draw(report, run / "report.png"):
            print(f"  picture {run / 'report.png'}")
    except ImportError:
        print("  no picture: matplotlib is not installed (extra: demo)")


def summary_lines(report: RunReport) -> list[str]:
    """The recovery in a few lines."""
    rising = ""
    if report.reward_first is not None and report.reward_last is not None:
        rising = f"; mean reward {report.reward_first:.3f} at first, {report.reward_last:.3f} at last"
    return [
        (
            f"{len(report.executions)} executions, {report.completed_training_steps} steps, "
            f"{report.completed_optimizer_updates} optimizer updates{rising}"
        ),
        f"  a restart from the live cursor would have lost  {report.live_cursor_would_skip:5d} prompts",
        f"  this run skipped                                {report.skipped:5d} completions",
        f"  repeated, the restored model contained them     {report.repeated:5d} of at most {report.window_at_checkpoint}",
        f"  spared, the checkpoint's record proved them     {report.spared:5d}",
        f"  redone, trained after the checkpoint            {report.redone:5d}",
        f"  reports of dead executions refused              {report.stale_reports_refused:5d}",
        f"  completions left in the budget                  {report.remaining_completions:5d}",
    ]


def draw(report: RunReport, path: Path) -> bool:
    """Reward by step, and the fetched cursor against the safe boundary over time, with each restart marked. False: no step to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rewards, places) = pyplot.subplots(2, 1, figsize=(9, 7), layout="constrained")
    if not report.steps:
        pyplot.close(figure)
        return False
    begin = report.steps[0].t
    budget = max(step.safe for step in report.steps)
    restarts: list[float] = []
    for number, group in groupby(report.steps, key=lambda step: step.execution):
        steps = list(group)
        kept = [step for step in steps if step.in_lineage]
        lost = [step for step in steps if not step.in_lineage]
        colour = f"C{number - 1}"
        _plot_rewards(rewards, kept, colour, f"execution {number}")
        _plot_rewards(rewards, lost, "0.7", f"execution {number}, lost" if lost else None)
        times = [step.t - begin for step in steps]
        places.plot(
            times,
            [budget - step.cursor for step in steps],
            color=colour,
            linestyle="--",
            label=f"fetched cursor, {number}",
        )
        places.plot(times, [budget - step.safe for step in steps], color=colour, label=f"safe boundary, {number}")
        restarts.append(steps[-1].t - begin)
    for crash in restarts[:-1]:
        places.axvline(crash, color="C3", linewidth=1)
        places.annotate("crash", (crash, 0), color="C3", xytext=(4, 4), textcoords="offset points")
    rewards.set(xlabel="training step", ylabel="mean reward", title="Reward")
    places.set(xlabel="seconds", ylabel="completions", title="Where the sampler stands, and where it is safe to resume")
    rewards.legend()
    places.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _plot_rewards(axes: object, steps: list[StepReport], colour: str, label: str | None) -> None:
    points = [(step.step, step.mean_reward) for step in steps if step.mean_reward is not None]
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, label=label, marker=".")  # type: ignore[attr-defined]
