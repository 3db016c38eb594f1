"""Grammars compiled for this model's tokenizer and matched token by token.

Grammars are compiled on their own thread, once each while cached; every sequence gets a copy of the compiled matcher.
Token masks are computed on the engine thread, only for rows with a grammar.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from engine import TokenizerMissing, find_tokenizer
from moonpool_proto.v1.common_pb2 import Grammar
from moonpool_proto.v1.worker_pb2 import FINISH_COMPLETE, FINISH_NONE, FINISH_STOP, Finish
from worker.errors import GrammarError, RequestRefused
from worker.grammar import LIMITS, on_deep_stack, shortened, to_llguidance

MAX_COMPILED = 64

Bools = NDArray[np.bool_]


class GrammarVocabulary:
    """A model's tokens in the form required by llguidance."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Read the folder's tokenizer. Raises GrammarError if it cannot be used with grammars."""
        try:
            tokenizer = Tokenizer.from_file(str(find_tokenizer(folder)))
        except TokenizerMissing as error:
            raise GrammarError(str(error)) from error
        except Exception as error:  # the library raises no narrower type
            raise GrammarError(f"the tokenizer of {folder} cannot be read: {error}") from error
        self.size = vocab_size
        self.end_ids = frozenset(i for i in end_ids if i < vocab_size)
        # llguidance requires an end token. A model without one gets an extra token that is never allowed.
        self.mock_end: int | None = None
        ends = sorted(self.end_ids)
        if not ends:
            tokenizer.add_special_tokens([AddedToken("<|end of grammar|>", special=True)])
            self.mock_end = tokenizer.get_vocab_size() - 1
            ends = [self.mock_end]
        try:
            self.tokens = LLTokenizer(
                tokenizer.to_str(),
                n_vocab=max(vocab_size, ends[-1] + 1),
                eos_token=ends,
            )
        except Exception as error:
            raise GrammarError(
                f"this model's tokenizer cannot be used with grammars: {shortened(str(error))}"
            ) from error


class GrammarMatcher:
    """Position of one sequence in its grammar."""

    def __init__(self, inner: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self.finish: Finish.ValueType = FINISH_NONE

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end any grammar."""
        return self._vocabulary.end_ids

    def allowed(self) -> Bools:
        """Return bool [V]: the ids that may come next; at the end of the grammar, end tokens only. Raises
        GrammarError."""
        packed = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        self._raise_if_failed()
        allowed = np.unpackbits(packed, bitorder="little")[: self._vocabulary.size].view(np.bool_)
        if self._vocabulary.mock_end is not None:
            allowed[self._vocabulary.mock_end :] = False
        if not allowed.any():
            raise GrammarError("the grammar has reached a state in which no token of this model is allowed")
        return allowed

    def take(self, token: int) -> None:
        """Advance by one token. Raises GrammarError for a token that is not allowed and beyond the library's limits."""
        self._inner.consume_token(token)
        self._raise_if_failed()
        if token in self._vocabulary.end_ids:
            self.finish = FINISH_STOP
        elif not self._vocabulary.end_ids and self._inner.is_stopped():
            self.finish = FINISH_COMPLETE

    def _raise_if_failed(self) -> None:
        if self._inner.is_error():
            raise GrammarError(shortened(self._inner.get_error()))


class GrammarCompiler:
    """Cache of a node's compiled grammars. Lives on the event loop."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._folder, self._vocab_size, self._end_ids = folder, vocab_size, end_ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._vocabulary: GrammarVocabulary | GrammarError | None = None
        self._compiled: OrderedDict[tuple[int, str], asyncio.Future[LLMatcher]] = OrderedDict()

    def warm_up(self) -> None:
        """Read the tokenizer now instead of with the first grammar. Blocks."""
        self._thread.submit(self._try_vocabulary).result()

    def close(self) -> None:
        """End the thread. Blocks until a compilation in progress has ended."""
        self._thread.shutdown(cancel_futures=True)

    def begin(self, grammar: Grammar | None) -> None:
        """Start to compile a grammar in the background, for a later call of `matcher`. Does nothing for None."""
        if grammar is not None:
            self._compile(grammar)

    async def matcher(self, grammar: Grammar | None, generated: NDArray[np.int32]) -> GrammarMatcher | None:
        """Return a matcher advanced by the `generated` ids; None without a grammar. Raises RequestRefused."""
        if grammar is None:
            return None
        try:
            compiled = await asyncio.shield(self._compile(grammar))
            started = asyncio.get_running_loop().run_in_executor(self._thread, self._start, compiled, generated)
            return await started
        except GrammarError as error:
            raise RequestRefused("bad_grammar", str(error)) from error

    def _compile(self, grammar: Grammar) -> asyncio.Future[LLMatcher]:
        key = (grammar.kind, grammar.source)
        found = self._compiled.get(key)
        if found is None:
            loop = asyncio.get_running_loop()
            found = loop.run_in_executor(self._thread, self._compile_now, grammar.kind, grammar.source)
            self._compiled[key] = found
            found.add_done_callback(lambda future: self._keep_if_final(key, future))
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return found

    def _keep_if_final(self, key: tuple[int, str], future: asyncio.Future[LLMatcher]) -> None:
        """Keep successes and invalid grammars in the cache; drop other failures, which may be temporary."""
        final = not future.cancelled() and isinstance(future.exception(), GrammarError | type(None))
        if not final and self._compiled.get(key) is future:
            del self._compiled[key]

    # The following methods run on the compiler thread.

    def _compile_now(self, kind: Grammar.Kind.ValueType, source: str) -> LLMatcher:
        vocabulary = self._try_vocabulary()
        if isinstance(vocabulary, GrammarError):
            raise vocabulary
        form = to_llguidance(kind, source)
        matcher = on_deep_stack(lambda: LLMatcher(vocabulary.tokens, form, log_level=0, limits=LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # copies inherit the automata of the first token
        if matcher.is_error():
            raise GrammarError(shortened(matcher.get_error()))
        return matcher

    def _start(self, compiled: LLMatcher, generated: NDArray[np.int32]) -> GrammarMatcher:
        vocabulary = self._try_vocabulary()
        assert isinstance(vocabulary, GrammarVocabulary)
        matcher = GrammarMatcher(compiled.deep_copy(), vocabulary)
        try:
            for token in generated.tolist():
                matcher.take(token)
        except GrammarError as error:
            raise GrammarError(f"the tokens generated so far do not match the grammar: {error}") from error
        return matcher

    def _try_vocabulary(self) -> GrammarVocabulary | GrammarError:
        if self._vocabulary is None:
            try:
                self._vocabulary = GrammarVocabulary(self._folder, self._vocab_size, self._end_ids)
            except GrammarError as error:
                self._vocabulary = error
        return self._vocabulary
