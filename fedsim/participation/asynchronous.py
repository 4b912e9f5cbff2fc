"""Asynchronous training: FedAsync's scheduler, on a virtual clock instead of real threads. Xie et al. 2019; the slides.

`clients_per_round` clients train at the same time, each on the model it was sent. Whenever one is done its update goes
to the server at once, which makes one update of its own (a round) and sends the new model to another idle client. Other
updates have happened in between: those are the staleness. One that is staler than `max_staleness` is thrown away.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim import check, rng
from fedsim.participation.base import Participation, steps_taken
from fedsim.types import Clock, Turn


@dataclass(frozen=True)
class Asynchronous(Participation):
    max_staleness: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_staleness is not None:
            check.integer("max_staleness", self.max_staleness, ge=0)

    def __call__(self, seed: int, round: int, steps: Sequence[int], clock: Clock) -> Turn:
        """The next update that counts. The clock's "running" is a heap of [done at, client, version, dispatch]."""
        if "running" in clock:
            now, sent = clock["now"], clock["sent"]
            assert isinstance(now, float)
            assert isinstance(sent, float)
            assert isinstance(clock["running"], list)
            running = [list(entry) for entry in clock["running"]]
        else:
            now, sent, running = 0.0, 0.0, []
            for client in rng.sample(rng.generator(seed, "cohort", 0), len(steps), self.count(len(steps))).tolist():
                self._dispatch(seed, running, now, client, 0, int(sent), steps)
                sent += 1
        before = clock.get("sent", 0.0)
        assert isinstance(before, float)
        discarded = 0
        while True:
            now, client, version, dispatch = heapq.heappop(running)
            arrived = not self.fails(seed, int(dispatch), int(client))
            stale = self.max_staleness is not None and round - version > self.max_staleness
            used = arrived and not stale
            # Another idle client is sent the model as it is now: the new one if this update is used.
            idle = self._idle(seed, int(sent), len(steps), {int(entry[1]) for entry in running})
            self._dispatch(seed, running, now, idle, round + used, int(sent), steps)
            sent += 1
            if used:
                break
            discarded += arrived
        k = int(client)
        after: Clock = {"now": now, "sent": sent, "running": running}
        effort = self.effort(seed, int(dispatch), [k])
        return Turn([k], [k], effort, int(version), after, int(sent - before), discarded)

    def _dispatch(
        self,
        seed: int,
        running: list[list[float]],
        now: float,
        client: int,
        version: int,
        dispatch: int,
        steps: Sequence[int],
    ) -> None:
        share = self.effort(seed, dispatch, [client]).get(client, 1.0)
        done = now + self.duration(seed, dispatch, client, steps_taken(steps[client], share))
        heapq.heappush(running, [done, client, version, dispatch])

    def _idle(self, seed: int, dispatch: int, num_clients: int, busy: set[int]) -> int:
        generator = rng.generator(seed, "dispatch", dispatch)
        if 2 * len(busy) > num_clients:
            free = [k for k in range(num_clients) if k not in busy]
            return free[generator.randint(len(free))]
        while (client := int(generator.randint(num_clients))) in busy:
            pass  # most are idle
        return client
