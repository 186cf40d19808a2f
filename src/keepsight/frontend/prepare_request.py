"""Turns a client's request into an engine request: all frontend work on a request, in order.

The prompt is laid out from the pictures' geometry alone, and the pictures are named by their content alone. Pixels are
made only on demand; whatever can be refused without them is refused before.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from keepsight.adapter_folder import AdapterFolder
from keepsight.borrowed import is_borrowed
from keepsight.checkpoint_folder import check_is_folder
from keepsight.config import Config, resolve_hasher_algorithm
from keepsight.errors import (
    InvalidArgumentError,
    PictureEmbedsError,
    PromptEmbedsError,
    ReservedTokenError,
    UnreadablePictureError,
)
from keepsight.frontend.identity.borrowed_layouts import BorrowedLayouts
from keepsight.frontend.identity.common_geometries import CommonGeometries
from keepsight.frontend.identity.hash_media import hash_values
from keepsight.frontend.identity.identify_picture import NamedPicture, Picture, PictureIdentifier
from keepsight.frontend.intake.check_kinds import check_kinds, looks_like_a_document, refuse_all, why_no_embeds
from keepsight.frontend.intake.media_intake import NOTHING_DOWNLOADED, Downloaded, MediaIntake
from keepsight.frontend.pixels.make_pixels import RunLook, look_here
from keepsight.frontend.prepared_request import PreparedRequest, makeable_of
from keepsight.frontend.prompt.check_grammar import check_structured_outputs
from keepsight.frontend.prompt.expand_prompt import ExpandedPrompt, MediaPromptFormat, PromptExpander
from keepsight.frontend.prompt.find_beginnings import Beginning, find_beginnings
from keepsight.frontend.prompt.media_of_prompt import NO_UUIDS, MediaOfPrompt, UuidsOfPrompt, parts_of_prompt
from keepsight.frontend.prompt.plain_text import PlainText
from keepsight.frontend.prompt.prompt_limits import PromptLimits, PromptRoom
from keepsight.frontend.prompt.read_messages import Conversation, DocumentPart, PicturePart, read_messages
from keepsight.frontend.prompt.read_token_ids import read_token_ids
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from keepsight.frontend.prompt.sampling_defaults import read_sampling_defaults
from keepsight.frontend.prompt.spell_params import spell_banned, spell_prediction
from keepsight.frontend.prompt.thought_text import find_thought
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.frontend.prompt.unfold_documents import quote_plainly, unfold_documents
from keepsight.image_processor_config import check_options, prefixing_option_errors
from keepsight.media import KINDS, TokenSpan
from keepsight.model_limits import ModelLimits
from keepsight.observe.account import RequestAccount, ShownItem, Span
from keepsight.processor_config import NO_PROCESSOR, ProcessorConfig
from keepsight.requests import MAX_PRIORITY, Adapter, EngineRequest, PromptPin, ThoughtTokens
from keepsight.sampling_params import SamplingParams

# Frontend and engine both hold the salt until the answer is finished.
MAX_SALT_CHARACTERS = 64 * 2**10
# The token id stored at positions whose embedding the client supplied; never looked up.
PLACEHOLDER = 0


@dataclass(frozen=True, slots=True)
class _Terms:
    """The options of a request that do not depend on its prompt."""

    sampling_params: SamplingParams
    cache_salt: str | None
    priority: int
    add_eos: bool = False

    def __post_init__(self) -> None:
        salt, priority = self.cache_salt, self.priority
        if salt is not None and (type(salt) is not str or not 0 < len(salt) <= MAX_SALT_CHARACTERS):
            shown = repr(salt)[:80]
            raise InvalidArgumentError(
                "cache_salt", f"must be a string of 1 to {MAX_SALT_CHARACTERS} characters, not {shown}"
            )
        if type(priority) is not int or abs(priority) > MAX_PRIORITY:
            raise InvalidArgumentError("priority", f"must be an integer of at most 63 bits, not {priority!r}")
        check_structured_outputs(self.sampling_params.structured_outputs)


class RequestPreparer:
    """Prepares requests; shared by all of them, and may be used from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        media_format: MediaPromptFormat | None,
        processor: ProcessorConfig | None,
        limits: ModelLimits,
        identifier: PictureIdentifier,
        intake: MediaIntake,
        sampling_defaults: Mapping[str, Any] | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.expander = PromptExpander(tokenizer, media_format)
        # A marker need not be a token.
        self._as_plain_text = PlainText([*tokenizer.structure, *(media_format.markers if media_format else ())])
        # The checkpoint's values for `SamplingParams` fields that a request leaves unset.
        self.sampling_defaults = sampling_defaults or {}
        # By the names that requests use for them.
        self.adapters = {adapter.name: adapter for adapter in adapters}
        # None: the model reads text only.
        self.processor = processor
        self._limits = PromptLimits(tokenizer, limits.max_model_len, limits.vocab_size)
        # The length of a prompt's vector.
        self.hidden_size = limits.hidden_size
        self._media_token_ids = frozenset() if media_format is None else frozenset(media_format.reserved)
        self._identifier, self.intake = identifier, intake
        # The prefix of request ids. Each frontend has its own, as several may share an engine.
        self.request_prefix = ""
        self._request_numbers = itertools.count()

    @classmethod
    def from_config(
        cls, config: Config, common: CommonGeometries | None = None, run_look: RunLook = look_here
    ) -> "RequestPreparer":
        """`common`: geometries shared by a server's frontends. `run_look`: looks at media that take a decoder."""
        directory = config.directory
        check_is_folder(directory)
        tokenizer = Tokenizer.from_checkpoint(directory)
        impl = config.model_impl
        processor = ProcessorConfig.from_checkpoint(directory, config.image_backend, config.mm_processor_kwargs, impl)
        of_borrowed = None if processor is None else processor.borrowed
        layouts = None if of_borrowed is None else BorrowedLayouts(of_borrowed, run_look)
        media_format = MediaPromptFormat.from_checkpoint(
            directory, tokenizer, layouts.of if layouts else None, is_borrowed=is_borrowed(directory, impl)
        )
        reads_pictures = media_format is not None
        if processor is not None and (media_format is None or "video" not in media_format.forms):
            # Nothing says how a prompt would mark a video.
            processor = replace(processor, film=None)
        template = ChatTemplate.from_checkpoint(directory, tokenizer.special_tokens, reads_pictures=reads_pictures)
        limits = ModelLimits.from_checkpoint(directory, config.max_model_len)
        algorithm = resolve_hasher_algorithm(config.mm_hasher_algorithm)
        identifier = PictureIdentifier(
            _name_model(directory, algorithm),
            algorithm,
            trusts_exif_image_id=config.trust_exif_image_id,
            max_pixels=config.max_image_pixels,
            embeds_shape=(0 if media_format is None else media_format.tokens_per_image, limits.hidden_size),
            common=common,
            run_look=run_look,
            layouts=layouts,
        )
        intake = MediaIntake(config, why_no_embeds(processor))
        defaults = read_sampling_defaults(directory, config.generation_config)
        adapters = [AdapterFolder.read(path).as_adapter(name) for name, path in config.adapter_folders.items()]
        return cls(tokenizer, template, media_format, processor, limits, identifier, intake, defaults, adapters)

    def may_wait_for_workers(self, conversation: Conversation) -> bool:
        """Return whether some of its media, unless already known, are read by worker processes, which may be busy."""
        is_borrowed = self.processor is not None and self.processor.borrowed is not None
        kinds = KINDS if is_borrowed else ("video", "audio")
        return conversation.has_documents or not conversation.kinds.isdisjoint(kinds)

    @property
    def max_model_len(self) -> int:
        """The limit that holds for every engine that may get a request, once it is known."""
        return self._limits.max_model_len

    @max_model_len.setter
    def max_model_len(self, max_model_len: int) -> None:
        self._limits.max_model_len = max_model_len

    def prepare_chat(
        self,
        messages: object,
        params: SamplingParams,
        mm_processor_kwargs: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
        downloaded: Downloaded = NOTHING_DOWNLOADED,
        max_counted_tokens: int | None = None,
    ) -> PreparedRequest:
        """Prepare a chat. `downloaded`: the results of `pictures_to_download`; without them the downloads are awaited.

        With `max_counted_tokens`, the prompt is prepared only to report its tokens, and may have that many, whatever
        the context length.
        """
        terms = _Terms(params, cache_salt, priority)
        conversation = quote_plainly(read_messages(messages), self._as_plain_text)
        # Before the template runs, whose errors say less about media that the model does not take.
        config = self._processor_for(conversation.pictures, mm_processor_kwargs, "messages")
        pictures, fetch = self._fetch(conversation.pictures, cache_salt, downloaded)
        conversation = replace(conversation, pictures=tuple(pictures))
        if conversation.has_documents:
            pages_of = partial(self._identifier.pages_of, cache_salt=cache_salt)
            conversation = unfold_documents(conversation, pages_of, self._as_plain_text, self.intake.check_count)
        text = self.template.render(conversation, tools=tools)
        # An iterator: nothing is rendered before the prompt is known to fit.
        kept = find_beginnings(self.template, conversation, tools)
        # Templates write BOS themselves; if one does not, a processor of transformers adds it, unlike a tokenizer.
        add_bos = config.borrowed is not None and self.tokenizer.lacks_bos(text)
        room = PromptRoom(self._limits, "messages", max_counted_tokens)
        prepared = self._prepare(text, conversation.pictures, terms, config, room, fetch, kept, add_bos=add_bos)
        return replace(prepared, continues_prompt=conversation.end == "text")

    def _fetch(
        self, parts: Sequence[PicturePart], cache_salt: str | None, downloaded: Downloaded = NOTHING_DOWNLOADED
    ) -> tuple[Sequence[PicturePart], Span]:
        """Return the parts with bytes in place of URLs, and the stage; it took no time if there was nothing to read."""
        began = time.monotonic()
        fetched = self.intake.fetch_all(parts, cache_salt, downloaded)
        ended = began if all(part.source is None for part in fetched) else time.monotonic()
        return fetched, Span("fetch", began, ended)

    def split_off_thought(self, prepared: PreparedRequest, conversation: Conversation) -> PreparedRequest:
        """Split off the thought that answers may begin with, if any, and exempt it from the answers' form."""
        form = self.template.thought_form
        if form is None or prepared.text is None:
            return prepared
        thought = find_thought(form, prepared.text, conversation.begun_answer)
        opening, closing = map(self._find_text_token, form)
        if thought is None or opening is None or closing is None:
            return prepared
        tokens = ThoughtTokens(None if thought.is_open else opening, closing)
        request = replace(prepared.engine_request, thought=tokens)
        return replace(prepared, engine_request=request, thought=thought)

    def _find_text_token(self, text: str) -> int | None:
        """Return the token that is exactly this text, unless answers leave it out as a special token; else None."""
        token_id = self.tokenizer.token_id(text)
        return None if token_id is None or self.tokenizer.is_special(token_id) else token_id

    def recognize(self, conversation: Conversation, cache_salt: str | None) -> Conversation | None:
        """Return the conversation with all pictures recognized, so that none has to be read; None if any is unknown."""
        pictures = self._identifier.recognize(conversation.pictures, cache_salt)
        return None if pictures is None else replace(conversation, pictures=pictures)

    def pictures_to_download(self, conversation: Conversation) -> list[PicturePart]:
        if self.processor is None:
            return []  # any media will be refused
        check_kinds(conversation.pictures, self.processor)
        return self.intake.find_remote(conversation.pictures)

    def name_media(self, part: PicturePart, cache_salt: str | None) -> tuple[NamedPicture, ...]:
        """Name one picture by itself, as requests without further options would; for a PDF, name all its pages."""
        return self.name_fetched(self.fetch_media(part, cache_salt, NOTHING_DOWNLOADED), cache_salt)

    def fetch_media(self, part: PicturePart, cache_salt: str | None, downloaded: Downloaded) -> PicturePart:
        """Return one picture, film, sound or PDF with its bytes and the kind that these are."""
        if self.processor is None:
            raise refuse_all([part], part.field)
        [fetched] = self.intake.fetch_all([part], cache_salt, downloaded)
        if not isinstance(content := fetched.source, bytes):
            return fetched
        if looks_like_a_document(content):
            return DocumentPart(content, part.field)
        return replace(fetched, modality=self._identifier.guess_kind(content, part.field, self.processor))

    def name_fetched(self, part: PicturePart, cache_salt: str | None) -> tuple[NamedPicture, ...]:
        pages_of = self._identifier.pages_of
        parts = [page for page, _ in pages_of(part, cache_salt)] if isinstance(part, DocumentPart) else [part]
        config = self._processor_for(parts, None, part.field)
        looked_at = [self._identifier.look_at(each, config, cache_salt) for each in parts]
        return self._identifier.name(looked_at, cache_salt)

    def prefer_held(self, is_held: Callable[[str], bool]) -> None:
        """Use a picture's alias only while something is held under it. `is_held`: returns whether that is so."""
        self._identifier.prefer_held(is_held)

    def has_token(self, token_id: int) -> bool:
        """Return whether the model, or at least its tokenizer, has this token."""
        return self._limits.has_token(token_id) or self.tokenizer.token(token_id) is not None

    def close(self) -> None:
        """Stop the downloads."""
        self.intake.close()

    def prepare_text(
        self,
        prompt: str,
        media: MediaOfPrompt,
        params: SamplingParams,
        mm_processor_kwargs: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        uuids: UuidsOfPrompt = NO_UUIDS,
        *,
        add_eos: bool = False,
    ) -> PreparedRequest:
        """Prepare a prompt written by the caller, with the checkpoint's own marker for each picture, film and sound.

        An item that has a uuid may be None. `add_eos`: end the text as the tokenizer does, if no answer continues it.
        """
        parts = parts_of_prompt(self.expander.find_kinds(prompt), media, uuids)
        terms = _Terms(params, cache_salt, priority, add_eos=add_eos)
        config = self._processor_for(parts, mm_processor_kwargs, "prompt")
        room = PromptRoom(self._limits, "prompt")
        pictures, fetch = self._fetch(parts, cache_salt)
        return self._prepare(prompt, pictures, terms, config, room, fetch, add_bos=self.tokenizer.lacks_bos(prompt))

    def prepare_tokens(
        self, token_ids: Sequence[int], params: SamplingParams, cache_salt: str | None = None, priority: int = 0
    ) -> PreparedRequest:
        began, field = time.monotonic(), "prompt_token_ids"
        token_ids = read_token_ids(token_ids, field)
        for token_id in token_ids:
            self._limits.check_is_token(token_id, field)
            if token_id in self._media_token_ids:
                token = self.tokenizer.token(token_id)
                raise ReservedTokenError(
                    field, f"must not contain {token_id}, {token}: the media it stands for cannot be sent along"
                )
        prompt, terms = ExpandedPrompt(tuple(token_ids), ()), _Terms(params, cache_salt, priority)
        PromptRoom(self._limits, field).check_expanded(prompt)
        request = self._finish(prompt, (), terms)
        return PreparedRequest(request, account=_open_account(request, Span("fetch", began, began)))

    def prepare_embeds(
        self,
        sources: Mapping[str, object],
        params: SamplingParams,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> list[PreparedRequest]:
        """Prepare prompts of one request, by the caller's name for each: [tokens, hidden], the first layer's input."""
        if params.prompt_logprobs is not None:
            raise InvalidArgumentError("prompt_logprobs", "is about a prompt's tokens, but one of embeddings has none")
        terms = _Terms(params, cache_salt, priority)
        try:
            fetched = self.intake.fetch_prompts(sources)
            return [self._prepare_embedded(source, field, terms) for field, source in fetched.items()]
        except (PictureEmbedsError, UnreadablePictureError) as error:
            raise PromptEmbedsError(error.field, error.message) from error

    def _prepare_embedded(self, source: object, field: str, terms: _Terms) -> PreparedRequest:
        began = time.monotonic()
        strips = self._identifier.cut_prompt(source, field, (self.processor or NO_PROCESSOR).image)
        lengths = [strip.layout.num_tokens for strip in strips]
        spans = tuple(map(TokenSpan, itertools.accumulate(lengths, initial=0), lengths))
        prompt = ExpandedPrompt((PLACEHOLDER,) * sum(lengths), spans)
        PromptRoom(self._limits, field).check_expanded(prompt)
        named = self._identifier.name(strips, terms.cache_salt)
        request = self._finish(prompt, named, terms)
        return PreparedRequest(request, named, account=_open_account(request, Span("fetch", began, began)))

    def _prepare(
        self,
        text: str,
        parts: Sequence[PicturePart],
        terms: _Terms,
        config: ProcessorConfig,
        room: PromptRoom,
        fetch: Span,
        kept: Iterable[Beginning] = (),
        *,
        add_bos: bool,
    ) -> PreparedRequest:
        pictures: list[Picture] = []
        try:
            for part in parts:
                pictures.append(self._identifier.look_at(part, config, terms.cache_salt))
                if config.borrowed is not None:
                    # A new size takes a worker's time to lay out: spend none on pictures after the limit is exceeded.
                    room.check_pictures([each.layout for each in pictures])
            request, named = self._prepare_looked_at(text, pictures, terms, room, kept, add_bos=add_bos)
        except Exception:
            self._identifier.forget(pictures)
            raise
        sent_first = sorted(named, key=lambda each: each.picture.source is None)
        return PreparedRequest(request, tuple(sent_first), text=text, account=_open_account(request, fetch))

    def _prepare_looked_at(
        self,
        text: str,
        pictures: Sequence[Picture],
        terms: _Terms,
        room: PromptRoom,
        kept: Iterable[Beginning],
        *,
        add_bos: bool,
    ) -> tuple[EngineRequest, Sequence[NamedPicture]]:
        layouts = [picture.layout for picture in pictures]
        room.check_pictures(layouts)
        room.check_text(text)
        expanded = self.expander.expand(text, layouts, add_bos, room.field, terms.cache_salt, add_eos=terms.add_eos)
        # Checked before any content is hashed.
        room.check_expanded(expanded, layouts)
        named = self._identifier.name(pictures, terms.cache_salt)
        count = self.expander.count_tokens_of
        pins = [
            PromptPin(count(each.text, expanded, layouts, terms.cache_salt, add_bos=add_bos), each.seconds)
            for each in kept
        ]
        return self._finish(expanded, named, terms, pins), named

    def _processor_for(
        self, parts: Sequence[PicturePart], overrides: dict[str, Any] | None, field: str
    ) -> ProcessorConfig:
        if overrides is not None:
            if not isinstance(overrides, dict):
                raise InvalidArgumentError("mm_processor_kwargs", f"must be a mapping of options, not {overrides!r}")
            check_options(overrides, (self.processor or NO_PROCESSOR).request_options)
        if self.processor is None:
            if parts:
                raise refuse_all(parts, field)
            return NO_PROCESSOR
        check_kinds(parts, self.processor)
        with prefixing_option_errors():
            return self.processor.with_overrides(overrides) if overrides else self.processor

    def _finish(
        self,
        prompt: ExpandedPrompt,
        pictures: Sequence[NamedPicture],
        terms: _Terms,
        pins: Sequence[PromptPin] = (),
    ) -> EngineRequest:
        spans = iter(prompt.spans)
        media = tuple(item for named in pictures for item in named.items(spans))
        assert next(spans, None) is None, "more spans than parts of pictures"
        makeable = makeable_of(pictures)
        params = terms.sampling_params
        self._limits.check_named_tokens(params)
        predicted = spell_prediction(self.tokenizer, params.prediction, self._limits) if params.prediction else ()
        return EngineRequest(
            request_id=f"{self.request_prefix}{next(self._request_numbers)}",
            token_ids=prompt.token_ids,
            media=media,
            # The prediction is sent as tokens; its text may be as long as an answer.
            sampling_params=replace(params, prediction=None) if params.prediction else params,
            priority=terms.priority,
            cache_salt=terms.cache_salt,
            banned_runs=tuple(spell_banned(self.tokenizer, params.bad_words)),
            unsent_media=tuple(dict.fromkeys(item.media_hash for item in media if item.media_hash not in makeable)),
            pins=tuple(pin for pin in pins if pin.num_tokens),
            predicted=predicted,
        )


def _open_account(request: EngineRequest, fetch: Span) -> RequestAccount:
    """Return the account of a request that has just been prepared."""
    media = [ShownItem(item.media_hash, item.span.length, item.modality) for item in request.media]
    account = RequestAccount(request.request_id, media, len(request.token_ids), fetch.began)
    if fetch.seconds:
        account.spans.append(fetch)
    account.note("identify", fetch.ended, time.monotonic())
    return account


def _name_model(directory: Path, algorithm: str) -> str:
    """Hash the config: the same in any folder, on any machine. The weights are told apart where embeddings are kept."""
    return hash_values(algorithm, config=(directory / "config.json").read_bytes())
