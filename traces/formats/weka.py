"""Traces of coding agents by Weka's kv-cache-tester, which AIPerf replays as `weka_trace`: JSON objects, one per agent.

Each request contains its whole prompt as ids of blocks, which stand for their contents within the agent's trace.
Requests of sub-agents are nested; their times begin with the agent's or with the sub-agent's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, NamedTuple

from traces.fields import RecordFields, object_fields, shown
from traces.formats.base import SessionStarts, SourceSettings, TraceFormat, TraceRecord
from traces.json_values import json_values
from traces.prompt_blocks import PromptBlocks
from traces.row import TraceRow

_REQUESTS = ("n", "s")
_SUBAGENT = "subagent"


class _AgentRequest(NamedTuple):
    start_s: float
    blocks: PromptBlocks
    output_length: int
    session: str
    is_known: bool


class WekaFormat(TraceFormat):
    """Traces of agents. A session is an agent, or one of its sub-agents."""

    name = "weka"
    usual_block_tokens = 64
    has_own_times = False

    def __init__(self, settings: SourceSettings) -> None:
        super().__init__(settings)
        self._starts = SessionStarts(settings)

    def records(self, raw: IO[bytes], source: str) -> Iterator[TraceRecord]:
        """Yield the agents' traces."""
        for place, value in json_values(raw, source, "trace"):
            yield TraceRecord(place, value)

    def rows(self, record: TraceRecord) -> list[TraceRow]:
        """Return the requests of an agent and its sub-agents."""
        fields = object_fields(record.value, record.place)
        scope, agent = fields.text("hash_id_scope"), fields.text("id")
        if scope != "local":
            raise record.place.bad(f"hash_id_scope {shown(scope)}", "local", "unsupported")
        size = self.settings.source_block_tokens or fields.tokens("block_size", least=1)
        found: list[_AgentRequest] = []
        for entry in _entries(fields):
            if entry.text("type") != _SUBAGENT:
                found.append(self._request(entry, agent, agent, size))
                continue
            start_s = entry.time("t", unit="seconds")
            session = f"{agent}/{entry.text('agent_id')}"
            nested = [self._request(each, agent, session, size) for each in _entries(entry)]
            if any(each.start_s < start_s for each in nested):
                nested = [each._replace(start_s=start_s + each.start_s) for each in nested]
            found += nested
        if not found:
            return []
        self.unknown_prompts += sum(not each.is_known for each in found)
        begin_ms = self._starts.next_ms()
        return [
            self._row(
                begin_ms + round(1000 * each.start_s),
                each.blocks.num_tokens,
                each.output_length,
                each.blocks.ids(),
                each.session,
            )
            for each in found
        ]

    def _request(self, entry: RecordFields, agent: str, session: str, size: int) -> _AgentRequest:
        kind = entry.text("type")
        if kind not in _REQUESTS:
            raise entry.place.bad(f"type {shown(kind)}", f"one of {', '.join(_REQUESTS)}, or {_SUBAGENT} at the top")
        input_length = entry.tokens("in", least=1)
        blocks = PromptBlocks(self.block_tokens)
        covered = 0
        if entry.has("hash_ids"):
            # Ids may cover the full blocks only.
            ids = entry.integers("hash_ids")
            if len(ids) > -(-input_length // size):
                raise entry.place.bad(
                    f"{len(ids)} hash_ids for {input_length} tokens", f"at most one id per {size} tokens", "ids"
                )
            covered = min(len(ids) * size, input_length)
            blocks.append_ids(ids, covered, size, scope=agent)
        if covered < input_length:
            name = f"rest of {entry.place.line} {entry.place.detail} of {agent}"
            blocks.append(name.encode("utf-8", "surrogatepass"), input_length - covered)
        return _AgentRequest(
            entry.time("t", unit="seconds"), blocks, entry.tokens("out", least=0), session, covered > 0
        )


def _entries(fields: RecordFields) -> list[RecordFields]:
    """Return the entries of `requests`."""
    requests = fields.get("requests")
    if not isinstance(requests, list):
        raise fields.place.bad(f"requests {shown(requests)}", "a list of requests")
    return [object_fields(each, fields.place.within(f"request {i}")) for i, each in enumerate(requests)]
