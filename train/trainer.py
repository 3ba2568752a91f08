"""The training steps: forward, backward, update, agree with all ranks, save, stop.

Nothing here knows which strategy trains. The members of a step report numbers, which one all-reduce
sums over the ranks; short steps share one. The sums are read one step later, while the next
gradient is being computed, so neither the network nor the GPU is waited for, and all ranks act on
them after the same step.
"""

from collections.abc import Sequence

from rollcall.config import ConfigError
from rollcall.run_dir import FencedError, State
from rollcall.train import changes, garbage
from rollcall.train.checkpoint.engine import Restored
from rollcall.train.checkpoint.saver import Saver
from rollcall.train.dist.agreement import Action, Agreement, FaultError, Member
from rollcall.train.dist.clock import clock
from rollcall.train.dist.run import Run
from rollcall.train.task import Task
from rollcall.train.update import Update

STATES: dict[Action, State] = {
    Action.CONTINUE: "done",
    Action.STOP: "stopped",
    Action.REQUEUE: "requeue",
}


class Trainer:
    """Trains one run on this rank; every rank makes each call together."""

    def __init__(
        self, run: Run, task: Task, update: Update, saver: Saver, members: Sequence[Member]
    ) -> None:
        self._run = run
        self.task = task
        self.update = update
        self.saver = saver
        self.step = 0  # updates done; updates that a rollback left out count too
        self._recovery = update.recovery
        self._asked = Action.CONTINUE
        # The members of a step, in the order in which they settle it.
        self._agreement = Agreement([saver, task, update, *members], run.world.device)

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        self.task.identify(resumes=self.saver.open())
        self._recovery.resume()
        found = self._load()
        if found:
            changes.tell(self._run, found.step, found.engine.facts)
            self._run.record("resumed", step=self.step)

    def train(self) -> State:
        """Train to the end, or until all ranks agree to stop; save the state in either case."""
        action = self._steps_with_rollbacks()
        self.saver.finish(self.step, **self.task.facts(self.step))
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
                with garbage.between_steps(), clock.running(self._run.world.device):
                    return self._steps()
            except FaultError:  # on all ranks
                on_repeated = self._run.config.faults.on_repeated
                if on_repeated == "stop" or not self._recovery.row:
                    raise
            self.task.restart()
            found = self._load()
            self._recovery.roll_back(found and found.step)

    def _steps(self) -> Action:
        first = self.step + 1
        self._agreement.restart()
        if self.task.patience.reason:  # of an earlier attempt
            return Action.CONTINUE
        for batch in self.task.batches(self.step):
            if self.step in self._recovery.left_out:
                self.step += 1
                continue
            garbage.collect(self.step)
            self.update.gradient(batch, self.step, self.task.missing)
            action = self._settle()  # the step before, while the GPU computes this gradient
            self.update.apply(batch, self.step, self.task.missing)
            self.step += 1
            clock.step()
            self._send()
            if self.step == first:
                self._run.record("first_step", step=self.step, steps=self.task.order.steps)
            if action is not Action.CONTINUE:
                self._run.record("signalled", step=self.step, state=STATES[action])
                self._settle(now=True)
                return action
            self._evaluate_or_save_if_due()
            if self.task.patience.reason:
                break
        self._settle(now=True)
        return Action.CONTINUE

    def _send(self) -> None:
        due = self.step % self._run.config.log.every == 0
        due |= self.update.must_exchange or self.task.must_exchange
        self._agreement.send(self.step, self.update.skipped, due)

    def _settle(self, now: bool = False) -> Action:
        """Let the members act on the steps that were sent; repeat the newest if one asks for that.

        Unless they must act `now`, they may wait for further steps.
        """
        while True:
            try:
                action = self._agreement.settle(now)
            except (ConfigError, FaultError):  # on all ranks; the save in flight is still good
                self.saver.close()
                raise
            if action is not Action.REPEAT:
                self._asked = max(self._asked, action)  # also if a save or evaluation settles
                return self._asked
            self.update.repeat()
            self._agreement.send(self.update.step, self.update.skipped, is_due=True)

    def _evaluate_or_save_if_due(self) -> None:
        if self.task.is_evaluation_due(self.step):
            self._settle(now=True)
            with clock.away():
                self._evaluate()
        # The last step is saved by `finish`, so that the checkpoint has the final evaluation.
        if self.step < self.task.order.steps and self.saver.is_due(self.step):
            self._leave_if_fenced()
            self._settle(now=True)  # save only a state that all ranks know to be good
            if not self._recovery.row:
                with clock.away():
                    self.saver.begin(self.step, **self.task.facts(self.step))

    def _evaluate(self) -> Action:
        with self.update.evaluated():
            try:
                result = self.task.evaluate(self.step)
            except ConfigError:  # on all ranks; the save in flight is still good
                self.saver.close()
                raise
        if isinstance(result, Action):
            return result
        self.saver.evaluated(self.step, result.values)
        return Action.CONTINUE

    def _load(self) -> Restored | None:
        """Load the newest checkpoint, if there is one."""
        found = self.saver.resume()
        if found:
            self.step = found.step
            self.task.continue_from(found.step, found.engine.facts)
            self.update.load_state(found.state)
        return found

    def _leave_if_fenced(self) -> None:
        try:
            self._run.run_dir.check_claim()
        except FencedError:
            raise
        except OSError:  # the claim is checked again before publishing, and a save may fail
            pass
