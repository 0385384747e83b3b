"""What devices' updates were like and what became of them: queries of the coordinator's database. Synchronous and thread-safe."""

from __future__ import annotations

import json
from collections.abc import Mapping

from sqlalchemy import Engine, select, update

from coordinator import schema
from coordinator.records import ParticipantState
from coordinator.robustness import Distances, medians_of
from coordinator.schema import Key, of_attempt
from fedcg.wire.messages import Outcome
from fedcg.wire.parts import Part

REJECTED_IN_A_ROW = 2
"""A device whose updates were rejected in so many of its attempts running is left out of the next ones."""
LEFT_OUT_ROUNDS = 5
"""For so many rounds."""


class TrackRecord:
    """The updates of past attempts, and what follows from them for the next."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reject(self, key: Key, client: str, reason: str) -> None:
        """An update that was accepted can't be merged: it and its client end as if it had been rejected at once."""
        updates, participants = schema.updates, schema.participants
        with self._engine.begin() as connection:
            values = {"outcome": Outcome.REJECTED.value, "reason": reason, "weight": None}
            connection.execute(
                update(updates).where(of_attempt(updates, key), updates.c.client == client).values(**values)
            )
            declined = {"state": ParticipantState.DECLINED.value, "reason": reason}
            connection.execute(
                update(participants)
                .where(of_attempt(participants, key), participants.c.client == client)
                .values(**declined)
            )

    def give_weights(self, key: Key, weights: Mapping[str, int]) -> None:
        """Store the number of examples that each update which is merged counts for."""
        table = schema.updates
        with self._engine.begin() as connection:
            for client, weight in weights.items():
                connection.execute(
                    update(table).where(of_attempt(table, key), table.c.client == client).values(weight=weight)
                )

    def typical_distances(self, federation: str, round_number: int) -> Distances:
        """Per part, the median distance from its base that the updates merged in a closed round had."""
        updates, aggregates = schema.updates, schema.aggregates
        closed = select(aggregates.c.attempt).where(
            aggregates.c.federation == federation, aggregates.c.round == round_number
        )
        query = select(updates.c.distances).where(
            updates.c.federation == federation,
            updates.c.round == round_number,
            updates.c.attempt == closed.scalar_subquery(),
            updates.c.weight.is_not(None),
            updates.c.distances.is_not(None),
        )
        with self._engine.connect() as connection:
            rows = [json.loads(text) for text in connection.execute(query).scalars()]
        return medians_of({Part(part): float(distance) for part, distance in row.items()} for row in rows)

    def left_out(self, federation: str, round_number: int) -> dict[str, str]:
        """The clients that a round does without, and why: their last `REJECTED_IN_A_ROW` updates were rejected, not long ago."""
        table = schema.updates
        query = select(table.c.client, table.c.outcome, table.c.reason).where(
            table.c.federation == federation, table.c.round >= round_number - LEFT_OUT_ROUNDS
        )
        ended: dict[str, list[tuple[str, str]]] = {}
        with self._engine.connect() as connection:
            for client, outcome, reason in connection.execute(query.order_by(table.c.round, table.c.attempt)):
                ended.setdefault(client, []).append((outcome, reason))
        last = {client: each[-REJECTED_IN_A_ROW:] for client, each in ended.items()}
        return {
            client: each[-1][1]
            for client, each in last.items()
            if [outcome for outcome, _ in each] == [Outcome.REJECTED.value] * REJECTED_IN_A_ROW
        }
