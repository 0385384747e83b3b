"""The masked sum of each federation's open attempt, so that a coordinator that starts again goes on with it. Part of the store."""

from __future__ import annotations

from sqlalchemy import delete, insert, select

from coordinator.storage import schema


class SumRecords(schema.Queries):
    """One record per federation, of the last attempt that had a sum."""

    def keep(self, key: tuple[str, int, int], content: str) -> None:
        """Replace the federation's record; `key` is (federation, round, attempt)."""
        federation, round_number, attempt = key
        table = schema.masked_sums
        values = {"federation": federation, "round": round_number, "attempt": attempt, "content": content}
        with self._engine.begin() as connection:
            connection.execute(delete(table).where(table.c.federation == federation))
            connection.execute(insert(table).values(**values))

    def of(self, key: tuple[str, int, int]) -> str | None:
        """The record of that attempt, if it is the last one."""
        table, (federation, round_number, attempt) = schema.masked_sums, key
        of_key = (table.c.federation == federation, table.c.round == round_number, table.c.attempt == attempt)
        return next((str(row.content) for row in self._rows(select(table).where(*of_key))), None)
