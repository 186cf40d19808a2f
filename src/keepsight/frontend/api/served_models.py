"""The model names that a request may use: the model's own names, and those of adapters, each a model of its own."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keepsight.api_settings import ApiSettings
from keepsight.errors import ModelNotFoundError
from keepsight.frontend.api.response_parts import ModelCard, ModelList
from keepsight.frontend.http.error_response import json_response
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.requests import Adapter


class ServedModels:
    def __init__(self, model_name: str, settings: ApiSettings, preparer: RequestPreparer) -> None:
        self._model_name, self._preparer = model_name, preparer
        self._adapters: Mapping[str, Adapter] = preparer.adapters
        self._parents = settings.adapter_parents
        self._names = tuple(dict.fromkeys((model_name, *settings.more_model_names, *self._adapters)))
        self._created = int(time.time())

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_all),
            Route("/v1/models/", self.list_all),  # otherwise it would be a model with an empty name
            Route("/v1/models/{model:path}", self.show),
        ]

    def check(self, name: str | None) -> None:
        """Raise ModelNotFoundError if `name` is not served; no name means the model itself."""
        if name and name not in self._names:
            served = ", ".join(map(repr, self._names))
            raise ModelNotFoundError("model", f"{name!r} is not served here; served are: {served}")

    def find_adapter(self, name: str | None) -> Adapter | None:
        return self._adapters.get(name or "")

    def name_answer(self, name: str | None) -> str:
        """Return the name that answers show: an adapter's own, or the first of the model's."""
        adapter = self.find_adapter(name)
        return self._model_name if adapter is None else adapter.name

    async def list_all(self, _http: Request) -> Response:
        cards = [self._describe(name) for name in self._names]
        return json_response(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))

    async def show(self, http: Request) -> Response:
        name = http.path_params["model"]
        self.check(name)
        return json_response(self._describe(name))

    def _describe(self, name: str) -> ModelCard:
        """Describe a model, anew each time: an engine that starts later may have a smaller `max_model_len`."""
        is_adapter, max_model_len = name in self._adapters, self._preparer.max_model_len
        return ModelCard(
            id=name,
            root=self.name_answer(name),
            parent=self._parents.get(name, self._model_name) if is_adapter else None,
            created=self._created,
            max_model_len=max_model_len,
            display_name=name,
            created_at=datetime.fromtimestamp(self._created, UTC),
            max_input_tokens=max_model_len,
        )
