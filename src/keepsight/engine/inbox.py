"""Where messages wait for the engine's loop, from whatever thread they come.

Knows nothing of what they say.  What was put before the closing is handed out; nothing is taken in after it, so that
each message is either read or known not to be.
"""

import threading

from keepsight.requests import ToEngine


class Inbox:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[ToEngine] = []
        self._is_awake = False
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def has_news(self) -> bool:
        """Whether a wait would end at once."""
        return bool(self._messages) or self._is_awake or self._is_closed

    def try_put(self, message: ToEngine) -> bool:
        """False once it is closed: nobody will read this message."""
        with self._changed:
            if self._is_closed:
                return False
            self._messages.append(message)
            self._changed.notify()
            return True

    def holds(self, message: ToEngine) -> bool:
        """Whether it is still to be handed out."""
        with self._changed:
            return message in self._messages

    def wake(self) -> None:
        """There is something to do that is no message.  Not lost on a loop that is busy: its next wait ends at once."""
        with self._changed:
            self._is_awake = True
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def take(self, *, waits: bool) -> list[ToEngine]:
        """All that have come, in their order.  A wait ends with a message, a waking or the closing."""
        with self._changed:
            while waits and not self.has_news:
                self._changed.wait()
            self._is_awake = False
            messages, self._messages = self._messages, []
            return messages
