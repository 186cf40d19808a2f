"""A chat request made under the field names of another API: its errors are reported under those names."""

from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec

from keepsight.errors import renaming_fields
from keepsight.frontend.api.chat_request import ChatRequest
from keepsight.frontend.prompt.places import NO_PLACES, Places


class RenamedChat(ChatRequest, frozen=True, kw_only=True):
    places: Places = NO_PLACES

    # The other API's names of fields, by those of a chat. Longer paths come before their prefixes.
    OWN_NAMES: ClassVar[Mapping[str, str]] = {}

    def checked(self) -> Self:
        with renaming_fields(self.own_field_name):
            self.check()
        return self

    def without_bulky_fields(self) -> Self:
        return msgspec.structs.replace(super().without_bulky_fields(), places=NO_PLACES)

    def client_field_name(self, field: str) -> str:
        return self.own_field_name(super().client_field_name(field))

    def own_field_name(self, field: str) -> str:
        if field.startswith(("tools[", "tool_choice.")):
            return self._name_of_tool(field.replace(".function", "", 1))
        for name, own in self.OWN_NAMES.items():
            if field == name or field.startswith((f"{name}.", f"{name}[")):
                return own + field.removeprefix(name)
        return self.places.find(field)

    def _name_of_tool(self, field: str) -> str:
        """Return the API's own name of a tool's field; its tools have their fields directly, not in a `function`."""
        raise NotImplementedError
