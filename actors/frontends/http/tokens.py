"""`/tokenize` and `/detokenize`: the model's tokenizer, in threads."""

from __future__ import annotations

import msgspec

from ....protocol.errors import ValidationError
from ....protocol.sampling import check_token_ids
from ..face import EngineFace
from .bodies import decode_body, read_body
from .exchange import Exchange
from .generating import check_model
from .off_the_loop import off_the_loop
from .presence import while_present
from .prompts import conversation_of
from .requests import DetokenizeRequest, TokenizeRequest
from .responses import Text, Tokens
from .sending import JSON, encode, send_bytes

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)

MAX_TOKENS = 1 << 20
"""Of an answer of `/tokenize`: a list is made, and written, in one go, with the interpreter's lock held."""


class Tokenizing:
    """The endpoints of one engine, served as `model`."""

    def __init__(self, engine: EngineFace, *, model: str) -> None:
        self._engine = engine
        self._model = model

    async def tokenize(self, exchange: Exchange) -> None:
        """`POST /tokenize`: a text, or a chat as the template has it, to ids."""
        body = await read_body(exchange.scope, exchange.receive)
        request = await decode_body(body, _tokenize_decoder, max_characters=self._engine.prompt_reader.max_characters)
        check_model(request.model, self._model)

        async def work() -> None:
            await send_bytes(exchange.send, await off_the_loop(self._tokens, request), headers=[JSON])

        await while_present(exchange, work, max_pause_s=self._engine.config.max_pause_s)

    async def detokenize(self, exchange: Exchange) -> None:
        """`POST /detokenize`: ids to their text."""
        body = await read_body(exchange.scope, exchange.receive)
        request = await decode_body(body, _detokenize_decoder, max_characters=self._engine.prompt_reader.max_characters)
        check_model(request.model, self._model)

        async def work() -> None:
            await send_bytes(exchange.send, await off_the_loop(self._text, request), headers=[JSON])

        await while_present(exchange, work, max_pause_s=self._engine.config.max_pause_s)

    def _tokens(self, request: TokenizeRequest) -> bytes:
        reader = self._engine.prompt_reader
        if request.messages is not None:
            text, adds = reader.render(conversation_of(request)), bool(request.add_special_tokens)
        elif request.prompt is not None:
            text, adds = request.prompt, request.add_special_tokens is not False
        else:
            raise ValidationError("prompt is missing, and so is messages", field="prompt")
        token_ids = reader.encode(text, add_special_tokens=adds, most=MAX_TOKENS)
        names = [reader.tokenizer.id_to_token(token) for token in token_ids] if request.return_token_strs else None
        return encode(Tokens(len(token_ids), self._engine.capacity.max_model_len, token_ids, names))

    def _text(self, request: DetokenizeRequest) -> bytes:
        if request.tokens is None:
            raise ValidationError("tokens is missing", field="tokens")
        check_token_ids(request.tokens, field="tokens", vocab_size=self._engine.capacity.vocab_size)
        tokenizer = self._engine.prompt_reader.tokenizer
        return encode(Text(tokenizer.decode(request.tokens, skip_special_tokens=False)))
