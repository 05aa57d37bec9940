"""`python -m spot_batch.training`: train the bundled target, resume it, export it."""

import argparse
import logging
from pathlib import Path

from spot_batch.training.corpus import held_out_problems, write_prompts
from spot_batch.training.curve import plot_losses
from spot_batch.training.export import evaluate_checkpoint, export_target
from spot_batch.training.target import default_settings, newest_checkpoint, train_target

logger = logging.getLogger("spot_batch.training")


def main() -> None:
    """Parse, train to the end of the schedule, evaluate, export."""
    parser = argparse.ArgumentParser(prog="python -m spot_batch.training", description=__doc__)
    parser.add_argument("run", type=Path, help="checkpoints and logs go here; resumed if present")
    parser.add_argument("--export", type=Path, help="write the model folder here at the end")
    parser.add_argument("--prompts", type=Path, help="write the held-out prompts here")
    parser.add_argument("--stop-at", type=int, help="end early at this step, to be resumed")
    parser.add_argument(
        "--num-evaluated", type=int, default=240, help="held-out prompts at the end"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings = default_settings()
    if arguments.prompts is not None:
        write_prompts(arguments.prompts)
    train_target(settings, arguments.run, stop_at=arguments.stop_at)
    plot_losses(arguments.run, arguments.run / "losses.png")
    if arguments.export is not None:
        checkpoint = newest_checkpoint(arguments.run)
        problems = list(held_out_problems(arguments.num_evaluated, seed=settings.seed))
        figures = evaluate_checkpoint(checkpoint, problems, settings=settings)
        logger.info("%s: %s", checkpoint.name, figures)
        export_target(
            checkpoint,
            arguments.export,
            settings=settings,
            command="python -m spot_batch.training RUN --export FOLDER",
            figures=figures,
        )


if __name__ == "__main__":
    main()
