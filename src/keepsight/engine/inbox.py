"""The queue of messages to the engine loop, from any thread.

Does not look into the messages. Those put before the inbox is closed are handed out; none is accepted afterwards, so
that each message is either read or known not to be.
"""

import threading

from keepsight.requests import Received


class Inbox:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Received] = []
        self._is_awake = False
        self._is_closed = False
        # Whether the loop waits for a message.
        self.is_waited_at = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def has_news(self) -> bool:
        """Return whether a wait would end at once."""
        return bool(self._messages) or self._is_awake or self._is_closed

    def try_put(self, message: Received) -> bool:
        """Add a message. Return False if the inbox is closed and the message will never be read."""
        with self._changed:
            if self._is_closed:
                return False
            self._messages.append(message)
            self._changed.notify()
            return True

    def holds(self, message: Received) -> bool:
        """Return whether the message has not been handed out yet."""
        with self._changed:
            return message in self._messages

    def wake(self) -> None:
        """Wake the loop for work that is not a message. A busy loop does not miss it: its next wait ends at once."""
        with self._changed:
            self._is_awake = True
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def take(self, *, waits: bool) -> list[Received]:
        """Return all messages in order of arrival. With `waits`, first wait for a message, `wake` or `close`."""
        with self._changed:
            self.is_waited_at = waits
            while waits and not self.has_news:
                self._changed.wait()
            self.is_waited_at = self._is_awake = False
            messages, self._messages = self._messages, []
            return messages
