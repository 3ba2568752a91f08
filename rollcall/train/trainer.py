"""The life of a training: resume, train, evaluate, save, roll back, end."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollcall.config import ConfigError
from rollcall.messages.text import listed
from rollcall.records.attempt import LOST_PEER
from rollcall.records.run_dir import FencedError, State
from rollcall.system.process import RESCUE
from rollcall.train import changes
from rollcall.train.checkpoint.contents import OBJECTS
from rollcall.train.checkpoint.engine import Restored
from rollcall.train.checkpoint.saver import Saver
from rollcall.train.health import rows
from rollcall.train.numerics.hidden import Audit
from rollcall.train.ranks import failure
from rollcall.train.ranks.agreement import Action, FaultError, Members
from rollcall.train.ranks.clock import clock
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.stop import GoOn
from rollcall.train.state import Kept, TrainingState, hand_over
from rollcall.train.step import STATES, Steps
from rollcall.train.task import Task


class Trainer:
    """Trains one run on this rank; every rank makes each call together."""

    def __init__(
        self, run: Run, task: Task, state: TrainingState, saver: Saver, members: Members
    ) -> None:
        self._run, self.task, self.state, self.saver = run, task, state, saver
        self.steps = Steps(run, task, state, [saver, task, *members], saver.close)
        self._recovery = self.steps.recovery
        self._audit: Audit | None = None

    def resume(self, kept: Kept | None = None) -> bool:
        """Continue from the newest state that ranks `kept`, or checkpoint; False without one."""
        self.task.identify(resumes=self.saver.open())
        self._recovery.resume()
        if kept is not None:
            self.saver.resume(loads=False)
            self._run.progress.step, facts = hand_over(kept, self.state, self._run.world)
            self.task.continue_from(self._run.progress.step, facts)
            self._run.record("resumed", step=self._run.progress.step, from_memory=True)
            self._recovery.is_idle = False
            return True
        if checkpoint := self._load():
            changes.tell(self._run, checkpoint.step, checkpoint.engine.facts)
            self._run.record("resumed", step=checkpoint.step)
            self._recovery.is_idle = False
        return checkpoint is not None

    def train(self) -> State:
        """Train to the end, or until all ranks agree to stop; save the state in either case."""
        self._audit = self.state.audit()
        try:
            return self._train()
        except Exception as error:
            is_lost, members = LOST_PEER.search(failure.describe(error)), self._run.world.members
            state = self.state.read_alone() if members else {}
            if isinstance(error, GoOn):
                self.saver.close()
            elif not (is_lost and members and OBJECTS not in state and members.is_lost()):
                if is_lost:
                    self._rescue()
                raise
            self.saver.checkpoints.abandon()
            step, is_whole = self._run.progress.step, self.steps.rewind()
            raise GoOn(Kept(step if is_whole else -1, state, self.task.facts(step))) from None

    def _train(self) -> State:
        if self.task.lacks_evaluation(self._run.progress.step):
            self._evaluate()
        action = self._steps_with_rollbacks()
        step = self._run.progress.step
        self.state.meet(step)  # if a signal ended the steps before that
        self.saver.finish(step, **self.task.facts(step))
        if action is Action.CONTINUE and not self.task.patience.reason:
            action = self._evaluate()
        self.saver.close()
        if action is Action.CONTINUE:
            if self.saver.problem:
                return "failed"
            self.saver.remove_local()
        return STATES[action]

    def _steps_with_rollbacks(self) -> Action:
        while True:
            try:
                with no_collection(), clock.running(self._run.world.device):
                    action = self.steps.run(self._between)
                if action is Action.CONTINUE:
                    self._recovery.finish()
                return action
            except FaultError:  # on all ranks
                on_repeated = self._run.config.faults.on_repeated
                if on_repeated == "stop" or not self._recovery.row:
                    raise
            self.task.restart()
            checkpoint = self._load()
            self._recovery.roll_back(checkpoint and checkpoint.step)

    def _rescue(self) -> None:
        """Save the newest step before this rank ends, because others are lost."""
        step = self._run.progress.step
        try:
            Path("/proc/self/comm").write_text(RESCUE)  # the parent of the ranks waits for us
            if not self.state.lags and self.steps.rewind():
                self.saver.rescue(step, self.state.read_alone, **self.task.facts(step))
        except Exception as error:  # the loss is what ends this rank
            print(f"rollcall: step {step} was not saved: {error}", file=sys.stderr, flush=True)
        finally:
            with suppress(OSError):
                Path("/proc/self/comm").write_text("python")

    def _tell_changed(self, step: int) -> None:
        """Name once what the first steps change, and no checkpoint holds or ranks do not share."""
        if not (result := self._audit and self._audit.after_step()):
            return
        self._audit, (names, moved) = None, result
        if names:
            text = (
                f"training changes {listed(names)}, which no checkpoint holds: a resumed run "
                "begins with other values. Use buffers in a model, state_dict() and "
                "load_state_dict() in a loss, metric or callback, the state of weights in an "
                "optimizer"
            )
            in_passes = [name for name in names if name.startswith(("model.", "train.loss."))]
            if in_passes and self._run.config.data.micro_batch is not None:
                text += (
                    f". {listed(in_passes)} may change once in each micro-batch: then the result "
                    "depends on data.micro_batch"
                )
            self._run.tell("unsaved_state", text, step=step)
        if self._run.config.parallel.check != "off" and self.state.strategy.apart == 1:
            self._run.warn(rows.warning(self.state.strategy, moved))

    def _between(self, step: int) -> None:
        self.state.meet(step)
        self._tell_changed(step)
        self.saver.prepare_rescue(self.state.read_alone)
        if self.task.is_evaluation_due(step):
            self.steps.settle(now=True)
            with clock.away():
                self._evaluate()
        # The last step is saved by `train`, so that the checkpoint has the final evaluation.
        if not self._run.progress.is_over and self.saver.is_due(step):
            self._save(step)

    def _save(self, step: int) -> None:
        run_dir = self._run.run_dir
        try:
            if self._run.world.is_main:
                run_dir.check_claim()
        except FencedError:
            raise
        except OSError:  # the claim is checked again before publishing, and a save may fail
            if not run_dir.config.exists():  # somebody has removed the directory of a live run
                with suppress(OSError):
                    self._run.claim_directory()
                    self._run.warn(f"{run_dir.path} was removed; it is made again for this save")
        self.steps.settle(now=True)  # save only a state that all ranks know to be good
        if not self._recovery.row:
            with clock.away():
                self.saver.begin(step, **self.task.facts(step))

    def _evaluate(self) -> Action:
        step = self._run.progress.step
        with self.state.evaluated(), self._run.measures.closed():
            try:
                result = self.task.evaluate(step, self.steps.gradient.micro_batch)
            except (ConfigError, FaultError):  # on all ranks; the save in flight is still good
                self.saver.close()
                raise
        if isinstance(result, Action):
            return result
        self.saver.evaluated(step, result)
        return Action.CONTINUE

    def _load(self) -> Restored | None:
        if checkpoint := self.saver.resume():
            self._run.progress.step = checkpoint.step
            self.task.continue_from(checkpoint.step, checkpoint.engine.facts)
            self.state.load(checkpoint.state, checkpoint.step)
        return checkpoint


@contextmanager
def no_collection() -> Iterator[None]:
    """Let Python not collect garbage by itself; `Steps.run` does so, on all ranks together."""
    was_enabled = gc.isenabled()
    gc.collect()  # what is left is in the oldest generation, which later collections do not scan
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
