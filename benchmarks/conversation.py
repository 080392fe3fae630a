"""The demo's workload: users who take turns in long conversations, more of them than the device cache can
hold.

Every user opens with a long text of their own and goes on from the model's own answers. When a user's next
turn comes, the others have pushed the conversation out of the device cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.engines.client import Answer, CacheCounts, EngineClient, Message

ANSWER_TOKENS = 16
OPENING_WORDS = 420
MESSAGE_WORDS = 32
SEED = 7
WARM_UP_USER = -1
NOUNS = ("ledger", "harbour", "signal", "meadow", "engine", "lantern", "archive", "river", "garden", "paper")
VERBS = ("keeps", "follows", "measures", "forgets", "carries", "finds", "opens", "repeats", "counts", "moves")


@dataclass(frozen=True)
class Turn:
    """One answered prompt: which turn of which user, what it cost, and what came from where."""

    user: int
    turn: int
    again: bool  # the same prompt sent once more, at once
    answer: Answer
    found: CacheCounts


Told = Callable[[int, int], None]  # turns done, turns in all


class Conversations:
    """Plays the same conversations against one server; twice the same means the same prompts and answers."""

    def __init__(self, client: EngineClient, users: int, turns: int) -> None:
        self._client = client
        self._users = users
        self._turns = turns
        self._histories: list[list[Message]] = []

    async def play(self, *, ask_again: bool, told: Told) -> list[Turn]:
        """All turns, users in rotation; ``ask_again`` sends every prompt a second time right after the
        first.
        """
        await self._client.chat([_message(WARM_UP_USER, 0)], ANSWER_TOKENS)
        histories: list[list[Message]] = [[] for _ in range(self._users)]
        self._histories = histories
        played: list[Turn] = []
        for turn in range(self._turns):
            for user, history in enumerate(histories):
                history.append(_message(user, turn))
                first = await self._ask(history, user, turn, again=False)
                played.append(first)
                if ask_again:
                    played.append(await self._ask(history, user, turn, again=True))
                history.append({"role": "assistant", "content": first.answer.text})
                told(turn * self._users + user + 1, self._turns * self._users)
        return played

    async def last_turns(self, client: EngineClient) -> list[Turn]:
        """The last prompt of every user once more, to another server."""
        self._client = client
        await self._client.chat([_message(WARM_UP_USER, 0)], ANSWER_TOKENS)
        last = self._turns - 1
        return [
            await self._ask(history[:-1], user, last, again=False)
            for user, history in enumerate(self._histories)
        ]

    async def _ask(self, history: list[Message], user: int, turn: int, *, again: bool) -> Turn:
        before = await self._client.cache_counts()
        answer = await self._client.chat(history, ANSWER_TOKENS)
        found = (await self._client.cache_counts()).since(before)
        return Turn(user, turn, again, answer, found)


def _message(user: int, turn: int) -> Message:
    """What a user says in a turn: always the same words for the same user and turn."""
    draw = random.Random(f"{SEED}:{user}:{turn}")
    words = OPENING_WORDS if turn == 0 else MESSAGE_WORDS
    pairs = [f"{draw.choice(NOUNS)} {draw.choice(VERBS)}" for _ in range(words // 2)]
    return {"role": "user", "content": f"User {user}, turn {turn}: " + " ".join(pairs)}
