"""What a worker does about checkpoints in the course of a run: start, save when due, end."""

from collections.abc import Callable
from pathlib import Path

from ntp.checkpoint.load import load
from ntp.checkpoint.save import Saver, SaveReport
from ntp.checkpoint.store import CheckpointStore, checkpoint_directory
from ntp.collectives import Mesh
from ntp.config import Config
from ntp.errors import CheckpointError
from ntp.hugging_face import import_weights
from ntp.trainer import Trainer


class Checkpoints:
    """The checkpoints of one worker's run.

    Args:
        say: takes a line for the user; does nothing on all ranks but one.
    """

    def __init__(self, config: Config, run_dir: Path, mesh: Mesh, say: Callable[[str], None]):
        self.directory = checkpoint_directory(config, run_dir)
        self._config, self._mesh, self._say = config, mesh, say
        self._saver = Saver(CheckpointStore(self.directory), mesh.host, config, config.checkpoint.keep)
        self._last: SaveReport | None = None

    def start(self, trainer: Trainer, resume: str | None, strict: bool) -> int:
        """Give the trainer its state and return the step after which it goes on; collective.

        Args:
            resume: see `ntp.checkpoint.load`; None = a new run.

        Raises:
            CheckpointError: nothing can be loaded. HuggingFaceError: `model.init_from` does not fit.
        """
        if self._config.checkpoint.every or self._config.train.stop_after is not None:
            self._saver.prepare(trainer.optimizer)
        if resume is not None:
            loaded = load(resume, self.directory, self._config, trainer.optimizer, self._mesh.host, strict)
            for note in loaded.notes:
                self._say(note)
            if loaded.found:
                trainer.publish()
                return loaded.step
        if self._config.model.init_from is not None:
            import_weights(Path(self._config.model.init_from), self._config.model, trainer.optimizer)
            trainer.publish()
        return 0

    def before_commit(self) -> None:
        """Wait until the state of the save under way may change."""
        self._saver.wait_staged()

    def after(self, trainer: Trainer, step: int) -> None:
        """Start a save if one is due after `step`, and tell how earlier ones ended."""
        if self._is_due(step):
            self._saver.save(trainer.optimizer, step)
        self._tell()

    def end(self) -> None:
        """Wait for the last save. Raises CheckpointError if it failed: nothing later will make up for it."""
        self._saver.finish()
        self._tell()
        if self._last is not None and self._last.error is not None:
            raise CheckpointError(
                f"the last checkpoint, of step {self._last.step}, failed: {self._last.error}"
            )

    def _is_due(self, step: int) -> bool:
        every, train = self._config.checkpoint.every, self._config.train
        if step == train.last_step:
            return every > 0 or train.stop_after is not None
        return every > 0 and step > 0 and step % every == 0

    def _tell(self) -> None:
        for report in self._saver.poll():
            self._last = report
            self._say(report.line())
